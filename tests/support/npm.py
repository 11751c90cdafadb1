"""Packages of npm that tests use, fetched once into the ignored directory `build`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
_FETCH_S = 60
_RESPONSE_TIMEOUT_S = 30


def npm_package(package: str, version: str) -> Path:
    """The directory of a package of npm.

    Raises:
        CannotRun: there is no npm, or no registry that provides the package.
    """
    return npm_packages(f"{package}-{version}", f"{package}@{version}") / package


def npm_packages(name: str, *packages: str) -> Path:
    """The directory of several packages, for NODE_PATH.

    Args:
        name: of the directory; other packages of the same name are fetched beside it.
        packages: `name@version`.

    Raises:
        CannotRun: there is no npm, or no registry that provides them.
    """
    digest = "" if len(packages) == 1 else f"-{sha256(' '.join(packages).encode()).hexdigest()[:8]}"
    target = ROOT / "build" / "npm" / f"{name}{digest}"
    if not target.exists():
        _install(_program("npm"), packages, target)
    return target / "node_modules"


class NodeScript:
    """A script in this directory that uses a package of npm.

    Raises:
        CannotRun: there is no node or npm, or no registry that provides the package.
    """

    def __init__(self, package: str, version: str, script: str) -> None:
        self._node = _program("node")
        self._script = Path(__file__).with_name(script)
        self._modules = npm_package(package, version).parent

    def run(self, given: Any) -> Any:
        """Run it once, with JSON on stdin, and return the JSON of its stdout."""
        done = subprocess.run(
            [self._node, str(self._script)],
            input=json.dumps(given).encode(),
            env={**os.environ, "NODE_PATH": str(self._modules)},
            capture_output=True,
            timeout=_RESPONSE_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise CannotRun(f"{name} is not here")
    return found


def _install(npm: str, packages: Sequence[str], target: Path) -> None:
    """Fetch packages once; several processes may do so concurrently."""
    target.parent.mkdir(parents=True, exist_ok=True)
    options = (
        "--no-save --no-package-lock --ignore-scripts --no-audit --no-fund "
        "--fetch-retries=0 --loglevel=error"
    )
    with tempfile.TemporaryDirectory(dir=target.parent) as room:
        fetched = Path(room) / "fetched"
        fetched.mkdir()
        command = [npm, "install", *options.split(), "--prefix", str(fetched)]
        try:
            done = subprocess.run(
                [*command, *packages],
                capture_output=True,
                text=True,
                timeout=_FETCH_S,
            )
        except subprocess.TimeoutExpired:
            raise CannotRun(f"npm did not end within {_FETCH_S} s") from None
        if done.returncode:
            # The first line gives the error; those after it name hosts and files.
            reason = done.stderr.partition("\n")[0]
            raise CannotRun(f"npm could not fetch {' '.join(packages)}: {reason}")
        # Renamed when complete; another process may have been faster, with the same result.
        with suppress(OSError):
            fetched.rename(target)
    assert target.exists()

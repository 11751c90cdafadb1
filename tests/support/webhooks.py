"""Two other implementations of Standard Webhooks: PyPI's and npm's `standardwebhooks`."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from standardwebhooks import Webhook, WebhookVerificationError

from outbox.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

VERSION = "1.1.1"
ROOT = Path(__file__).parents[2]
# Ignored by git.
INSTALLED = ROOT / "build" / "npm" / f"standardwebhooks-{VERSION}"
SCRIPT = Path(__file__).with_name("standardwebhooks.cjs")
_FETCH_S = 60
_RESPONSE_TIMEOUT_S = 30


class ToSign(NamedTuple):
    """A message to sign at a time in epoch seconds."""

    secret: str
    id: str
    timestamp: int
    body: bytes


class ToVerify(NamedTuple):
    """A request to verify now."""

    secret: str
    headers: Mapping[str, str]
    body: bytes


class Peer(Protocol):
    """Another implementation."""

    def signed(self, what: Iterable[ToSign]) -> list[str]:
        """The signatures of the messages."""
        ...

    def accepts(self, what: Iterable[ToVerify]) -> list[bool]:
        """Whether each request is accepted."""
        ...


class Pypi:
    """The PyPI package, in this process."""

    def signed(self, what: Iterable[ToSign]) -> list[str]:
        return [
            Webhook(each.secret).sign(
                each.id, datetime.fromtimestamp(each.timestamp, tz=UTC), each.body.decode()
            )
            for each in what
        ]

    def accepts(self, what: Iterable[ToVerify]) -> list[bool]:
        return [self._accepts(each) for each in what]

    def _accepts(self, what: ToVerify) -> bool:
        try:
            Webhook(what.secret).verify(what.body, dict(what.headers), json_parse=False)
        except (WebhookVerificationError, ValueError):
            # A signature that cannot be decoded is a ValueError.
            return False
        return True


class Npm:
    """The npm package, in Node: one process for all messages at once.

    Raises:
        CannotRun: there is no node or npm, or no registry that provides the package.
    """

    def __init__(self) -> None:
        self._node = _program("node")
        if not INSTALLED.exists():
            _install(_program("npm"))

    def signed(self, what: Iterable[ToSign]) -> list[str]:
        responses: list[str] = self._run_library(what)
        return responses

    def accepts(self, what: Iterable[ToVerify]) -> list[bool]:
        responses: list[bool] = self._run_library(what)
        return responses

    def _run_library(self, what: Iterable[ToSign | ToVerify]) -> Any:
        asked = [each._asdict() | {"body": base64.b64encode(each.body).decode()} for each in what]
        done = subprocess.run(
            [self._node, str(SCRIPT)],
            input=json.dumps(asked).encode(),
            env={**os.environ, "NODE_PATH": str(INSTALLED / "node_modules")},
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


def _install(npm: str) -> None:
    """Fetch the package once; several processes may do so concurrently."""
    INSTALLED.parent.mkdir(parents=True, exist_ok=True)
    options = (
        "--no-save --no-package-lock --ignore-scripts --no-audit --no-fund "
        "--fetch-retries=0 --loglevel=error"
    )
    with tempfile.TemporaryDirectory(dir=INSTALLED.parent) as room:
        fetched = Path(room) / "fetched"
        fetched.mkdir()
        command = [npm, "install", *options.split(), "--prefix", str(fetched)]
        try:
            done = subprocess.run(
                [*command, f"standardwebhooks@{VERSION}"],
                capture_output=True,
                text=True,
                timeout=_FETCH_S,
            )
        except subprocess.TimeoutExpired:
            raise CannotRun(f"npm did not end within {_FETCH_S} s") from None
        if done.returncode:
            # The first line gives the error; those after it name hosts and files.
            reason = done.stderr.partition("\n")[0]
            raise CannotRun(f"npm could not fetch standardwebhooks: {reason}")
        # Renamed when complete; another process may have been faster, with the same result.
        with suppress(OSError):
            fetched.rename(INSTALLED)
    assert INSTALLED.exists()

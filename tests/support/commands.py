"""Commands run in the process of the tests: fast, and with coverage."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.cli.error_pages import DOCUMENTS_URL
from outbox.cli.main import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.postgres import Database

    Command = Callable[..., "Result"]

_SEE = f"outbox: see {DOCUMENTS_URL}"


@dataclass(frozen=True)
class Result:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one line of JSON on stdout."""
        assert self.code in (0, 1), self.err
        assert self.out.count("\n") == 1
        return orjson.loads(self.out)

    @property
    def error(self) -> str:
        """The one line on stderr, when a command failed, without the line that names a page."""
        assert self.out == ""
        assert self.err.endswith("\n")
        first, *page = self.err.splitlines()
        assert first.startswith("outbox: "), self.err
        assert not page or [each.startswith(_SEE) for each in page] == [True], self.err
        return first.removeprefix("outbox: ")

    @property
    def page(self) -> str | None:
        """The page that the line after the error names, as a path below `docs`."""
        _, found, page = self.err.rstrip("\n").partition(f"\n{_SEE}")
        return page if found else None


@pytest.fixture
def outbox(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Run a command: `outbox("publish", "a.b", OUTBOX_DSN=…, stdin=b"…")`."""
    # Nothing of the machine's: no settings, no outbox.toml.
    for name in list(os.environ):
        if name.startswith(("OUTBOX_", "PG")) or name in ("DATABASE_URL", "NO_COLOR"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def call(*args: object, stdin: bytes = b"", **env: str) -> Result:
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            code = run([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def here(outbox: Command, database: Database) -> Command:
    """Run a command on the migrated database of the test."""

    def call(*args: object, **options: Any) -> Result:
        return outbox(*args, **{"OUTBOX_DSN": database.dsn, **options})

    return call

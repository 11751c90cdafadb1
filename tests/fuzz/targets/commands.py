"""The whole command line: any arguments, without a database."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from typing import Any

from outbox.cli import main
from outbox.cli.error_pages import DOCUMENTS_URL
from outbox.cli.main import COMMANDS, run
from outbox.errors import DatabaseUnavailable
from tests.fuzz.data import Data, fields
from tests.fuzz.target import Target, hold, storable

_LIVELY = ("demo", "listen", "prove", "conform", "relay")
"""Commands that start a process are covered by their own tests, except for their options."""
_EXITS = (0, 2, 3)
_FAULT = re.compile(r"unexpected \w+(Error|Exception|Exit)|Traceback")
OUTPUT_CHARS_MAX = 1_000_000


async def _no_database(*_: Any, **__: Any) -> None:
    raise DatabaseUnavailable("there is no database")


def _prepare() -> None:
    """Use no database, no settings of the environment, and an empty directory."""
    for entry in COMMANDS:
        entry.load()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[2].startswith("cli") and hasattr(module, "connect"):
            module.connect = _no_database  # type: ignore[attr-defined]
    for variable in [
        name for name in os.environ if name.startswith(("OUTBOX_", "PG", "DATABASE_"))
    ]:
        del os.environ[variable]
    os.environ["OUTBOX_DSN"] = "postgresql://nobody@127.0.0.1:1/nothing"
    os.environ["COLUMNS"] = "100"
    os.chdir(tempfile.mkdtemp(prefix="outbox-fuzz-"))


def commands(raw: bytes) -> None:
    """Any arguments end with a documented exit code and, on failure, one line with the reason.

    Another line may name the page that explains it.
    """
    data = Data(raw)
    arguments: list[str] = []
    while not data.is_empty and len(arguments) < 12:
        # The operating system does not accept NUL in arguments.
        arguments.append(data.text().replace("\0", ""))
    if arguments and arguments[0] in _LIVELY:
        arguments.append("--no-such-option")
    if any(each.startswith(("--dsn", "--config")) for each in arguments):
        return  # They would refer to files and servers of this machine.
    out, err = io.StringIO(), io.StringIO()
    stdin = io.TextIOWrapper(io.BytesIO(b'{"a": 1}'), "utf-8")
    before = sys.stdin
    sys.stdin = stdin
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(arguments)
    finally:
        sys.stdin = before
    output = err.getvalue()
    hold(code in _EXITS, f"{arguments} ended with {code}: {output}")
    hold(not _FAULT.search(output), f"{arguments}: {output}")
    hold(len(out.getvalue()) <= OUTPUT_CHARS_MAX, f"{arguments} prints without end")
    if code:
        lines = [line for line in output.splitlines() if not line.startswith("outbox: warning: ")]
        if lines and lines[0].startswith("Usage: "):
            return  # A group without a command prints its help.
        if lines[1:] and lines[-1].startswith(f"{main.PROGRAM}: see {DOCUMENTS_URL}"):
            del lines[-1]
        hold(len(lines) == 1, f"{arguments}: not one line: {output!r}")
        hold(lines[0].startswith(f"{main.PROGRAM}: "), f"{arguments}: {output!r}")
        hold(len(lines[0]) < 4000, f"{arguments}: {len(lines[0])} characters")
        storable(lines[0], "what is said")


_WORDS = [entry.name for entry in COMMANDS if entry.name not in _LIVELY]

TARGETS = (
    Target(
        name="commands",
        short_run_modules=(
            "outbox.cli.main", "outbox.cli.common", "outbox.cli.endpoint", "outbox.cli.replay",
            "outbox.cli.filter_options",
        ),
        one=commands,
        prepare=_prepare,
        seeds=(
            *(fields(name, "--help") for name in _WORDS),
            fields("endpoint", "add", "shop", "https://example.com/", "--type", "order.*",
            "--lanes", "4"),
            fields("endpoint", "add", "a", "https://a.example", "--header", "X-A: b", "--retry",
            "stepped,base=1s"),
            fields("endpoint", "update", "a", "--filter", "@.x == 1", "--timeout", "5s"),
            fields("publish", "order.paid", "--payload", '{"a":1}', "--key", "k", "--once", "o"),
            fields("publish", "order.paid", "--payload", "-", "--header", "a: b", "--expires-in",
            "2h"),
            fields("schedule", "add", "nightly", "0 2 * * *", "order.paid", "--timezone",
            "Europe/Berlin"),
            fields("replay", "shop", "--since", "2026-01-01", "--until", "2h", "--dry-run"),
            fields("dead", "replay", "--endpoint", "a", "--all"), fields("dead", "list", "--after",
            "3"),
            fields("token", "add", "ci", "--scope", "read", "--expires-in", "30d"),
            fields("erase", "--tenant", "t", "--yes"), fields("once", "reset", "a", "--json"),
            fields("trace", "order-7", "--json"), fields("status", "--limit", "1", "--json"),
            fields("apply", "-f", "-", "--dry-run"),
            fields("endpoint", "retries", "stepped,cap=1h"),
            fields("alerts", "--dashboard"), fields("doctor", "--json"), fields("verify", "--json"),
        ),
        words=(*_WORDS, "--json", "--help", "--limit", "--after", "--endpoint", "--all", "--tenant",
               "--type", "--since", "--until", "--lanes", "--filter", "--header", "--retry",
               "--schema",
               "add", "list", "show", "update", "remove", "pause", "resume", "reset", "revoke", "-",
               "--",
               "=", "\u2028", "\x1b[2J", b"\xff", "%s", "{0}", "2026-01-01T00:00:00", "1e999",
               "\x1f"),
        bytes_max=400,
        runs=125,
    ),
)  # fmt: skip

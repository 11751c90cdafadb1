"""No command prints a character that controls a terminal, or that hides or reorders others.

All commands run against `tests.support.hidden_rows`.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import TYPE_CHECKING

import click
import pytest
from structlog.testing import capture_logs

from outbox.cli.main import cli
from outbox.core.model.text import safe
from tests.support.hidden_rows import (
    KEY,
    NAME,
    ONCE,
    SCHEDULE,
    SHOWN,
    TENANT,
    TOKEN,
    add_hidden_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.commands import Command
    from tests.support.postgres import Database

# In the default tier, ruff lets commands print through `echo` only, which has tests of its own.
pytestmark = [pytest.mark.one_major, pytest.mark.full]

URL = "http://127.0.0.1:9/"

VALUES: dict[str, str] = {
    "name": NAME, "names": NAME, "endpoint": NAME, "url": URL, "event": KEY, "id": KEY,
    "tenant": TENANT, "key": ONCE, "policy": "standard", "which": "rules", "table": f"app.{KEY}",
    "file": f"/{NAME}", "path": f"/{NAME}", "cron": "@daily", "type_": "a.b", "scopes": "read",
    "ids": "1", "dead_id": "1", "job_id": "1", "lane": NAME, "sequence": "1", "shell": "bash",
}  # fmt: skip
"""Arguments and required options by name.  A new one needs a value here."""
OF_GROUP = {
    "schedule": {"name": SCHEDULE, "names": SCHEDULE},
    "token": {"name": TOKEN},
    "quota": {"tenant": TENANT},
}
MORE = {
    "publish": ("--key", KEY, "--once", ONCE),
    "dead skip": ("--comment", NAME),
    "endpoint update": ("--name", f"{NAME}2", "--tenant", TENANT),
    "erase": ("--key", KEY, "--dry-run"),
    "trace": ("--payload",),
    "deliveries": (NAME,),
}
SERVERS = {"relay", "api", "listen", "demo", "prove", "conform"}
"""They run until they are stopped; the log has tests of its own."""
FILE = "endpoint export"
"""It prints a file, which is exact unless it goes to a terminal."""
ENDS = {"remove", "revoke", "unset", "reset", "discard", "pause", "update", "rotate-secret"}
SHOWS = {
    "endpoint list", "endpoint show", "endpoint preview", "token list", "quota show",
    "schedule show", "status", "deliveries", "trace", "dead list", "dead show", "journal",
    "once list", "once show", "endpoint remove", "once reset",
}  # fmt: skip
"""Commands that show one of these texts when they succeed."""


def leaves(
    command: click.Command, context: click.Context, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, list[str]]]:
    """All commands, each with the arguments that it needs."""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if name not in SERVERS:
                found = command.get_command(context, name)
                assert found is not None
                yield from leaves(found, context, (*path, name))
        return
    words, values = list(path), VALUES | OF_GROUP.get(path[0], {})
    for each in command.params:
        if isinstance(each, click.Argument) and each.required:
            words.append(values[each.name or ""])
        elif each.required:
            words += [each.opts[0], values[each.name or ""]]
    yield " ".join(path), [*words, *MORE.get(" ".join(path), ())]


@pytest.fixture
def hostile(database: Database) -> Database:
    with capture_logs():
        asyncio.run(add_hidden_rows(database))
    return database


def without_own_styles(text: str) -> str:
    return re.sub(r"\x1b\[(?!8m)[0-9;]*m", "", text)


@pytest.mark.parametrize(
    ("words", "on_terminal"),
    [
        ((), False),
        (("--json",), False),
        ((), True),
    ],
    ids=["text", "json", "terminal"],
)
def test_no_command_prints_a_hidden_character(
    outbox: Command,
    hostile: Database,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    on_terminal: bool,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_terminal, raising=False)
    commands = sorted(leaves(cli, click.Context(cli)), key=lambda each: each[0].split()[-1] in ENDS)
    shown, wrong = set(), set()
    for name, line in commands:
        result = outbox(*line, *words, OUTBOX_DSN=hostile.dsn)
        for text in map(without_own_styles, (result.out, result.err)):
            lines = [each for each in text.split("\n") if safe(each) != each]
            if name == FILE and not on_terminal:
                continue
            if lines or "\nFALSE LINE" in text:
                wrong.add((name, *lines))
        if SHOWN in result.out and result.code in (0, 1):
            shown.add(name)
    assert sorted(wrong) == []
    assert len(commands) > 50
    assert SHOWS - shown == set()

"""No command prints a character that controls a terminal, or that hides or reorders others.

All commands run against rows with such characters in each text that an outsider or an operator
chooses: also in names, which could have them in earlier versions.
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
from outbox.core.model.response import AttemptResult
from outbox.core.model.text import safe
from tests.support.relay import Network, add_endpoint, all_ended, publish, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

HIDDEN = "\u202e\u2066\u200b\ufeff\x9b31m\x1b[8m\x7f\r\nFALSE LINE"
NAME, KEY, TENANT, ONCE = (f"{each}{HIDDEN}" for each in ("shop", "order", "acme", "once"))
URL = "http://127.0.0.1:9/"

CHANGES = """
UPDATE endpoint SET name = '{name}', state_comment = '{name}', state_by = '{name}';
UPDATE replica SET name = '{name}';
UPDATE journal SET actor = '{name}', data = data || jsonb_build_object('comment', '{name}');
UPDATE attempt SET error = '{name}',
       response = response || jsonb_build_object('detail', '{name}', 'body', '{name}');
UPDATE dead_letter
   SET last_response = last_response || jsonb_build_object('body', '{name}');
UPDATE token SET created_by = '{name}';
UPDATE schedule SET state_by = '{name}', state_comment = '{name}', state = 'paused';
"""

VALUES: dict[str, str] = {
    "name": NAME, "names": NAME, "endpoint": NAME, "url": URL, "event": KEY, "id": KEY,
    "tenant": TENANT, "key": ONCE, "policy": "standard", "which": "rules", "table": f"app.{KEY}",
    "file": f"/{NAME}", "path": f"/{NAME}", "cron": "@daily", "type_": "a.b", "scopes": "read",
    "ids": "1", "dead_id": "1", "job_id": "1", "lane": NAME, "sequence": "1",
}  # fmt: skip
"""Arguments and required options by name.  A new one needs a value here."""
OF_GROUP = {
    "schedule": {"name": "nightly", "names": "nightly"},
    "token": {"name": "reader"},
    "quota": {"tenant": TENANT},
}
MORE = {
    "publish": ("--key", KEY, "--once", ONCE),
    "dead skip": ("--comment", NAME),
    "endpoint update": ("--name", f"{NAME}2", "--tenant", TENANT),
    "erase": ("--key", KEY, "--dry-run"),
    "trace": ("--payload",),
}
SERVERS = {"relay", "api", "listen", "demo", "prove", "conform"}
"""They run until they are stopped; the log has tests of its own."""
FILE = "endpoint export"
"""It prints a file, which is exact unless it goes to a terminal."""
ENDS = {"remove", "revoke", "unset", "reset", "discard", "pause", "update", "rotate-secret"}
SHOWS = {
    "endpoint list", "endpoint show", "endpoint preview", "token list", "quota show",
    "schedule show", "status", "trace", "dead list", "dead show", "journal", "once list",
    "once show", "endpoint remove", "once reset",
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
        if isinstance(each, click.Argument):
            words.append(values[each.name or ""])
        elif each.required:
            words += [each.opts[0], values[each.name or ""]]
    yield " ".join(path), [*words, *MORE.get(" ".join(path), ())]


@pytest.fixture
def hostile(database: Database, outbox: Command) -> Database:
    refused = AttemptResult.completed(400, 0.1, headers=(("X-Request-Id", "a"),), body=b"no")

    async def prepare() -> None:
        await add_endpoint(database, all_tenants=True)
        async with running(database, Network(lambda _: refused)):
            await publish(database, {"text": HIDDEN}, key=KEY, tenant=TENANT)
            await all_ended(database)
        async with database.connection(server_settings={"search_path": "relay"}) as db:
            await db.execute("SET session_replication_role = replica")
            await db.execute(CHANGES.format(name=NAME))

    of_tenant = ("--tenant", TENANT)
    for words in (
        ("schedule", "add", "nightly", "@daily", "--type", "a.b", "--key", KEY, *of_tenant),
        ("token", "add", "reader", "--scope", "read", *of_tenant),
        ("publish", "a.b", "--once", ONCE, "--key", KEY, *of_tenant),
        ("quota", "set", TENANT, "--endpoints", "5"),
    ):
        assert outbox(*words, OUTBOX_DSN=database.dsn).code == 0, words
    with capture_logs():
        asyncio.run(prepare())
    return database


def without_own_styles(text: str) -> str:
    return re.sub(r"\x1b\[(?!8m)[0-9;]*m", "", text)


@pytest.mark.parametrize(
    ("words", "on_terminal"),
    [
        ((), False),
        pytest.param(("--json",), False, marks=pytest.mark.full),
        pytest.param((), True, marks=pytest.mark.full),
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
        if safe("\u202e") in result.out and result.code in (0, 1):
            shown.add(name)
    assert sorted(wrong) == []
    assert len(commands) > 50
    assert SHOWS - shown == set()

"""A new setting of an endpoint is an entry of the table and a migration, and nothing else."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.newer_version import ROLLING, newer_version
from tests.support.process import environment
from tests.support.process import outbox as command

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = [pytest.mark.system, pytest.mark.full, pytest.mark.one_major]

BEFORE = "    method: Method = declare("
ENTRY = """    colour: str = declare(
        setting_types.Choice(("grey", "blue", "red")),
        REQUESTS,
        "Colour of the receiver.",
        default="grey",
    )
"""
READ = """
import asyncio, sys, asyncpg
from outbox.store.connection.secrets import CLEAR
from outbox.store.connection.store_connection import StoreConnection
from outbox.store.delivery.endpoints import read_endpoints

async def main():
    db = await asyncpg.connect(
        sys.argv[1], connection_class=StoreConnection, server_settings={"search_path": "relay"}
    )
    ids = [row["id"] for row in await db.fetch("SELECT id FROM endpoint")]
    print(*[each.colour for each in await read_endpoints(db, ids, CLEAR)])

asyncio.run(main())
"""
"""Prints the setting as the owner of the endpoints has it."""


async def test_an_entry_and_a_column_are_enough(database: Database, tmp_path: Path) -> None:
    package = newer_version(tmp_path, ROLLING)
    table = package / "outbox" / "core" / "model" / "endpoint_settings.py"
    text = table.read_text()
    assert BEFORE in text
    table.write_text(text.replace(BEFORE, ENTRY + BEFORE))
    env = {"OUTBOX_DSN": database.dsn}

    async def run(*words: str) -> str:
        ended = await command(*words, env=env, package=package)
        assert ended.code == 0, ended.stderr
        return ended.stdout

    await run("migrate")
    await run("endpoint", "add", "shop", "https://shop.test/in", "--colour", "blue")
    assert "colour: blue" in await run("endpoint", "export")
    assert "colour" in await run("endpoint", "update", "shop", "--colour", "red")
    assert '"colour":"red"' in (await run("endpoint", "show", "shop", "--json")).replace(" ", "")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READ, database.dsn,
        cwd=package, env=environment({"PYTHONPATH": str(package)}), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert out == b"red\n"

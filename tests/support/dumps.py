"""Dumps of a database, whole and in part, and restores of them by PostgreSQL's programs."""

from __future__ import annotations

import asyncio
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

from outbox_devtools.embedded.binaries import find_binaries
from tests.support.postgres import create_roles

if TYPE_CHECKING:
    from tests.support.postgres import Database

OUR_TABLES = """
SELECT string_agg(format('relay.%I', relname), ', ')
  FROM pg_class
 WHERE relnamespace = 'relay'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
   AND relname <> ALL ($1::text[])
"""


class Deadlock(Exception):
    """A relay that runs locked tables in another order, and the program failed."""


def run(database: Database, program: str, *arguments: str, stdin: str | None = None) -> str:
    """Run a program of PostgreSQL."""
    path = find_binaries(database.major).path(program)
    if not Path(path).exists():
        pytest.skip(f"{program} is not installed")
    result = subprocess.run(
        [path, "-d", database.dsn, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    if "deadlock detected" in result.stderr:
        raise Deadlock
    assert result.returncode == 0, result.stderr
    return result.stdout


async def dump(database: Database, *arguments: str) -> str:
    """A dump of the schema, as SQL."""
    return await asyncio.to_thread(run, database, "pg_dump", "--schema", "relay", *arguments)


async def restore(database: Database, dumped: str) -> None:
    """Restore a dump, in a cluster that has the roles to which it grants rights."""
    async with database.at_hand() as db:
        await create_roles(db)
    await asyncio.to_thread(
        run, database, "psql", "-qX", "-v", "ON_ERROR_STOP=1", "-f", "-", stdin=dumped
    )


async def drop_schema(database: Database) -> None:
    """Drop the schema with everything in it, if it exists."""
    async with database.connection() as db:
        while True:
            # A relay that runs may lock the tables in another order.
            with suppress(asyncpg.DeadlockDetectedError):
                await db.execute("DROP SCHEMA IF EXISTS relay CASCADE")
                return


async def truncate(database: Database, *kept: str) -> None:
    """Empty all tables of the schema but some."""
    async with database.at_hand() as db:
        tables = await db.fetchval(OUR_TABLES, kept)
        while True:
            # A relay that runs may lock the tables in another order.
            with suppress(asyncpg.DeadlockDetectedError):
                await db.execute(f"SET LOCAL relay.remove = 'on'; TRUNCATE {tables}")
                return


def parts(dumped: str) -> list[str]:
    """A dump of data alone in parts that can be restored one by one: each table, then the rest."""
    head, *blocks = re.split(r"^(?=COPY |SELECT pg_catalog\.setval)", dumped, flags=re.MULTILINE)
    return [head + block for block in blocks]


def without_column(dumped: str, table: str, column: str) -> str:
    """A dump of data alone, as that of an older version that lacks the last column of a table."""
    copy, rows = re.escape(f"COPY relay.{table} ("), r"(?P<rows>(?:[^\n]*\n)*?)\\\.\n"
    match = re.search(rf"{copy}(?P<columns>.*), {column}\) FROM stdin;\n{rows}", dumped)
    assert match is not None
    kept = "".join(f"{row.rpartition(chr(9))[0]}\n" for row in match["rows"].splitlines())
    block = f"COPY relay.{table} ({match['columns']}) FROM stdin;\n{kept}\\.\n"
    return dumped[: match.start()] + block + dumped[match.end() :]

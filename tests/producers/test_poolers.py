"""Publishing through PgBouncer in transaction mode, with each driver's setting of the guide.

Several clients share fewer sessions of the server, so that a statement which a client prepared is
missing in the next session, or exists there already.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import psycopg2
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

import outbox
from outbox.errors import CannotRun
from tests.support.documents import read
from tests.support.npm import npm_packages
from tests.support.pgbouncer import pgbouncer
from tests.support.relay import fetchval

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.full, pytest.mark.system, pytest.mark.pgbouncer]

GUIDE = "docs/howto/run-behind-pgbouncer.md"
CLIENTS, EVENTS, SESSIONS = 4, 12, 3
OTHER = "SELECT count(*) FROM pg_class WHERE relname = {}"
"""A statement of the application, so that a driver alternates between two."""

NODE = """
const pg = require("pg");
(async () => {
  const client = new pg.Client(process.argv[1]);
  await client.connect();
  for (let n = 0; n < 12; n++) {
    await client.query("BEGIN");
    await client.query("SELECT relay.publish_text(type => $1, payload => $2)", ["a.b", String(n)]);
    await client.query("SELECT count(*) FROM pg_class WHERE relname = $1", ["x"]);
    await client.query("COMMIT");
  }
  await client.end();
})();
"""


async def by_asyncpg(dsn: str) -> None:
    connection = await asyncpg.connect(dsn, statement_cache_size=0)
    for n in range(EVENTS):
        async with connection.transaction():
            await outbox.publish(connection, "a.b", n)
            await connection.fetchval(OTHER.format("$1"), "x")
    await connection.close()


async def by_psycopg(dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, prepare_threshold=None) as connection:
        for n in range(EVENTS):
            async with connection.transaction():
                await outbox.publish(connection, "a.b", n)
                await connection.execute(OTHER.format("%s"), ["x"])


async def by_sqlalchemy(dsn: str, driver: str, **arguments: Any) -> None:
    url = dsn.replace("postgresql:", f"postgresql+{driver}:")
    engine = create_async_engine(url, connect_args=arguments)
    for n in range(EVENTS):
        async with engine.begin() as connection:
            await outbox.publish(connection, "a.b", n)
            await connection.exec_driver_sql(
                OTHER.format("$1" if driver == "asyncpg" else "%s"), ("x",)
            )
    await engine.dispose()


async def by_psycopg2(dsn: str) -> None:
    def publish() -> None:
        connection = psycopg2.connect(dsn)
        for n in range(EVENTS):
            with connection:
                outbox.sync.publish(connection, "a.b", n)
        connection.close()

    await asyncio.to_thread(publish)


async def by_node(dsn: str) -> None:
    try:
        modules = npm_packages("pooled", "pg@8.23.1")
    except CannotRun as error:
        pytest.skip(str(error))
    words = ["node", "-e", NODE, dsn]
    await asyncio.to_thread(
        subprocess.run, words, env={**os.environ, "NODE_PATH": str(modules)}, check=True
    )


DRIVERS: dict[str, tuple[tuple[str, ...], Callable[[str], Awaitable[None]]]] = {
    "asyncpg": (("statement_cache_size=0",), by_asyncpg),
    "psycopg": (("prepare_threshold=None",), by_psycopg),
    "psycopg2": ((), by_psycopg2),
    "SQLAlchemy, asyncpg": (
        ("statement_cache_size", "prepared_statement_cache_size"),
        lambda dsn: by_sqlalchemy(
            dsn, "asyncpg", statement_cache_size=0, prepared_statement_cache_size=0
        ),
    ),
    "SQLAlchemy, psycopg": (
        ("prepare_threshold",),
        lambda dsn: by_sqlalchemy(dsn, "psycopg", prepare_threshold=None),
    ),
    "pg": ((), by_node),
}


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_driver_with_the_setting_of_the_guide_publishes(
    driver: str, database: Database
) -> None:
    settings, publish = DRIVERS[driver]
    document = read(GUIDE)
    assert [each for each in settings if each not in document] == []
    async with pgbouncer(database, pool_size=SESSIONS) as proxy:
        await asyncio.gather(*(publish(proxy.dsn()) for _ in range(CLIENTS)))
    assert await fetchval(database, "SELECT count(*) FROM outbox") == CLIENTS * EVENTS

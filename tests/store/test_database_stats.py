"""Statistics of the database, which the leader reports."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from outbox.store.database_stats import read_database_stats
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.usefixtures("quiet_server")]

PATH = {"server_settings": {"search_path": "relay"}}


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


async def test_an_open_transaction_holds_the_horizon_back(
    database: Database, db: Connection[Any]
) -> None:
    other = await database.connect()
    async with other.transaction(isolation="repeatable_read"):
        await other.execute("SELECT count(*) FROM pg_class")
        age_s = (await read_database_stats(db)).horizon_age_s
        assert age_s is not None
        assert 0 <= age_s < 60


async def test_a_vacuum_does_not_hold_back_the_horizon(
    database: Database, db: Connection[Any]
) -> None:
    other = await database.connect()
    await other.execute(
        "CREATE TABLE public.large WITH (autovacuum_enabled = false) "
        "AS SELECT generate_series(1, 100000) AS n"
    )
    # As slow as can be: it is there for as long as this test looks.
    await other.execute("SET vacuum_cost_delay = 100")
    await other.execute("SET vacuum_cost_limit = 1")

    async def nothing() -> bool:
        return (await read_database_stats(db)).horizon_age_s is None

    vacuum = asyncio.create_task(other.execute("VACUUM public.large"))
    try:
        seen = "SELECT backend_xmin IS NOT NULL FROM pg_stat_activity WHERE pid = $1"
        at_work = "SELECT count(*) FROM pg_stat_progress_vacuum WHERE heap_blks_scanned > 0"
        await until(lambda: db.fetchval(at_work))
        assert await db.fetchval(seen, other.get_server_pid())
        # Another session, such as an ANALYZE, may hold it for a moment.
        await until(nothing)
        assert not vacuum.done()
    finally:
        await db.execute("SELECT pg_cancel_backend($1)", other.get_server_pid())
        await asyncio.gather(vacuum, return_exceptions=True)

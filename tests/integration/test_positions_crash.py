"""Positions over a crash of the server: what a snapshot saw is on disk before its position is.

A commit with `synchronous_commit = off` is visible before it is on disk.  A crash takes it back,
and its id is given to another event.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.position import parse_position
from tests.support.adversary import running
from tests.support.positions import (
    begin_at,
    expect_exact,
    make_small_steps,
    take_snapshot,
    until_all_arrived,
)
from tests.support.relay import Network, add_endpoint, exceptions, fetchval, publish
from tests.support.relay import running as running_relay
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator
    from uuid import UUID

    from tests.support.positions import Taken
    from tests.support.postgres import Database

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.one_major]

SESSION = {"server_settings": {"search_path": "relay", "synchronous_commit": "off"}}
DEFINITION = "SELECT pg_get_functiondef('snapshot_position'::regproc)"
WAITS = "IF NOT isempty(seen) AND NOT pg_is_in_recovery() THEN"
RELOAD = "SELECT pg_reload_conf()"
UNFLUSHED = "SELECT pg_current_wal_flush_lsn() < pg_current_wal_insert_lsn()"
SEEN, LAST = 100, 200
"""A sequence is logged 32 values ahead: with fewer lost events no id would be given again."""
PUBLISH_MANY = "INSERT INTO outbox (type, payload) SELECT 'a.b', '0' FROM generate_series(1, $1)"
EVENT_IDS = "SELECT array_agg(event_id) FROM outbox"


@pytest.fixture
async def sleepy_database(private_database: Database) -> AsyncIterator[Database]:
    """The WAL writer writes seldom, so a crash takes back what nothing else has flushed."""
    server = private_database.server
    await server.execute("ALTER SYSTEM SET wal_writer_delay = '10s'", RELOAD)
    yield private_database
    await server.execute("ALTER SYSTEM RESET wal_writer_delay", RELOAD)


async def crash(database: Database) -> None:
    await asyncio.to_thread(database.server.embedded.restart, immediate=True)


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "does not wait"])
async def test_what_a_position_has_seen_survives_a_crash(
    sleepy_database: Database, waits: bool
) -> None:
    """Without the wait for the disk, an event is lost: another one gets its id."""
    database = sleepy_database
    await add_endpoint(database, "first")
    async with running_relay(database, Network()):
        await publish(database, 0)
        await until(lambda: fetchval(database, "SELECT max(high) = 1 FROM batch"))
    if not waits:
        definition = await fetchval(database, DEFINITION)
        assert WAITS in definition
        await fetchval(database, definition.replace(WAITS, "IF false THEN"))
    async with database.connection(**SESSION) as db:

        async def publish_unflushed() -> bool:
            """Publish; returns whether that is not on disk.  The first one wakes the WAL writer."""
            await db.execute(PUBLISH_MANY, SEEN)
            return bool(await db.fetchval(UNFLUSHED))

        await until(publish_unflushed, what="commits that are not on disk")
        async with db.transaction(isolation="repeatable_read"):
            start = parse_position(await db.fetchval("SELECT snapshot_position()"))
            seen = set(await db.fetchval(EVENT_IDS))
        assert start.seen
        await crash(database)
    async with database.connection(**SESSION) as db:
        kept = set(await db.fetchval(EVENT_IDS))
    await publish(database, *range(1, LAST))
    network = Network()
    await add_endpoint(database, "second", start=start)
    async with running_relay(database, network):
        await publish(database, LAST)
        await until(lambda: LAST in data(network), what="the last event")
    assert (seen <= kept) == waits
    assert (data(network) == list(range(1, LAST + 1))) == waits
    assert await exceptions(database) == {}


def data(network: Network) -> list[Any]:
    """What the endpoint that began at the position has accepted."""
    return [sent.body["data"] for sent in network.accepted if sent.url.endswith("/second")]


async def test_positions_before_a_crash_are_exact_after_it(
    sleepy_database: Database,
    rng: random.Random,
    cursor_seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database = sleepy_database
    make_small_steps(monkeypatch, cursor_seconds)
    await database.server.execute(f"ALTER DATABASE {database.name} SET synchronous_commit = off")
    taken: list[Taken] = []
    begun: list[tuple[UUID, Taken]] = []
    async with running(database, rng, may_crash=True) as run:
        await run.last(cursor_seconds / 8)
        for n in range(8):
            await run.last(rng.random() * 0.1)
            if n == 4:
                run.pause_replicas()
            async with database.connection() as db:
                taken.append(await take_snapshot(db, rng))
        assert taken[-1].position.seen
        await crash(database)
        for n, each in enumerate(taken):
            begun.append((await begin_at(database, each, f"from {n}", 2), each))
        run.resume_replicas()
        await run.last(cursor_seconds / 8)
        await run.finish()
        await until_all_arrived(database, cursor_seconds)
    await expect_exact(database, begun)
    assert run.done["lost connection"]

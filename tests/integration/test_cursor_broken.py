"""A broken sequence: sequencing stops, reports the reason, and resumes after the repair."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest

from outbox.errors import CursorBroken
from outbox.relay.sequencing import sequencer as sequencer_module
from outbox.relay.sequencing.cursor import BatchResult
from tests.support.cursor_checks import NO_VIOLATIONS, check_cursor
from tests.support.relay import BUSY, Network, add_endpoint, fetchval, publish, relay, running
from tests.support.sequencers import REAL, add_endpoints, session, settings
from tests.support.sleeper import sleeper
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.costly

INSERT = "INSERT INTO relay.outbox (type, payload) VALUES ('app.any', '{}') RETURNING id"
HIGHEST = "SELECT max(high) FROM relay.batch"


@pytest.fixture
async def database(database: Database) -> Database:
    """A database with an endpoint and a few sequenced events."""
    await add_endpoints(database, 1)
    return database


@pytest.fixture
def recheck_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken sequence is checked again soon."""
    monkeypatch.setattr(sequencer_module, "BROKEN_RETRY_S", 0.02)


async def _copy_with_id(connection: Connection, own_id: int) -> None:
    """COPY is the only statement that sets a GENERATED ALWAYS id without OVERRIDING."""
    await connection.copy_records_to_table(
        "outbox",
        schema_name="relay",
        columns=["id", "type", "payload"],
        records=[(own_id, "app.copied", "{}")],
    )


BREAKS = {
    "an explicit id": "COPY",
    "set back": "SELECT setval('relay.outbox_id_seq', 2)",
    "restarted": "ALTER SEQUENCE relay.outbox_id_seq RESTART WITH 1",
}


async def _break(connection: Connection, how: str) -> None:
    if how == "COPY":
        await _copy_with_id(connection, 1000)
    else:
        await connection.execute(how)


async def test_a_batch_is_not_written_with_counters_that_are_not_current(
    database: Database,
) -> None:
    """Its sequence numbers would be used twice, or some would be missing."""
    producer, connection = await database.connect(), await session(database)
    relay, store = REAL.build(connection, settings(database))
    await store.check()
    await producer.execute(INSERT)
    assert await relay.sequence_batch() is BatchResult.WRITTEN
    await producer.execute(
        "UPDATE relay.lane_counter SET last_seq = last_seq + 5, by_xid = txid_current()"
    )
    await producer.execute(INSERT)
    with pytest.raises(CursorBroken, match="the last sequence number of lane"):
        await relay.sequence_batch()
    assert await relay.sequence_batch() is BatchResult.WRITTEN
    seqs = "SELECT array_agg(seq ORDER BY seq) FROM relay.delivery"
    assert await producer.fetchval(seqs) == [1, 7]


@pytest.mark.parametrize("how", BREAKS.values(), ids=BREAKS)
async def test_a_batch_fails_on_a_broken_sequence(how: str, database: Database) -> None:
    producer, connection = await database.connect(), await session(database)
    relay, store = REAL.build(connection, settings(database))
    await store.check()
    for _ in range(5):
        await producer.execute(INSERT)
    assert await relay.sequence_batch() is BatchResult.WRITTEN
    await _break(producer, how)
    for _ in range(2):
        with pytest.raises(CursorBroken, match=r"setval$"):
            await relay.sequence_batch()
        # No lock is held, and nothing was written.
        await producer.execute("SELECT FROM relay.cursor FOR UPDATE NOWAIT")
        assert await producer.fetchval(HIGHEST) == 5


@pytest.mark.usefixtures("recheck_soon")
@pytest.mark.parametrize("how", BREAKS.values(), ids=BREAKS)
async def test_sequencing_resumes_after_the_repair(
    how: str, database: Database, logs: list[dict[str, str]]
) -> None:
    producer = await database.connect()
    async with sleeper(database) as relay:
        await relay.sequenced(*[await producer.fetchval(INSERT) for _ in range(5)])
        await _break(producer, how)
        # Wake the sequencer to check at once; a stopped sequencer stays stopped.
        relay.wakeups.published.set()
        with pytest.raises(TimeoutError):
            await relay.sequenced(1000, within_s=0.2)
        await until(lambda: logs, what="the log to say so")
        assert {each["event"] for each in logs} == {"sequencing stopped"}
        # The repair that the message asks for.
        assert re.search("setval", logs[0]["reason"])
        await producer.execute("SELECT setval('relay.outbox_id_seq', 2000)")
        late = await producer.fetchval(INSERT)
        assert late == 2001
        await relay.sequenced(late)
    assert await check_cursor(producer) == NO_VIOLATIONS


UNFIT = {
    "CACHE": ("CACHE 10", "CACHE 1"),
    "INCREMENT": ("INCREMENT 2", "INCREMENT 1"),
    "CYCLE": ("CYCLE", "NO CYCLE"),
    "UNLOGGED": ("SET UNLOGGED", "SET LOGGED"),
}


@pytest.mark.parametrize(("unfit", "fit"), UNFIT.values(), ids=UNFIT)
async def test_an_unsuitable_sequence_is_refused_at_the_start(
    unfit: str, fit: str, database: Database
) -> None:
    if unfit == "SET UNLOGGED" and database.major < 15:
        pytest.skip("before PostgreSQL 15 no sequence is unlogged")
    connection = await session(database)
    _, store = REAL.build(connection, settings(database))
    await connection.execute(f"ALTER SEQUENCE outbox_id_seq {unfit}")
    with pytest.raises(CursorBroken, match="CACHE 1, INCREMENT 1, NO CYCLE"):
        await store.check()
    await connection.execute(f"ALTER SEQUENCE outbox_id_seq {fit}")
    await store.check()


@pytest.mark.usefixtures("recheck_soon")
async def test_nothing_is_sequenced_until_an_unsuitable_sequence_is_repaired(
    database: Database, logs: list[dict[str, str]]
) -> None:
    """With CACHE 10 a session reserves ids without holding the lock, and uses them later."""
    producer = await database.connect()
    await producer.execute("ALTER SEQUENCE relay.outbox_id_seq CACHE 10")
    first = await producer.fetchval(INSERT)
    async with sleeper(database) as relay:
        with pytest.raises(TimeoutError):
            await relay.sequenced(first, within_s=0.3)
        assert await producer.fetchval(HIGHEST) == 0
        assert "CACHE 1" in logs[0]["reason"]
        await producer.execute("ALTER SEQUENCE relay.outbox_id_seq CACHE 1")
        await relay.sequenced(first)
        # The rest of the session's ten ids is discarded by the ALTER.
        await relay.sequenced(await producer.fetchval(INSERT))
    assert await check_cursor(producer) == NO_VIOLATIONS


@pytest.mark.usefixtures("recheck_soon")
@pytest.mark.parametrize(("unfit", "fit"), [UNFIT["CACHE"], UNFIT["INCREMENT"]])
async def test_a_sequence_that_is_altered_later_stops_sequencing_until_its_repair(
    unfit: str,
    fit: str,
    database: Database,
    logs: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sequencer_module.SEQUENCE_CHECK_EVERY_S <= 30, "it is noticed within a minute"
    monkeypatch.setattr(sequencer_module, "SEQUENCE_CHECK_EVERY_S", 0.02)
    producer = await database.connect()
    async with sleeper(database) as relay:
        await relay.sequenced(await producer.fetchval(INSERT))
        await producer.execute(f"ALTER SEQUENCE relay.outbox_id_seq {unfit}")
        async with asyncio.timeout(20):
            while not logs:
                relay.wakeups.published.set()
                await asyncio.sleep(0.01)
        assert "CACHE 1, INCREMENT 1" in logs[0]["reason"]
        assert relay.sequencer.broken
        late = await producer.fetchval(INSERT)
        with pytest.raises(TimeoutError):
            await relay.sequenced(late, within_s=0.2)
        await producer.execute(f"ALTER SEQUENCE relay.outbox_id_seq {fit}")
        await relay.sequenced(late)
        await relay.sequenced(await producer.fetchval(INSERT))
    assert await check_cursor(producer) == NO_VIOLATIONS


async def test_a_stopped_sequencer_limits_its_log_under_load(
    database: Database, logs: list[dict[str, str]]
) -> None:
    """Producers keep notifying a stopped sequencer."""
    producer = await database.connect()
    async with sleeper(database) as relay:
        await relay.sequenced(await producer.fetchval(INSERT))
        await _copy_with_id(producer, 1000)
        relay.wakeups.published.set()
        await until(lambda: logs, what="the log to say so")
        for _ in range(50):
            await producer.execute(INSERT)
            relay.wakeups.published.set()
        assert len(logs) <= 2


@pytest.mark.parametrize("table", ["batch", "cursor"])
async def test_a_truncated_table_is_named(
    table: str, database: Database, logs: list[dict[str, str]]
) -> None:
    await add_endpoint(database)
    network = Network()
    worker = relay(database, network)
    task = asyncio.create_task(worker.run())
    await publish(database, 1)
    await until(lambda: network.accepted)
    await fetchval(database, f"TRUNCATE {table}")
    await publish(database, 2)
    says = f"the table {table} was emptied"
    await until(lambda: any(says in each.get("reason", "") for each in logs))
    assert not task.done()
    worker.stop()
    await task


@pytest.mark.parametrize("table", ["batch", "cursor"])
async def test_a_table_that_was_truncated_before_the_start_is_named(
    table: str, database: Database, logs: list[dict[str, str]]
) -> None:
    await add_endpoint(database, retry={"base_s": 0.02, "factor": 1.0, "cap_s": 0.02})
    refusing, network = Network(lambda _: BUSY), Network()
    async with running(database, refusing):
        await publish(database, 1, 2, 3)
        await until(lambda: refusing.sent)
        await until(lambda: fetchval(database, "SELECT max(seq) = 3 FROM delivery"))
    pending = await fetchval(database, "SELECT count(*) FROM delivery")
    await fetchval(database, f"TRUNCATE {table}")
    worker = relay(database, network)
    task = asyncio.create_task(worker.run())
    says = f"the table {table} was emptied"
    await until(lambda: any(says in each.get("reason", "") for each in logs))
    if table == "batch":  # What was sequenced before is delivered.
        await until(lambda: task.done() or len(network.accepted) == pending)
    assert not task.done()
    worker.stop()
    await task

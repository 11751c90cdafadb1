"""Maintenance beside what applications add to the tables: foreign keys, columns, an own setval."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import asyncpg
import pytest

from outbox.core.sequencing.partition_window import AHEAD, WIDTH
from outbox.relay.cluster.reopening import ReopeningConnection
from outbox.store.connection.store_connection import Worker
from outbox.store.errors import ResponseLost
from outbox.store.retention import partitions
from outbox.store.retention.partitions import ADDED_MAX, PartitionStore
from outbox_doctor.check import Severity
from tests.support.doctor import findings_of
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [pytest.mark.system]

SESSION = {"server_settings": {"search_path": "relay"}}
INVOICES = """
CREATE TABLE invoice (id int PRIMARY KEY, event bigint REFERENCES outbox, paid int DEFAULT 0);
INSERT INTO invoice (id) VALUES (1), (2)
"""
PAY = "UPDATE invoice SET paid = paid + 1 WHERE id = 2"
BEGIN_PERIOD = "INSERT INTO period (kind, number) VALUES ('events', 1)"
DROP_PERIOD = (
    BEGIN_PERIOD + "; UPDATE period SET dropped_at = now() WHERE number = 0 AND kind = 'events'"
)


@pytest.mark.parametrize(
    ("due", "work", "done"),
    [
        (BEGIN_PERIOD, "extend", f"SELECT to_regclass('outbox_{1 + AHEAD}') IS NOT NULL"),
        (DROP_PERIOD, "drop", "SELECT to_regclass('outbox_0') IS NULL"),
    ],
)
async def test_a_table_that_refers_to_the_outbox_does_not_wait_for_maintenance(
    database: Database, monkeypatch: pytest.MonkeyPatch, due: str, work: str, done: str
) -> None:
    """Another transaction of the application writes to it for as long as it likes."""
    monkeypatch.setattr(partitions, "RETRY_FOR_S", 60.0)
    db = await database.connect(**SESSION)
    await db.execute(INVOICES + ";" + due)
    store = PartitionStore(await database.connect(**SESSION))
    holder, payer = [await database.connect(**SESSION) for _ in range(2)]
    await holder.execute("BEGIN; UPDATE invoice SET paid = 1 WHERE id = 1")
    # With one wait of ten seconds, the application would fail.
    await payer.execute("SET statement_timeout = '5s'")
    working = asyncio.create_task(getattr(store, work)())
    waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"
    for _ in range(3):
        await until(lambda: db.fetchval(waits), what="maintenance to wait")
        await payer.execute(PAY)
    assert not working.done()
    assert not await db.fetchval(done)
    await holder.execute("COMMIT")
    await asyncio.wait_for(working, 60)
    assert await db.fetchval(done)
    assert await db.fetchval("SELECT paid FROM invoice WHERE id = 2") == 3
    (finding,) = await findings_of(db, "other objects")
    assert finding.severity is Severity.WARNING
    assert "invoice has a foreign key (invoice_event_fkey) to relay.outbox" in finding.message


async def test_a_detach_is_repeated_on_no_other_connection(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limits are settings of the session; without them, the application would wait for it."""
    monkeypatch.setattr(partitions, "DETACH_TIMEOUTS", ("20s", "20s"))
    db = await database.connect(**SESSION)
    await db.execute(INVOICES + ";" + DROP_PERIOD)
    opened: list[Any] = []

    async def connect(_: int = 0) -> Any:
        opened.append(await database.connect(connection_class=Worker, **SESSION))
        return opened[-1]

    store = PartitionStore(cast("Any", ReopeningConnection(await connect(), connect)))
    holder = await database.connect(**SESSION)
    await holder.execute("BEGIN; UPDATE invoice SET paid = 1 WHERE id = 1")
    working = asyncio.create_task(store.drop())
    end = "SELECT bool_or(pg_terminate_backend(pid)) FROM pg_locks WHERE NOT granted"
    await until(lambda: db.fetchval(end), what="maintenance to wait")
    with pytest.raises(ResponseLost):
        await asyncio.wait_for(working, 20)
    assert len(opened) == 2
    await holder.execute("COMMIT")


async def test_a_period_to_which_rows_refer_keeps_no_other_one(database: Database) -> None:
    db = await database.connect(**SESSION)
    await publish(database, 1)
    await db.execute(INVOICES + "; UPDATE invoice SET event = (SELECT id FROM outbox)")
    await db.execute("INSERT INTO period (kind, number) VALUES ('events', 2), ('log', 1)")
    await db.execute("UPDATE period SET dropped_at = now() WHERE number = 0")
    store = PartitionStore(db)
    with pytest.raises(asyncpg.ForeignKeyViolationError):
        await store.drop()
    kept = "SELECT to_regclass('outbox_0') IS NOT NULL AND to_regclass('batch_0') IS NULL"
    assert await db.fetchval(kept)
    await db.execute("UPDATE invoice SET event = NULL")
    await store.drop()
    assert await db.fetchval("SELECT to_regclass('outbox_0') IS NULL")


@pytest.mark.parametrize("kind", ["STORED", "VIRTUAL"])
async def test_new_partitions_have_the_generated_columns(database: Database, kind: str) -> None:
    db = await database.connect(**SESSION)
    if kind == "VIRTUAL" and db.get_server_version().major < 18:
        pytest.skip("PostgreSQL 18 has them")
    await db.execute(
        "ALTER TABLE outbox ADD COLUMN shop text "
        f"GENERATED ALWAYS AS (split_part(type, '.', 1)) {kind}; {BEGIN_PERIOD}"
    )
    assert await PartitionStore(db).extend() == 1
    await db.execute(f"SELECT setval('outbox_id_seq', {(1 + AHEAD) * WIDTH})")
    await publish(database, 1)
    assert await db.fetchval(f"SELECT shop FROM outbox_{1 + AHEAD}") == "a"
    (finding,) = await findings_of(db, "other objects")
    assert finding.severity is Severity.OK
    assert "generated columns (shop)" in finding.message


async def test_a_sequence_beyond_the_last_partition_gets_its_partitions(
    database: Database,
) -> None:
    """As after a setval: producers fail until the next round of maintenance."""
    db = await database.connect(**SESSION)
    await add_endpoint(database)
    last = 5
    await db.execute(f"SELECT setval('outbox_id_seq', {last * WIDTH})")
    with pytest.raises(asyncpg.CheckViolationError):
        await publish(database, 1)
    found = await findings_of(db, "partitions")
    assert [each.severity for each in found] == [Severity.PROBLEM]
    network = Network()
    async with running(database, network, poll_s=0.05):
        await until(lambda: db.fetchval(f"SELECT to_regclass('outbox_{last}')"), what="partitions")
        await publish(database, 2)
        await until(lambda: network.data() == [2], what="the event")
        await all_ended(database)
    assert await db.fetchval(f"SELECT to_regclass('outbox_{last + 1}') IS NOT NULL")
    assert await exceptions(database) == {}
    assert [each.severity for each in await findings_of(db, "partitions")] == [Severity.OK]


async def test_a_sequence_far_beyond_is_named_with_the_way_back(database: Database) -> None:
    db = await database.connect(**SESSION)
    await publish(database, 1)
    far = (ADDED_MAX + 1) * WIDTH
    await db.execute(f"SELECT setval('outbox_id_seq', {far})")
    store = PartitionStore(db)
    await store.extend()
    assert await store.last_id_beyond() == far
    (finding,) = await findings_of(db, "partitions")
    assert finding.severity is Severity.PROBLEM
    assert f"is at {far}, beyond every partition: inserts fail" in finding.message
    assert "SELECT setval('relay.outbox_id_seq', 1)" in str(finding)
    await db.execute("SELECT setval('outbox_id_seq', 1)")
    await publish(database, 2)

"""When nothing can be sequenced, no replica is ready, and the session to blame is named."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg
import orjson
import pytest

from outbox.cli import summary
from outbox.operations import status
from outbox.store.sequencing.stalls import read_cursor_blocker, read_lock_blocker
from outbox.telemetry import catalogue
from outbox_doctor.check import Severity
from tests.support.doctor import findings, the_one
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.roles import dsn_of, role
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from outbox.operations.status import Overview
    from tests.support.postgres import Database

pytestmark = pytest.mark.system

LEASE_S = 1.0
SOON_S = 20 * LEASE_S
"""Three leases, and as many again for each session that is lost while the machine stops."""
LAGGING = "outbox.relay.lagging"
STALLED = "events cannot be sequenced"
WAITS = "a statement waits for another session"
PATH = {"server_settings": {"search_path": "relay"}}


@asynccontextmanager
async def holding_the_cursor(
    database: Database, statement: str = "SELECT FROM relay.cursor FOR UPDATE"
) -> AsyncIterator[Connection[Any]]:
    """A session of another application that holds the cursor row."""
    name = {"server_settings": {"application_name": "psql of a colleague"}}
    async with database.connection(**name) as holder:
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute(statement)
        yield holder
        if not holder.is_closed():
            await transaction.rollback()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.one_major
async def test_a_held_cursor_makes_every_replica_unready(
    database: Database, logs: list[Any]
) -> None:
    await add_endpoint(database)
    network = Network()
    async with (
        running(database, network, lease_s=LEASE_S) as one,
        running(database, network, lease_s=LEASE_S, poll_s=0.5) as other,
    ):
        await publish(database, 0)
        await until(lambda: network.accepted)
        relays = (one, other)
        async with holding_the_cursor(database) as holder:
            pid = holder.get_server_pid()
            await publish(database, 1)
            named = f"pid {pid}"
            for relay in relays:
                await until(lambda r=relay: named in r.readiness().reason, SOON_S, "the holder")
                condition = relay.readiness()
                assert "psql of a colleague" in condition.reason
                assert f"SELECT pg_terminate_backend({pid})" in condition.public_reason
                assert "colleague" not in condition.public_reason
                series = (await relay.snapshot(0.0)).series
                assert series[catalogue.STALLED][()] > 3 * LEASE_S
        for relay in relays:
            await until(lambda r=relay: r.readiness().ready, what="it to be ready again")
        await all_ended(database)
    output = [each for each in logs if each["event"] == STALLED]
    assert output
    for each in output:
        assert f"pid {pid}" in each["blocked_by"]
        assert each["action"] == f"SELECT pg_terminate_backend({pid})"
    assert not [each for each in logs if "made no progress" in each["event"]], "none is to blame"
    assert await exceptions(database) == {}


@pytest.mark.full
@pytest.mark.one_major
async def test_a_relay_that_cannot_take_the_lead_is_not_ready(database: Database) -> None:
    """No event waits yet."""
    async with (
        holding_the_cursor(database) as holder,
        running(database, Network(), lease_s=LEASE_S) as relay,
    ):
        await until(lambda: relay.readiness().ready)
        named = f"pid {holder.get_server_pid()}"
        await until(lambda: named in relay.readiness().reason, SOON_S, "it to be not ready")


async def test_a_holder_that_waits_itself_is_not_to_blame(database: Database) -> None:
    async with (
        database.connection(**PATH) as connection,
        database.connection(**PATH) as culprit,
        culprit.transaction(),
        holding_the_cursor(database) as holder,
    ):
        await culprit.execute("LOCK TABLE schedule")
        waiting = asyncio.ensure_future(holder.execute("LOCK TABLE relay.schedule"))

        async def is_named() -> bool:
            blocker = await read_cursor_blocker(connection, age_min_s=0)
            return blocker is not None and blocker.pid == culprit.get_server_pid()

        await until(is_named)
        holder.terminate()
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.full
@pytest.mark.one_major
async def test_standbys_see_that_the_leader_makes_no_progress(database: Database) -> None:
    await add_endpoint(database)
    network = Network()
    async with (
        running(database, network, lease_s=LEASE_S, poll_s=0.5) as one,
        running(database, network, lease_s=LEASE_S, poll_s=0.5) as other,
    ):
        await publish(database, 0)
        await until(lambda: network.accepted)
        async with database.connection() as holder, holder.transaction():
            await holder.execute("LOCK TABLE relay.batch IN EXCLUSIVE MODE")
            await publish(database, 1)
            for relay in (one, other):
                await until(lambda r=relay: not r.readiness().ready, SOON_S, "it to be not ready")
        for relay in (one, other):
            await until(lambda r=relay: r.readiness().ready, what="it to be ready again")
        await all_ended(database)


@pytest.mark.full
@pytest.mark.one_major
async def test_a_short_hold_is_not_reported(database: Database, logs: list[Any]) -> None:
    await add_endpoint(database)
    network = Network()
    async with running(database, network, lease_s=20.0) as relay:
        await until(lambda: relay.readiness().ready)
        async with holding_the_cursor(database):
            await publish(database, 1)
            await until(lambda: relay._session.running.sequencer.stall.stalled_s > 0)  # type: ignore[union-attr]
            assert relay.readiness().ready
        await all_ended(database)
        await until(lambda: relay._session.running.sequencer.stall.stalled_s == 0)  # type: ignore[union-attr]
    assert not [each for each in logs if each["event"] == STALLED]


@pytest.mark.full
@pytest.mark.one_major
async def test_a_stall_is_reported_by_an_operational_event(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("store.sequencing.stalls", "relay.sequencing.stall_monitor"):
        monkeypatch.setattr(f"outbox.{module}.LAGGING_S", 0.5)
    await add_endpoint(database, "ops", types=["outbox.**"])
    network = Network()
    payload = f"SELECT payload::text FROM outbox WHERE type = '{LAGGING}'"
    async with (
        running(database, network, lease_s=LEASE_S),
        running(database, network, lease_s=LEASE_S),
    ):
        async with holding_the_cursor(database) as holder:
            await publish(database, 1)
            found = orjson.loads(
                await until(lambda: fetchval(database, payload), what="the event to be published")
            )
            assert found["blocked_by"]["pid"] == holder.get_server_pid()
            assert found["blocked_by"]["application"] == "psql of a colleague"
            assert found["blocked_by"]["state"] == "idle in transaction"
        await all_ended(database)
        await until(lambda: fetchval(database, "SELECT NOT lagging FROM lag_report"))
    assert len(network.accepted) == 1
    assert await fetchval(database, f"SELECT count(*) FROM outbox WHERE type = '{LAGGING}'") == 1


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT FROM relay.cursor FOR UPDATE",
        "SELECT FROM relay.cursor FOR NO KEY UPDATE",
        "UPDATE relay.cursor SET version = version + 1",
        "SAVEPOINT a; UPDATE relay.cursor SET version = version + 1; RELEASE a",
        "LOCK TABLE relay.cursor IN EXCLUSIVE MODE",
    ],
)
async def test_the_holder_of_the_cursor_is_found(database: Database, statement: str) -> None:
    async with database.connection(**PATH) as connection:
        assert await read_cursor_blocker(connection, age_min_s=0) is None
        async with holding_the_cursor(database, statement) as holder:
            blocker = await read_cursor_blocker(connection, age_min_s=0)
            assert blocker is not None
            assert (blocker.pid, blocker.role) == (holder.get_server_pid(), "postgres")
            assert blocker.state == "idle in transaction"
            assert await connection.execute(blocker.end_command) == "SELECT 1"
            await until(holder.is_closed)

        async def is_free() -> bool:
            return await read_cursor_blocker(connection, age_min_s=0) is None

        await until(is_free)


async def test_a_prepared_transaction_is_found(database: Database) -> None:
    async with database.connection(**PATH) as connection:
        await connection.execute(
            "BEGIN; SELECT FROM cursor FOR UPDATE; PREPARE TRANSACTION 'it''s'"
        )
        blocker = await read_cursor_blocker(connection, age_min_s=0)
        assert blocker is not None
        assert (blocker.pid, blocker.prepared_transaction) == (None, "it's")
        assert 'prepared transaction "it\'s" of postgres' in blocker.describe()
        assert "it's" not in blocker.describe(names=False)
        await connection.execute(blocker.end_command)
        assert await read_cursor_blocker(connection, age_min_s=0) is None


async def test_what_a_role_without_privileges_can_see(database: Database) -> None:
    async with role(database, "relay") as name, holding_the_cursor(database) as holder:
        connection: Any = await asyncpg.connect(dsn_of(database, name), **PATH)
        blocker = await read_cursor_blocker(connection, age_min_s=0)
        assert blocker is not None
        assert blocker.pid == holder.get_server_pid()
        assert (blocker.state, blocker.since_s) == (None, None)
        assert blocker.application == "psql of a colleague"
        assert "pg_read_all_stats" in blocker.describe()
        await connection.close()


@pytest.mark.one_major
async def test_status_and_doctor_name_the_holder(database: Database) -> None:
    async with database.connection(**PATH) as connection:
        await publish(database, 1)
        await connection.execute("UPDATE outbox SET created_at = now() - interval '20 s'")
        seen = await status.read_overview(connection, "relay")
        assert seen.blocker is None
        async with holding_the_cursor(database) as holder:
            pid = holder.get_server_pid()

            async def blocked() -> Overview | None:
                seen = await status.read_overview(connection, "relay")
                return seen if seen.blocker is not None else None

            seen = await until(blocked)
            assert seen is not None
            assert seen.blocker is not None
            assert seen.blocker.pid == pid
            (note,) = summary.notes(seen)
            assert f"pid {pid}" in note
            assert f"SELECT pg_terminate_backend({pid})" in note
            assert orjson.loads(orjson.dumps(seen.blocker))["pid"] == pid
            found = await the_one(connection, "sequencing")
            assert f"pid {pid}" in found.message
            assert f"SELECT pg_terminate_backend({pid})" in str(found.action)


@pytest.mark.one_major
@pytest.mark.parametrize("table", sampled(["batch", "outbox", "delivery_run"]))
async def test_the_session_that_locks_a_table_is_named(
    database: Database, logs: list[Any], table: str
) -> None:
    """As VACUUM FULL, CLUSTER and ALTER TABLE do, in a transaction that stays open."""
    await add_endpoint(database)
    network = Network()
    async with running(database, network, lease_s=LEASE_S, poll_s=0.1) as relay:
        await publish(database, 0)
        await until(lambda: network.accepted)
        async with database.connection(**PATH) as doctor:
            locked = f"LOCK TABLE relay.{table} IN ACCESS EXCLUSIVE MODE"
            async with holding_the_cursor(database, locked) as holder:
                pid = holder.get_server_pid()
                # Producers wait only for the outbox itself.
                producing = asyncio.ensure_future(publish(database, 1))
                await until(lambda: f"pid {pid} " in relay.readiness().reason, what="its pid")
                assert not relay.readiness().ready
                assert "colleague" not in relay.readiness().public_reason
                await until(lambda: _actions(logs), what="the log")
                assert _actions(logs) == {f"SELECT pg_terminate_backend({pid})"}
                (found,) = [f for f in await findings(doctor) if f.check == "locks"]
                assert f"pid {pid} " in found.message
                assert found.severity is Severity.PROBLEM
        await producing
        await all_ended(database)
        assert relay.readiness().ready
    assert await exceptions(database) == {}


async def test_statements_behind_a_waiting_lock_are_blocked_by_its_holder(
    database: Database,
) -> None:
    """VACUUM FULL waits for a dump, and everyone else waits behind it."""
    async with (
        database.connection(**PATH) as observer,
        database.connection(**PATH) as reader,
        holding_the_cursor(database, "SELECT FROM relay.batch") as dump,
        database.connection(**PATH) as vacuum,
    ):
        rewriting = asyncio.ensure_future(vacuum.execute("VACUUM FULL batch_0"))
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        await until(lambda: observer.fetchval(f"{waits} AND mode = 'AccessExclusiveLock'"))
        assert await read_lock_blocker(observer, wait_min_s=0) is None
        reading = asyncio.ensure_future(reader.execute("SELECT FROM batch"))

        async def is_named() -> bool:
            blocker = await read_lock_blocker(observer, wait_min_s=0)
            return blocker is not None and blocker.pid == dump.get_server_pid()

        await until(is_named)
        for waiting in (vacuum, reader):
            waiting.terminate()
        await asyncio.gather(rewriting, reading, return_exceptions=True)


def _actions(logs: list[Any]) -> set[str]:
    """What the log recommends against statements that wait."""
    return {each["action"] for each in logs if each["event"] == WAITS}

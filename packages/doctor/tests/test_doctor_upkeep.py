"""Checks of the doctor for the causes of table growth: horizon, autovacuum, notifications."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from outbox_doctor.check import DoctorLimits, Severity
from tests.support.doctor import PATH, findings_of, reported_findings, sql_of, the_one
from tests.support.failover import pair
from tests.support.postgres import Server
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

AT_ONCE = DoctorLimits(transaction_s=0, horizon_transactions=0)


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


# ------------------------------------------------------------------- horizon


@pytest.mark.usefixtures("quiet_server")
@pytest.mark.one_major
async def test_old_transactions_that_keep_dead_rows_are_reported(
    database: Database, db: Connection[Any]
) -> None:
    old = await database.connect(server_settings={"application_name": "report"})
    await old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await old.execute(f"SELECT\n  1 AS {'x' * 50}, 2 AS not_shown")
    two = await database.connect()
    await two.execute("CREATE TABLE public.t AS SELECT 1; BEGIN; DELETE FROM public.t")
    await two.execute(f"PREPARE TRANSACTION 'old {database.name}'")
    slot = f"slot_{database.name}"
    await db.execute(f"SELECT pg_create_physical_replication_slot('{slot}', true)")
    try:
        found = await reported_findings(db, "horizon", limits=AT_ONCE)
        pid = old.get_server_pid()
        output = "\n".join(f"{f.message} {f.action}" for f in found)
        assert re.search(
            rf'pid {pid} \(role postgres, application "report"\), idle in transaction for [\d.]+s, '
            rf"last with SELECT 1 AS {'x' * 48}…, keeps VACUUM",
            output,
        )
        assert f"SELECT pg_terminate_backend({pid})" in output
        assert f"ROLLBACK PREPARED 'old {database.name}'" in output
        assert f"SELECT pg_drop_replication_slot('{slot}')" in output
        assert len(found) == 3
    finally:
        await db.execute(f"SELECT pg_drop_replication_slot('{slot}')")
    assert await reported_findings(db, "horizon") == []
    (fine,) = await findings_of(db, "horizon")
    assert fine.message.startswith("no old transaction holds back VACUUM; the oldest is ")


@pytest.mark.usefixtures("quiet_server")
@pytest.mark.one_major
async def test_an_idle_transaction_without_a_snapshot_keeps_no_rows(
    database: Database, db: Connection[Any]
) -> None:
    idle = await database.connect()
    await idle.execute("BEGIN; SELECT 1")
    assert await reported_findings(db, "horizon", limits=AT_ONCE) == []


@pytest.mark.costly
async def test_a_lagging_replication_slot_is_reported(pg_major: int) -> None:
    server = Server(pg_major, {"wal_level": "logical"})
    with server.embedded:
        async with server.database() as database:
            db = await database.connect(**PATH)
            await db.execute("SELECT pg_create_logical_replication_slot('cdc', 'pgoutput')")
            await db.execute("CREATE TABLE public.t AS SELECT 1")
            (found,) = [
                f
                for f in await reported_findings(
                    db, "horizon", limits=replace(AT_ONCE, transaction_s=9e9)
                )
                if "cdc" in f.message
            ]
            assert "is not in use, and retains" in found.message
            await db.execute(sql_of(found))
            assert await reported_findings(db, "horizon", limits=AT_ONCE) == []


@pytest.mark.full
@pytest.mark.costly
async def test_a_standby_with_hot_standby_feedback_is_reported(pg_major: int) -> None:
    async with pair(pg_major) as database:
        db = await database.connect(**PATH)
        reader = await database.reader()
        await reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        for n in range(3):
            await db.execute("UPDATE cursor SET version = version + $1", n)
        received = "SELECT EXISTS (SELECT FROM pg_stat_replication WHERE backend_xmin IS NOT NULL)"
        await until(lambda: db.fetchval(received), what="the standby's report")
        found = await the_one(db, "horizon", limits=AT_ONCE)
        assert found.message.startswith("the standby of pid ")
        assert "set hot_standby_feedback = off there" in str(found.action)
        await reader.close()


@pytest.mark.full
@pytest.mark.costly
async def test_a_long_analyze_of_autovacuum_is_reported_as_its_own(pg_major: int) -> None:
    slow = {"autovacuum_naptime": "1s", "autovacuum_vacuum_cost_delay": "100ms"}
    server = Server(pg_major, {**slow, "autovacuum_vacuum_cost_limit": 1})
    with server.embedded:
        async with server.database() as database:
            db = await database.connect(**PATH)
            await db.execute("CREATE TABLE public.t AS SELECT n FROM generate_series(1, 9999) n")

            async def reported() -> list[str]:
                found = await reported_findings(db, "horizon", limits=AT_ONCE)
                return [f"{f.message}; {f.action}" for f in found if "public.t" in f.message]

            (text,) = await until(reported, what="the worker")
    assert re.match(
        r"autovacuum's worker of pid (\d+), at work for .*, with autovacuum: (VACUUM )?ANALYZE "
        r"public\.t, keeps VACUUM from removing dead rows; its snapshot is \d+ transactions? old; "
        r"it ends by itself; to end it now: SELECT pg_terminate_backend\(\1\)$",
        text,
    )


# ---------------------------------------------------------------- autovacuum


@pytest.mark.one_major
async def test_autovacuum_disabled_for_a_table_is_reported(db: Connection[Any]) -> None:
    assert await reported_findings(db, "autovacuum") == []
    await db.execute("ALTER TABLE cursor SET (autovacuum_enabled = off)")
    await db.execute("ALTER TABLE attempt_run_0 SET (autovacuum_enabled = false)")
    found = await the_one(db, "autovacuum")
    assert found.message == 'autovacuum is off for "attempt_run_0", "cursor": dead rows accumulate'
    await db.execute(sql_of(found).partition(";")[0])
    found = await the_one(db, "autovacuum")
    assert found.message == 'autovacuum is off for "cursor": dead rows accumulate'
    await db.execute(sql_of(found))
    assert await reported_findings(db, "autovacuum") == []


@pytest.mark.full
@pytest.mark.costly
async def test_autovacuum_disabled_for_the_server_is_reported(pg_major: int) -> None:
    server = Server(pg_major, {"autovacuum": False})
    with server.embedded:
        async with server.database() as database:
            found = await the_one(await database.connect(**PATH), "autovacuum")
            assert found.message.startswith("autovacuum is off on this server")


@pytest.mark.one_major
async def test_many_dead_rows_are_reported(database: Database, db: Connection[Any]) -> None:
    limits = replace(DoctorLimits(), dead_rows_min=50)
    await db.execute("ALTER TABLE cursor SET (autovacuum_enabled = off); ANALYZE cursor")
    old = await database.connect()
    await old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
    assert await reported_findings(db, "dead rows", limits=limits) == []
    for _ in range(60):
        await db.execute("UPDATE cursor SET version = version + 1")
    await db.execute("SELECT pg_stat_force_next_flush()")
    found = await the_one(db, "dead rows", limits=limits)
    assert found.message == (
        "relay.cursor has 60 dead rows and 1 live row, never vacuumed: queries become slower"
    )
    await old.execute("ROLLBACK")
    await db.execute(str(found.action).partition("then ")[2])
    assert await reported_findings(db, "dead rows", limits=limits) == []


@pytest.mark.one_major
async def test_rows_that_are_not_frozen_in_time_are_reported(db: Connection[Any]) -> None:
    assert await reported_findings(db, "wraparound") == []
    found = await reported_findings(
        db, "wraparound", limits=replace(DoctorLimits(), freeze_overdue=0)
    )
    assert {f.severity for f in found} == {Severity.WARNING}
    assert "although autovacuum should start at 200000000" in found[0].message
    assert "transactions old and not frozen" in found[0].message
    assert "although autovacuum should start at 400000000" in found[1].message
    (worst, *_) = await reported_findings(
        db, "wraparound", limits=replace(DoctorLimits(), freeze_problem=0)
    )
    assert worst.severity is Severity.PROBLEM
    await db.execute(str(worst.action).partition("then ")[2])


@pytest.mark.one_major
async def test_sizes_are_reported_by_parent_table(db: Connection[Any]) -> None:
    (found,) = await findings_of(db, "size")
    assert found.severity is Severity.OK
    assert "KiB in all: " in found.message
    assert "all: outbox " in found.message


# ------------------------------------------------------------- notifications


@pytest.mark.usefixtures("quiet_server")
@pytest.mark.one_major
async def test_a_filling_notification_queue_is_reported(
    database: Database, db: Connection[Any]
) -> None:
    stuck = await database.connect(server_settings={"application_name": "deaf"})
    await stuck.execute("LISTEN never")
    await stuck.execute("BEGIN")
    await db.execute(
        "SELECT pg_notify('never', repeat(i::text, 3000)) FROM generate_series(1, 9) i"
    )
    limits = replace(DoctorLimits(), queue_share=1e-9)
    found = await the_one(db, "notify queue", limits=limits)
    assert found.severity is Severity.WARNING
    assert "when it is full, producers fail; if it listens, pid" in found.message
    assert 'application "deaf"' in found.message
    assert f"SELECT pg_terminate_backend({stuck.get_server_pid()})" in str(found.action)
    full = await the_one(db, "notify queue", limits=replace(limits, queue_problem_share=0))
    assert full.severity is Severity.PROBLEM


# --------------------------------------------------------------- connections


@pytest.mark.usefixtures("quiet_server")
@pytest.mark.one_major
async def test_connection_limits_of_the_role_and_the_database_count(
    database: Database, db: Connection[Any]
) -> None:
    assert await reported_findings(db, "connections") == []
    await db.execute(f"ALTER DATABASE {database.name} CONNECTION LIMIT 4")
    found = await the_one(db, "connections")
    assert found.message.startswith(f'3 connections of 4 free, of database "{database.name}"')
    await db.execute(sql_of(found).partition(",")[0])
    assert await reported_findings(db, "connections") == []
    await db.execute("ALTER ROLE postgres CONNECTION LIMIT 5")
    try:
        found = await the_one(db, "connections")
    finally:
        await db.execute("ALTER ROLE postgres CONNECTION LIMIT -1")
    assert 'of role "postgres"' in found.message

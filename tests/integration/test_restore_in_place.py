"""A dump that is restored into the database from which it was taken, whole or in part.

The identity and the timeline are as before, and so are the rows of a relay that runs meanwhile.
Receivers have seen what was delivered after the dump, so its numbers must not get other events.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from outbox.cli.summary import notes
from outbox.errors import CursorBroken
from outbox.operations.criteria import Criteria
from outbox.operations.endpoints.removal import drain_endpoint
from outbox.operations.replays import backfill
from outbox.operations.status import read_overview
from outbox.relay.sequencing import cursor as cursor_module
from outbox.relay.sequencing import sequencer
from outbox.store.errors import Fenced
from outbox_doctor.check import Severity
from tests.integration.test_backfill import LONG_AGO
from tests.integration.test_restore import (
    CHANGES,
    LANES,
    PATH,
    deliver,
    expect_unique_numbers,
)
from tests.integration.test_timeline import Leader
from tests.support.doctor import findings_of, reported_findings, the_one
from tests.support.dumps import (
    Deadlock,
    drop_schema,
    dump,
    parts,
    restore,
    truncate,
    without_column,
)
from tests.support.relay import (
    Network,
    add_endpoint,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.roles import dsn_of, role
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.support.postgres import Database

pytestmark = [pytest.mark.system, pytest.mark.costly]

NEW_LANES_MIN = 10**12
"""Generations below it are counted, and above it have the time in which a history began."""
DATA = "--data-only"


@dataclass(frozen=True)
class InPlace:
    """A way to restore a dump of the same database."""

    dump: Callable[[Database], Awaitable[str]]
    clear: Callable[[Database], Awaitable[None]]
    keeps_lanes: bool = False
    """Nothing is lost by which numbers could be assigned again."""


async def dump_of_an_older_version(database: Database) -> str:
    newer = ("incarnation", "odometer", "odometer_mark")
    dumped = await dump(database, DATA, *(f"--exclude-table=relay.{table}" for table in newer))
    return without_column(dumped, "lane_counter", "by_xid")


def single_table(pattern: str) -> Callable[[Database], Awaitable[str]]:
    return lambda database: dump(database, DATA, "--table", f"relay.{pattern}")


def emptied(table: str) -> Callable[[Database], Awaitable[None]]:
    async def empty(database: Database) -> None:
        await fetchval(database, f"WITH gone AS (DELETE FROM {table} RETURNING 1) TABLE gone")

    return empty


WAYS = {
    "schema": InPlace(dump, drop_schema),
    "data": InPlace(lambda database: dump(database, DATA), truncate),
    "older version": InPlace(
        dump_of_an_older_version, lambda database: truncate(database, "incarnation")
    ),
    "counters": InPlace(single_table("lane_counter"), emptied("lane_counter")),
    "deliveries": InPlace(
        single_table("delivery_run_0"), emptied("delivery_run"), keeps_lanes=True
    ),
}


@asynccontextmanager
async def perhaps_running(
    database: Database, network: Network, *, runs: bool
) -> AsyncIterator[None]:
    if runs:
        async with running(database, network):
            await publish(database, "seen")
            await until(lambda: "seen" in network.data(), what="the first delivery")
            yield
    else:
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "runs"),
    sampled(
        [(way, runs) for way in WAYS for runs in (False, True)],
        lambda row: row in (("schema", False), ("data", True), ("older version", True)),
    ),
)
async def test_no_number_gets_another_event(way: str, runs: bool, database: Database) -> None:
    how = WAYS[way]
    for name in ("shop", "idle"):
        await add_endpoint(database, name, types=["**"] if name == "shop" else ["idle"])
    known = [await deliver(database, 1, 2, 3)]
    dumped = await how.dump(database)
    # Lanes that had no delivery in the dump have one now.
    await publish(database, "idle", type="idle")
    known.append(await deliver(database, "lost 1", "lost 2"))

    network = Network()
    async with perhaps_running(database, network, runs=runs):
        while True:
            await how.clear(database)
            with suppress(Deadlock):
                await restore(database, dumped)
                break
        if not runs and not how.keeps_lanes:
            assert "restored" in await exceptions(database)
        async with running(database, network):
            await publish(database, "idle again", type="idle")
            await publish(database, "new 1", "new 2")
            await until(
                lambda: {"new 1", "new 2", "idle again"} <= set(network.data()), what="the new ones"
            )
    expect_unique_numbers(*known, network)
    if how.keeps_lanes:
        assert await fetchval(database, CHANGES) is None
        return
    assert len(await fetchval(database, CHANGES)) == 1
    assert max(await fetchval(database, LANES)) > NEW_LANES_MIN
    assert "restored" not in await exceptions(database)
    assert await fetchval(database, "SELECT count(*) FROM odometer") == 1
    async with database.connection(**PATH) as db:
        (found,) = await findings_of(db, "timeline")
        assert found.severity is Severity.OK
        assert "new lanes started with the restored database" in found.message
        assert await db.fetchval("SELECT count(*) FROM sequences_behind()") == 0


async def test_no_history_begins_on_half_a_restore(database: Database) -> None:
    """A leader tries after each part of the restore."""
    await add_endpoint(database, lanes=2)
    known = await deliver(database, 1, 2, 3)
    dumped = parts(await dump(database, DATA))
    after = await deliver(database, "lost 1", "lost 2")
    await truncate(database)
    reasons = set()
    for part in dumped:
        await restore(database, part)
        try:
            await try_to_lead(database)
        except CursorBroken as broken:
            reasons.add(str(broken).partition(":")[0])
            assert await fetchval(database, "SELECT count(*) FROM lane") in (0, 2)
        except Fenced:
            pass
    assert "this state was restored, and is not complete" in reasons
    network = await deliver(database, "new 1", "new 2")
    assert network.data() == ["new 1", "new 2"]
    expect_unique_numbers(known, after, network)
    assert await exceptions(database) == {}


async def status_notes(database: Database, **options: Any) -> str:
    async with database.connection(**PATH, **options) as db:
        return "\n".join(notes(await read_overview(db, "relay")))


async def try_to_lead(database: Database) -> None:
    leader = await Leader(database).begin()
    try:
        await leader.turn()
    finally:
        await leader.db.execute("DELETE FROM replica")
        await leader.db.close()


@pytest.mark.slow
@pytest.mark.full
async def test_a_relay_runs_while_tables_are_restored_one_by_one(database: Database) -> None:
    await add_endpoint(database, lanes=2)
    known = await deliver(database, 1, 2, 3)
    dumped = parts(await dump(database, DATA))
    after = await deliver(database, "lost 1", "lost 2")
    network = Network()
    async with perhaps_running(database, network, runs=True):
        await truncate(database)
        for part in dumped:
            await restore(database, part)
        await publish(database, "new 1", "new 2")
        await until(lambda: {"new 1", "new 2"} <= set(network.data()), what="the new ones")
    expect_unique_numbers(known, after, network)
    assert await exceptions(database) == {}


async def test_nothing_begins_while_pg_restore_runs(database: Database) -> None:
    await add_endpoint(database)
    await deliver(database, 1)
    await fetchval(database, "UPDATE incarnation SET by_xid = NULL RETURNING 1")
    name = {"server_settings": {"application_name": "pg_restore"}}
    async with database.connection(**name):
        with pytest.raises(CursorBroken, match="pg_restore is running"):
            await try_to_lead(database)
        async with database.connection(**PATH) as db:
            finding = await the_one(db, "timeline")
        assert finding.severity is Severity.PROBLEM
        assert "pg_restore is running" in finding.message
        assert "pg_restore is running" in (await status_notes(database))
    assert await fetchval(database, CHANGES) is None
    network = await deliver(database, 2)
    assert network.data() == [2]
    assert len(await fetchval(database, CHANGES)) == 1


async def test_an_endpoint_that_is_drained_lacks_nothing(database: Database) -> None:
    """Its subscription has ended, and it is active as long as a lane of it is blocked."""
    for name in ("shop", "leaving"):
        await add_endpoint(database, name)
    await deliver(database, 1)
    async with database.connection(**PATH) as db:
        await drain_endpoint(db, "relay", "leaving", actor="test")
        assert await reported_findings(db, "complete") == []
    assert await exceptions(database) == {}
    await fetchval(database, "UPDATE incarnation SET by_xid = NULL RETURNING 1")
    network = await deliver(database, 2)
    assert network.data() == [2]
    assert len(await fetchval(database, CHANGES)) == 1


async def test_least_privilege_suffices(database: Database) -> None:
    """For the beginning of new lanes in a restored state, and for the status before."""
    await add_endpoint(database)
    known = await deliver(database, 1)
    await fetchval(database, "DELETE FROM odometer RETURNING 1")
    await fetchval(database, "UPDATE incarnation SET by_xid = NULL RETURNING 1")
    async with role(database, "reader") as reader, role(database, "relay") as relay:
        assert "new lanes have not begun" in await status_notes(database, user=reader)
        network = Network()
        async with running(database, network, dsn=dsn_of(database, relay)):
            await publish(database, 2)
            await until(lambda: network.data() == [2], what="the new event")
        assert await status_notes(database, user=reader) == ""
    expect_unique_numbers(known, network)
    assert len(await fetchval(database, CHANGES)) == 1
    assert await fetchval(database, "SELECT count(*) FROM odometer") == 1


async def test_a_lost_incarnation_is_awaited_and_then_replaced(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_endpoint(database)
    await deliver(database, 1)
    await fetchval(database, "DELETE FROM incarnation RETURNING 1")
    with pytest.raises(CursorBroken, match="incarnation is empty"):
        await try_to_lead(database)
    assert "nothing is sequenced: this state was restored" in await status_notes(database)
    # Longer than several attempts to sequence.
    monkeypatch.setattr(cursor_module, "RESTORE_WAIT_S", 1.0)
    monkeypatch.setattr(sequencer, "BROKEN_RETRY_S", 0.1)
    network = await deliver(database, 2)
    assert network.data() == [2]
    assert await fetchval(database, "SELECT incarnation_holds()")
    assert await status_notes(database) == ""


# --------------------------------------------------------------------- no restore

REWRITES = {
    "VACUUM FULL": "VACUUM FULL {}",
    "VACUUM FREEZE": "VACUUM (FREEZE) {}",
    "CLUSTER": "CLUSTER {} USING {}_pkey",
    "ADD COLUMN": "ALTER TABLE {} ADD COLUMN IF NOT EXISTS more text DEFAULT 'x'",
    "row locks": "SELECT FROM {} FOR UPDATE",
}


async def test_rewritten_tables_begin_no_lanes(database: Database) -> None:
    await add_endpoint(database)
    await deliver(database, 1)
    for rewrite in REWRITES.values():
        async with database.connection(**PATH) as db:
            for table in ("incarnation", "lane_counter"):
                await db.execute(rewrite.replace("{}", table))
        network = await deliver(database, 2)
        assert network.data() == [2], rewrite
        assert await fetchval(database, LANES) == [1], rewrite
    assert await fetchval(database, CHANGES) is None
    assert await exceptions(database) == {}


async def test_a_schema_without_its_first_rows_is_named(database: Database) -> None:
    """Also where the state is restored, so that the leader would begin new lanes."""
    await add_endpoint(database)
    await fetchval(database, "UPDATE incarnation SET by_xid = NULL RETURNING 1")
    leader = await Leader(database).begin()
    for table in ("batch", "cursor"):
        await fetchval(database, f"WITH gone AS (DELETE FROM {table} RETURNING 1) TABLE gone")
        with pytest.raises(CursorBroken, match=f"the table {table} was emptied"):
            await leader.turn()
        with pytest.raises(CursorBroken, match="was emptied"):
            await status_notes(database)
    await leader.db.close()


@pytest.mark.parametrize("kind", ["period", "lane_counter"])
async def test_an_emptied_table_is_a_reason(kind: str, database: Database) -> None:
    """Sequencing stops and says so, instead of ending the relay by an unexpected error."""
    await add_endpoint(database)
    await deliver(database, 1)
    await publish(database, 2)
    await fetchval(database, f"WITH gone AS (DELETE FROM {kind} RETURNING 1) TABLE gone")
    async with running(database, Network()) as worker:
        readiness: Any = await until(
            lambda: (r := worker.readiness()).reason is not None and kind in r.reason and r,
            what="the reason",
        )
        assert not readiness.ready
    async with database.connection(**PATH) as db:
        check, what = {"period": ("rows", "period"), "lane_counter": ("complete", "no counter")}[
            kind
        ]
        found = await findings_of(db, check)
        assert any(what in f.message for f in found)


async def test_ids_of_backfills_are_not_assigned_again(database: Database) -> None:
    """The id is a part of the X-Delivery, and a restore sets the sequence back."""
    ids = []
    await add_endpoint(database)
    await deliver(database, 1)
    for _ in range(2):
        async with database.connection(**PATH) as db:
            ids.append(
                await backfill.request_backfill(
                    db, "relay", Criteria("shop", since=LONG_AGO), actor="test"
                )
            )
            await db.execute(
                "DELETE FROM replay_job_endpoint; DELETE FROM replay_job;"
                "SELECT setval('replay_job_id_seq', 1, false)"
            )
    assert len(set(ids)) == 2

"""End to end, with real processes: relays are killed, frozen, stopped and started."""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.process import outbox as command
from tests.support.process import relay_process
from tests.support.relay import add_endpoint, all_ended, exceptions, publish, shared_out
from tests.support.waiting import until
from tests.support.wire import Wire

if TYPE_CHECKING:
    from pathlib import Path
    from uuid import UUID

    from asyncpg import Connection

    from tests.support.postgres import Database
    from tests.support.process import RelayProcess

pytestmark = pytest.mark.one_major

LEASE_S = 1.0
LONG_LEASE_S = 120.0
SOON_S = LONG_LEASE_S / 6


class Relays:
    """Relays on one database, and a receiver that distinguishes their requests."""

    def __init__(self, database: Database, tmp_path: Path, wire: Wire) -> None:
        self.database = database
        self.wire = wire
        self._tmp_path = tmp_path
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Relays:
        await self._stack.__aenter__()
        self.url = await self._stack.enter_async_context(self.wire.serve())
        self.db: Connection[Any] = await self._stack.enter_async_context(
            self.database.connection(server_settings={"search_path": "relay"})
        )
        return self

    async def __aexit__(self, *about: Any) -> bool | None:
        return await self._stack.__aexit__(*about)

    async def start(self, name: str, lease_s: float = LEASE_S) -> RelayProcess:
        env = {"OUTBOX_DSN": self.database.dsn, "OUTBOX_LEASE_S": f"{lease_s:g}"}
        relay = await self._stack.enter_async_context(
            relay_process(env, self._tmp_path / f"{name}.log")
        )
        self.wire.pids.add(pid_of(relay))
        await until(lambda: self.replica(relay), what=f"{name} to register")
        return relay

    async def replica(self, relay: RelayProcess) -> int | None:
        """The newest replica of the process, running or not yet expired."""
        found: int | None = await self.db.fetchval(
            "SELECT max(id) FROM replica WHERE name LIKE '%:' || $1", str(pid_of(relay))
        )
        return found

    async def owners(self) -> dict[UUID, int | None]:
        rows = await self.db.fetch("SELECT endpoint_id, replica_id FROM ownership")
        return {r["endpoint_id"]: r["replica_id"] for r in rows}

    async def settled(self) -> bool:
        """Whether every registered replica owns its share."""
        registered = await self.db.fetchval("SELECT count(*) FROM replica")
        return await shared_out(self.database, registered)

    async def claims(self, after: int = 0) -> list[Any]:
        """The ownership changes in the journal, by sequence, oldest first."""
        return await self.db.fetch(
            "SELECT id, at, kind, actor, endpoint_id, data::text FROM journal"
            " WHERE kind IN ('endpoint_claimed', 'endpoint_released') AND id > $1 ORDER BY id",
            after,
        )


def pid_of(relay: RelayProcess) -> int:
    assert relay.process is not None
    return relay.process.pid


@pytest.fixture
async def relays(database: Database, tmp_path: Path) -> Any:
    async with Relays(database, tmp_path, Wire(lambda _: False)) as relays:
        yield relays


async def add_endpoints(relays: Relays, number: int) -> None:
    for n in range(number):
        await add_endpoint(relays.database, f"e{n}", url=relays.url, types=["a.b"])


# ---------------------------------------------- killed and stopped relays


@pytest.mark.full
@pytest.mark.slow
async def test_deliveries_of_a_killed_relay_are_sent_by_another(relays: Relays) -> None:
    await add_endpoints(relays, 12)
    first, second = await relays.start("first"), await relays.start("second")
    await until(relays.settled, what="the endpoints to be shared out")
    owned = {e for e, owner in (await relays.owners()).items() if owner is not None}
    lost = await relays.replica(first)
    lost_endpoints = {e for e, owner in (await relays.owners()).items() if owner == lost}
    assert lost_endpoints
    assert lost_endpoints < owned
    before = (await relays.claims())[-1]["id"]
    await first.end(signal.SIGKILL)
    await publish(relays.database, "after the kill")
    await all_ended(relays.database, timeout_s=30)
    assert {each.pid for each in relays.wire.arrived} == {pid_of(second)}
    successor = f"replica {await relays.replica(second)}"
    moved = await relays.claims(after=before)
    assert {(r["endpoint_id"], r["kind"], r["actor"]) for r in moved} == {
        (e, kind, successor)
        for e in lost_endpoints
        for kind in ("endpoint_released", "endpoint_claimed")
    }
    assert all("lease expired" in r["data"] for r in moved if r["kind"] == "endpoint_released")
    assert await exceptions(relays.database) == {}


@pytest.mark.full
async def test_a_new_replica_gets_its_share_and_a_clean_stop_releases_it_at_once(
    relays: Relays,
) -> None:
    """Another replica would acquire them after a fifth of the lease, without a notification."""
    await add_endpoints(relays, 12)
    first = await relays.start("first", LONG_LEASE_S)
    await until(relays.settled, what="the endpoints to be claimed")
    second = await relays.start("second", LONG_LEASE_S)
    await until(relays.settled, SOON_S, "the endpoints to be shared out")
    assert await first.end() == 0
    await publish(relays.database, "after the stop")
    await all_ended(relays.database, timeout_s=SOON_S)
    assert {each.pid for each in relays.wire.arrived} == {pid_of(second)}
    freed = [r for r in await relays.claims() if r["kind"] == "endpoint_released"]
    assert any("clean stop" in r["data"] for r in freed)
    assert await exceptions(relays.database) == {}


# ------------------------------------------------------------- a fenced relay


@pytest.mark.slow
async def test_a_fenced_relay_writes_nothing_and_closes_its_requests(
    relays: Relays,
) -> None:
    await add_endpoints(relays, 24)
    wire = relays.wire
    frozen = await relays.start("frozen")
    zombie = pid_of(frozen)
    wire.holds = lambda arrived: arrived.pid == zombie
    was = await relays.replica(frozen)
    await publish(relays.database, "one", "two", "three")
    await until(lambda: len(wire.arrived) == 24, what="a request in every lane")

    assert frozen.process is not None
    frozen.process.send_signal(signal.SIGSTOP)
    for arrived in wire.arrived[:12]:
        arrived.response()
    successor = await relays.start("heir")
    await all_ended(relays.database, timeout_s=30)
    assert len(wire.requests_of(pid_of(successor))) == 24 * 3
    written = "SELECT count(*) FROM attempt WHERE replica_id = $1"
    assert await relays.db.fetchval(written, was) == 0

    frozen.process.send_signal(signal.SIGCONT)
    await until(lambda: relays.replica(frozen), what="it to register anew")
    now = await relays.replica(frozen)
    assert now is not None
    assert was is not None
    assert now > was
    # Now: it may be replaced, too, if the machine stops for longer than the lease.
    born_at = await relays.db.fetchval(
        "SELECT extract(epoch FROM started_at)::float8 FROM replica WHERE id = $1", now
    )
    # Half of its requests had responses waiting, the others were open.
    await until(lambda: all(a.closed for a in wire.arrived[12:24]), what="it to close them")
    wire.holds = lambda _: False
    await until(relays.settled, what="it to get endpoints again")
    await publish(relays.database, "four")
    await all_ended(relays.database, timeout_s=20)

    sent = wire.requests_of(zombie)
    assert [a for a in sent[24:] if a.at < born_at] == [], "it sent without a lease"
    assert {a.seq for a in sent[24:]} == {4}, "it sent what others had delivered"
    assert sent[24:], "it got nothing to do any more"
    assert await relays.db.fetchval(written, was) == 0
    copies: dict[tuple[str, int], set[str]] = defaultdict(set)
    for arrived in wire.arrived:
        copies[arrived.lane, arrived.seq].add(arrived.delivery)
    assert len(copies) == 24 * 4
    assert all(len(each) == 1 for each in copies.values()), "a copy with another X-Delivery"
    assert await exceptions(relays.database) == {}


@pytest.mark.full
async def test_a_frozen_leader_delays_events_by_a_tick_and_resumes_as_a_standby(
    relays: Relays,
) -> None:
    """Its lease of two minutes is still valid: only missing activity reveals that it is stuck."""
    await add_endpoints(relays, 12)
    first = await relays.start("first", LONG_LEASE_S)
    leader = "SELECT writer FROM cursor"
    leads = await relays.replica(first)
    await until(lambda: _query_returns(relays, leader, leads), what="it to lead")
    second = await relays.start("second", LONG_LEASE_S)
    await until(relays.settled, SOON_S, "the endpoints to be shared out")
    assert first.process is not None
    first.process.send_signal(signal.SIGSTOP)
    try:
        await publish(relays.database, "while it is frozen")
        of_second = [
            e
            for e, owner in (await relays.owners()).items()
            if owner == await relays.replica(second)
        ]
        assert of_second
        # Two polls, half a tick apart.
        await until(
            lambda: len(relays.wire.requests_of(pid_of(second))) == len(of_second),
            SOON_S,
            "the other's endpoints to be delivered to",
        )
        assert await relays.db.fetchval(leader) == await relays.replica(second)
    finally:
        first.process.send_signal(signal.SIGCONT)
    # It kept its own endpoints all the time.
    await all_ended(relays.database, timeout_s=20)
    assert await relays.replica(first) == leads
    await publish(relays.database, "afterwards")
    await all_ended(relays.database, timeout_s=20)
    assert await relays.db.fetchval(leader) == await relays.replica(second)
    assert await exceptions(relays.database) == {}


async def _query_returns(relays: Relays, sql: str, value: object) -> bool:
    return bool(await relays.db.fetchval(sql) == value)


# ------------------------------------------------------ endpoint assignment


@pytest.mark.full
async def test_a_new_endpoint_goes_to_the_relay_with_the_fewest(relays: Relays) -> None:
    await add_endpoints(relays, 3)
    await relays.start("first", LONG_LEASE_S)
    await relays.start("second", LONG_LEASE_S)
    await until(relays.settled, what="the endpoints to be shared out")
    before = await relays.owners()
    ((fewest, _),) = [each for each in Counter(before.values()).items() if each[1] == 1]
    await add_endpoint(relays.database, "new", url=relays.url)
    await until(relays.settled, what="the new endpoint to be claimed")
    after = await relays.owners()
    assert {e: owner for e, owner in after.items() if e in before} == before
    assert [owner for e, owner in after.items() if e not in before] == [fewest]


@pytest.mark.full
async def test_a_membership_change_moves_the_fewest_endpoints(relays: Relays) -> None:
    await add_endpoints(relays, 100)
    members = [await relays.start("first"), await relays.start("second")]
    await until(relays.settled, what="the endpoints to be shared out")
    two = await relays.owners()
    started_at = (await relays.claims())[-1]["id"]

    joiner = await relays.start("joiner")
    await until(relays.settled, what="the endpoints to be shared out anew")
    three, new = await relays.owners(), await relays.replica(joiner)
    won = {e for e, owner in three.items() if owner == new}
    assert won
    assert {e for e in two if two[e] != three[e]} == won
    # No endpoint moved back and forth on the way there.
    moved = await relays.claims(after=started_at)
    assert sorted(r["endpoint_id"] for r in moved if r["kind"] == "endpoint_released") == sorted(
        won
    )
    joined_at = moved[-1]["id"]

    leaver = members[0]
    old = await relays.replica(leaver)
    assert await leaver.end() == 0
    await until(relays.settled, what="the leaver's endpoints to be claimed")
    freed = [r for r in await relays.claims(after=joined_at) if r["kind"] == "endpoint_released"]
    left = {e for e, owner in three.items() if owner == old}
    assert {r["endpoint_id"] for r in freed} == left
    status = await command("status", "--json", env={"OUTBOX_DSN": relays.database.dsn})
    assert status.code == 0, status.stderr
    replicas = status.json["replicas"]
    assert [r["endpoints"] for r in replicas] == [
        sum(owner == r["id"] for owner in (await relays.owners()).values()) for r in replicas
    ]
    assert await exceptions(relays.database) == {}

"""Fencing on real PostgreSQL: a replica that lost its endpoints writes nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from outbox.core.delivery.commands import AttemptRow, DeadRange, Progress, Record
from outbox.store.cluster.replicas import ReplicaStore
from outbox.store.delivery.records import RecordStore
from outbox.store.errors import Fenced
from tests.support.operators import LOCK_EPOCH
from tests.support.relay import Network, add_endpoint, fetchval, register, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from uuid import UUID

    import asyncpg

    from outbox.store.cluster.replicas import ClusterSnapshot
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major
SESSION = {"server_settings": {"search_path": "relay"}}


class Replica:
    """A registered replica that owns the only endpoint, and its connections."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def start(self, lease_s: float = 60) -> Replica:
        connection = await self.database.connect(**SESSION)
        self.replicas = ReplicaStore(connection)
        self.label = f"outbox-relay:{uuid4()}"
        self.id = await register(self.replicas, lease_s, label=self.label)
        self.connection = await self.database.connect(**SESSION)
        self.records = RecordStore(self.connection, self.id)
        self.epochs: dict[UUID, int] = {}
        return self

    async def connect(self) -> asyncpg.Connection:
        """Open one of its sessions."""
        named = {"search_path": "relay", "application_name": self.label}
        return await self.database.connect(server_settings=named)

    async def claim(self, endpoint_id: UUID) -> int:
        self.epochs = await self.replicas.claim(self.id, [endpoint_id], "test")
        return self.epochs.get(endpoint_id, 0)


def success(lane_id: int, seq: int) -> Record:
    row = AttemptRow(1, seq, 1, "delivered", 200, None, 1.0, 0.1)
    return Record(lane_id, seq, row)


def failure(lane_id: int, seq: int) -> Record:
    row = AttemptRow(1, seq, 1, "retry", 500, None, 1.0, 0.1)
    return Record(lane_id, seq, row, Progress(seq - 1, seq - 1, 1, seq, 1, 1, 1.0, 2.0, {}))


async def _endpoint(database: Database) -> tuple[UUID, int]:
    endpoint = await add_endpoint(database)
    return endpoint.id, await fetchval(database, "SELECT min(id) FROM lane")


async def test_the_owner_writes(database: Database) -> None:
    endpoint_id, lane = await _endpoint(database)
    owner = await Replica(database).start()
    epoch = await owner.claim(endpoint_id)
    await owner.records.write([success(lane, 1)], [epoch])
    await owner.records.write([success(lane, 2), failure(lane, 3)], [epoch, epoch])
    assert await owner.records.checkpoint([(lane, epoch, Progress(3, 3, 1))]) == {lane}
    assert await fetchval(database, "SELECT count(*) FROM attempt") == 3


@pytest.mark.parametrize("make", [success, failure])
async def test_an_expired_replica_writes_nothing(database: Database, make: object) -> None:
    endpoint_id, lane = await _endpoint(database)
    old, new = await Replica(database).start(), await Replica(database).start()
    epoch = await old.claim(endpoint_id)
    assert await new.replicas.expire_replica(old.id, "test", 1.0)
    with pytest.raises(Fenced):
        await old.records.write([make(lane, 1)], [epoch])
    assert await old.records.checkpoint([(lane, epoch, Progress(1, 1, 1))]) == set()
    assert not await old.replicas.renew(old.id)
    assert await fetchval(database, "SELECT count(*) FROM attempt") == 0
    assert await fetchval(database, "SELECT acked_seq FROM lane_progress") == 0


async def test_a_receipt_of_a_lane_that_has_moved_is_not_written(database: Database) -> None:
    endpoint_id, lane = await _endpoint(database)
    old, new = await Replica(database).start(), await Replica(database).start()
    epoch = await old.claim(endpoint_id)
    await old.records.write_receipts([(lane, epoch, "1")])
    await old.replicas.release(old.id, [endpoint_id], "test", "moved")
    later = await new.claim(endpoint_id)
    await new.records.write_receipts([(lane, later, "2")])
    await old.records.write_receipts([(lane, epoch, "1")])
    assert await fetchval(database, "SELECT receipt FROM lane_receipt") == "2"


async def test_a_replica_with_an_expired_lease_writes_nothing_and_cannot_renew(
    database: Database,
) -> None:
    endpoint_id, lane = await _endpoint(database)
    owner = await Replica(database).start()
    epoch = await owner.claim(endpoint_id)
    await fetchval(database, "UPDATE replica SET expires_at = clock_timestamp()")
    with pytest.raises(Fenced):
        await owner.records.write([success(lane, 1)], [epoch])
    assert not await owner.replicas.renew(owner.id)
    assert await owner.claim(endpoint_id) == 0


async def test_a_lane_of_an_earlier_epoch_writes_nothing(database: Database) -> None:
    endpoint_id, lane = await _endpoint(database)
    owner = await Replica(database).start()
    epoch = await owner.claim(endpoint_id)
    await owner.replicas.release(owner.id, [endpoint_id], "test", "test")
    newer = await owner.claim(endpoint_id)
    assert newer > epoch
    with pytest.raises(Fenced):
        await owner.records.write([success(lane, 1), failure(lane, 2)], [epoch, epoch])
    assert await fetchval(database, "SELECT count(*) FROM attempt") == 0
    assert await owner.records.checkpoint([(lane, epoch, Progress(1, 1, 1))]) == set()


async def test_a_replica_that_renewed_after_the_check_is_not_expired(
    database: Database,
) -> None:
    endpoint_id, lane = await _endpoint(database)
    old, new = await Replica(database).start(), await Replica(database).start()
    epoch = await old.claim(endpoint_id)
    assert await old.replicas.renew(old.id)
    assert not await new.replicas.expire_replica(old.id, "test", 1.0, renewals=0)
    # Its sessions are not terminated either while its row is locked.
    await old.connection.execute("BEGIN; SELECT FROM replica FOR UPDATE")
    assert not await new.replicas.expire_replica(old.id, "test", 0.1, renewals=0)
    await old.connection.execute("COMMIT")
    await old.records.write([success(lane, 1)], [epoch])
    assert await new.replicas.expire_replica(old.id, "test", 1.0, renewals=1)


OTHER_LEASE_S = 0.2
RENEW_OTHER = "UPDATE replica SET renewals = renewals + 1 WHERE id = $1"


async def test_a_late_response_expires_no_replica(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response reports a renewal counter that was unchanged for a moment, and arrives a lease
    later.
    """
    connection = await database.connect(**SESSION)
    other_id = await register(ReplicaStore(connection), OTHER_LEASE_S)
    clock = asyncio.get_running_loop().time
    polls: list[set[int]] = []
    original = ReplicaStore.read_cluster

    async def late(self: ReplicaStore) -> ClusterSnapshot:
        seen = await original(self)
        polls.append({peer.id for peer in seen.peers})
        if len(polls) == 2:
            await connection.execute(RENEW_OTHER, other_id)
            response_at = clock() + 2 * OTHER_LEASE_S
            await until(lambda: clock() > response_at, what="a lease to pass")
        return seen

    monkeypatch.setattr(ReplicaStore, "read_cluster", late)
    async with running(database, Network(), lease_s=30.0 * OTHER_LEASE_S):
        await until(lambda: len(polls) > 2, what="another poll")
    assert other_id in polls[2]


async def test_an_expiry_waits_for_a_running_group_and_then_reads_it(database: Database) -> None:
    endpoint_id, lane = await _endpoint(database)
    old, new = await Replica(database).start(), await Replica(database).start()
    epoch = await old.claim(endpoint_id)
    transaction = old.connection.transaction()
    await transaction.start()
    await old.records.write([success(lane, 1)], [epoch])
    expiry = asyncio.create_task(new.replicas.expire_replica(old.id, "test", 10.0))
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    await until(lambda: fetchval(database, waiting))
    await transaction.commit()
    assert await expiry
    assert await fetchval(database, "SELECT count(*) FROM attempt") == 1


async def test_a_replica_that_renews_during_its_expiry_is_not_expired(database: Database) -> None:
    """A renewal may commit between the check and the expiry, and its owner continues to send."""
    endpoint_id, lane = await _endpoint(database)
    old, new = await Replica(database).start(), await Replica(database).start()
    epoch = await old.claim(endpoint_id)
    (seen,) = [peer for peer in (await new.replicas.read_cluster()).peers if peer.id == old.id]
    renewing = await database.connect(**SESSION)
    transaction = renewing.transaction()
    await transaction.start()
    assert await ReplicaStore(renewing).renew(old.id)
    expiry = asyncio.create_task(new.replicas.expire_replica(old.id, "test", 10.0, seen.renewals))
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    await until(lambda: fetchval(database, waiting))
    await transaction.commit()
    assert not await expiry
    await old.records.write([success(lane, 1)], [epoch])
    assert await new.replicas.expire_replica(old.id, "test", 10.0, seen.renewals + 1)


async def test_a_group_that_waits_for_an_expiry_finds_no_fence(database: Database) -> None:
    endpoint_id, lane = await _endpoint(database)
    old = await Replica(database).start()
    epoch = await old.claim(endpoint_id)
    burier = await database.connect(**SESSION)
    transaction = burier.transaction()
    await transaction.start()
    await ReplicaStore(burier).expire_replica(old.id, "test", 1.0)
    group = asyncio.create_task(old.records.write([success(lane, 1)], [epoch]))
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    await until(lambda: fetchval(database, waiting))
    await transaction.commit()
    with pytest.raises(Fenced):
        await group
    assert await fetchval(database, "SELECT count(*) FROM attempt") == 0


async def test_a_frozen_session_that_holds_the_fence_is_ended(database: Database) -> None:
    endpoint_id, lane = await _endpoint(database)
    old, new = await Replica(database).start(), await Replica(database).start()
    frozen = await old.connect()
    epoch = await old.claim(endpoint_id)
    transaction = frozen.transaction()
    await transaction.start()
    await RecordStore(frozen, old.id).write([success(lane, 1)], [epoch])
    # It is terminated before its locks are waited for.
    assert await new.replicas.expire_replica(old.id, "test", 10.0)
    assert await fetchval(database, "SELECT count(*) FROM attempt") == 0


async def test_an_endpoint_belongs_to_one_replica_at_a_time(database: Database) -> None:
    endpoint_id, _ = await _endpoint(database)
    one, two = await Replica(database).start(), await Replica(database).start()
    got = await asyncio.gather(one.claim(endpoint_id), two.claim(endpoint_id))
    assert sorted(got) == [0, 1]


async def test_a_claim_leaves_out_an_endpoint_with_a_locked_row(database: Database) -> None:
    endpoints = {name: (await add_endpoint(database, name, lanes=2)).id for name in "abcd"}
    replica = await Replica(database).start()
    rows = {
        "b": "SELECT FROM ownership WHERE endpoint_id = $1",
        "c": "SELECT FROM lane_progress WHERE endpoint_id = $1 LIMIT 1",
        "d": "SELECT FROM endpoint_health WHERE endpoint_id = $1",
    }
    operator = await database.connect(**SESSION)
    async with operator.transaction():
        for name, sql in rows.items():
            await operator.execute(f"{sql} FOR UPDATE", endpoints[name])
        claimed = await replica.replicas.claim(replica.id, list(endpoints.values()), "test")
        assert claimed.keys() == {endpoints["a"]}
    claimed = await replica.replicas.claim(replica.id, list(endpoints.values()), "test")
    assert claimed.keys() == set(endpoints.values())


@pytest.mark.parametrize("move", ["release", "expire"])
async def test_a_move_and_a_change_lock_endpoints_in_the_same_order(
    database: Database, move: str
) -> None:
    first = (await add_endpoint(database, "first")).id
    second, n = first, 0
    while second >= first:
        second, n = (await add_endpoint(database, f"second{n}")).id, n + 1
    replica, other = await Replica(database).start(), await Replica(database).start()
    assert len(await replica.replicas.claim(replica.id, [first, second], "test")) == 2
    operator = await database.connect(**SESSION)
    async with operator.transaction():
        await operator.fetchval(LOCK_EPOCH, second)
        moving = asyncio.create_task(_move(move, replica, other, [first, second]))
        await until(lambda: fetchval(database, WAITING), what="the other one to wait")
        await operator.fetchval(LOCK_EPOCH, first)
    await moving
    owners = "SELECT count(*) FROM ownership WHERE replica_id = $1"
    assert await fetchval(database, owners, replica.id) == 0


WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"


async def _move(move: str, replica: Replica, other: Replica, endpoint_ids: list[UUID]) -> None:
    if move == "release":
        await replica.replicas.release(replica.id, endpoint_ids, "test", "moved")
    else:
        assert await other.replicas.expire_replica(replica.id, "test", 10.0)


async def test_an_operator_lock_on_a_range_blocks_no_write(database: Database) -> None:
    endpoint_id, lane = await _endpoint(database)
    owner = await Replica(database).start()
    epoch = await owner.claim(endpoint_id)

    async def cut(seq: int, to_seq: int) -> None:
        dead = DeadRange(1, seq, to_seq, "backlog", 0, None)
        record = Record(lane, to_seq, None, Progress(to_seq, 0, 1), dead)
        async with asyncio.timeout(20):
            await owner.records.write([record], [epoch])

    await cut(1, 2)
    await cut(3, 4)
    async with database.connection(**SESSION) as operator:
        transaction = operator.transaction()
        await transaction.start()
        await operator.execute("SELECT FROM dead_letter FOR UPDATE")
        await cut(5, 6)
        await transaction.rollback()
    await cut(7, 8)
    ranges = "SELECT string_agg(seq || '-' || to_seq, ' ' ORDER BY seq) FROM dead_letter"
    assert await fetchval(database, ranges) == "1-4 5-8"

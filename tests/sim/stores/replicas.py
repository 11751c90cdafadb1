"""Leases, and the replica that owns each endpoint."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.cluster.lease import Peer
from outbox.core.cluster.observed_time import MARK_EVERY_S
from outbox.store.cluster import replicas
from outbox.store.cluster.replicas import (
    CLAIM_LOCK_TIMEOUT_S,
    ClockReading,
    ClusterSnapshot,
    OwnershipSnapshot,
    Renewal,
)
from outbox.store.cluster.sessions import BUSY_SESSION_END_MAX_S
from tests.sim.database.engine import EXCLUSIVE, SHARE, UPDATE, Wait, perform
from tests.sim.stores.channels import notify_all, notify_owners
from tests.sim.stores.routing_change import add_to_journal
from tests.sim.stores.sessions import (
    await_sessions,
    count_sessions,
    expirable_row,
    terminate_busy_sessions,
    terminate_sessions,
    terminate_stuck_sessions,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from uuid import UUID

    from outbox.store.cluster.sessions import StuckSession
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.stores.sessions import Expirable


class ReplicaStore(replicas.ReplicaStore):
    """Stands in for `outbox.store.cluster.replicas.ReplicaStore`."""

    def __init__(self, connection: Any, server_fence: int | None = None) -> None:
        assert server_fence is None
        self._db: Connection = connection  # type: ignore[assignment]
        self._stuck: list[tuple[int, float]] = []

    async def register(
        self,
        label: str,
        name: str,
        version: str,
        lease_s: float,
        sequencer_pid: int | None = None,
        keys: Sequence[str] = (),
    ) -> int:
        await self._db.call(insert_replica, label, name, lease_s, sequencer_pid)
        replica_id: int = await self._db.call(read_registered, label)
        return replica_id

    async def renew(
        self, replica_id: int, observed_s: float | None = None, *, durable: bool = True
    ) -> Renewal:
        began_at = self._db.now
        return await self._db.call(renew_lease, replica_id, observed_s, began_at, durable)

    async def read_clock(self, marked_s: float = 0.0) -> ClockReading:
        return await self._db.call(read_clock, marked_s)

    async def read_cluster(self) -> ClusterSnapshot:
        return await self._db.call(read_cluster)

    async def read_ownership(self, replica_id: int) -> OwnershipSnapshot:
        return await self._db.call(read_ownership, replica_id)

    async def expire_replica(
        self, replica_id: int, actor: str, lock_timeout_s: float, renewals: int | None = None
    ) -> bool:
        return await self._end((replica_id, renewals, None), actor, lock_timeout_s)

    async def expire_former(self, label: str, lock_timeout_s: float) -> bool:
        return await self._end((None, None, label), None, lock_timeout_s)

    async def _end(self, expirable: Expirable, actor: str | None, lock_timeout_s: float) -> bool:
        if await self._db.call(terminate_sessions, *expirable):
            await self._db.call(await_sessions, *expirable)
            if await self._db.call(count_sessions, *expirable):
                return False
        try:
            return await self._db.call(
                expire_row, expirable, actor, "lease ran out", lock_timeout_s
            )
        except asyncpg.LockNotAvailableError:
            return False

    async def release_all(self, replica_id: int, actor: str) -> None:
        await self._db.call(expire_row, (replica_id, None, None), actor, "clean stop", None)

    async def wake_all(self) -> None:
        await self._db.call(notify_all)

    async def wake_owners(self, payload: str) -> None:
        await self._db.call(notify_owners, payload)

    async def terminate_stuck_sessions(self, lease_s: float) -> list[StuckSession]:
        rows = await self._db.call(terminate_stuck_sessions, lease_s, self._stuck)
        self._stuck = [(each.pid, since) for each, since, terminated in rows if not terminated]
        return [each for each, _, terminated in rows if terminated]

    async def terminate_busy_sessions(self, label: str) -> None:
        with suppress(asyncpg.InsufficientPrivilegeError):
            await self._db.call(terminate_busy_sessions, [label], 0.0)

    async def terminate_former_sessions(self, labels: Sequence[str]) -> list[str]:
        with suppress(asyncpg.InsufficientPrivilegeError):
            await self._db.call(terminate_busy_sessions, labels, BUSY_SESSION_END_MAX_S)
        return await self._db.call(read_registered_labels, labels)

    async def claim(
        self, replica_id: int, endpoint_ids: Sequence[UUID], actor: str
    ) -> dict[UUID, int]:
        try:
            if not await self._db.call(claim, replica_id, endpoint_ids, actor):
                return {}
        except asyncpg.LockNotAvailableError:
            return {}
        return await self._db.call(read_epochs, replica_id, endpoint_ids)

    async def release(
        self, replica_id: int, endpoint_ids: Sequence[UUID], actor: str, reason: str
    ) -> None:
        await self._db.call(release_endpoints, replica_id, endpoint_ids, actor, reason)


# ----------------------------------------------------------------------- leases


def fence(db: Database, tx: Transaction, me: int) -> Steps[bool]:
    """Whether the replica's lease runs; locks its row if so.

    A statement that waited for the lock checks the row again only if it was changed.
    """
    row = tx.get(db.replica, me)
    if row is None or row["expires_at"] <= db.wall():
        return False
    if db.rng.random() < 0.5:
        yield db.pause_s()
    yield Wait(db.replica, me, SHARE)
    if db.rng.random() < 0.3:
        yield db.pause_s()
    new = tx.get(db.replica, me)
    if new is row:
        return True
    return new is not None and bool(new["expires_at"] > db.wall())


def insert_replica(
    db: Database,
    tx: Transaction,
    label: str,
    name: str,
    lease_s: float,
    sequencer_pid: int | None,
) -> None:
    new = db.serial(db.replica)
    row = {"id": new, "label": label, "name": name, "renewals": 0, "lease_s": lease_s}
    row["sequencer_pid"] = sequencer_pid
    tx.put(db.replica, new, {**row, "expires_at": db.wall() + lease_s})


def read_registered(db: Database, tx: Transaction, label: str) -> Any:
    """The replica's id, or NULL: a late message may arrive after the replica was expired."""
    return next((row["id"] for row in tx.rows(db.replica) if row["label"] == label), None)


def renew_lease(
    db: Database,
    tx: Transaction,
    me: int,
    observed_s: float | None,
    began_at: float,
    durable: bool,
) -> Steps[Renewal]:
    tx.durable = durable
    row = tx.get(db.replica, me)
    if row is None or row["expires_at"] <= db.wall():
        return Renewal.FENCED
    yield Wait(db.replica, me, UPDATE)
    row = tx.get(db.replica, me)
    if row is None or row["expires_at"] <= db.wall():
        return Renewal.FENCED
    expires_at = db.wall() + row["lease_s"]
    tx.change(db.replica, me, renewals=row["renewals"] + 1, expires_at=expires_at)
    return Renewal.ADDER if add_observed(db, tx, me, observed_s, began_at) else Renewal.RENEWED


def add_observed(
    db: Database, tx: Transaction, me: int, observed_s: float | None, began_at: float
) -> bool:
    """Add to the odometer, if the replica is its adder or becomes it.

    Args:
        began_at: when the renewal began, in virtual seconds, for the checker.
    """
    if not may_add(db, tx, me, observed_s) or not tx.try_lock(db.odometer, 1, UPDATE):
        return False
    if not may_add(db, tx, me, observed_s):
        return False
    meter, now = tx.get(db.odometer, 1), db.wall()
    assert meter is not None
    seconds = meter["seconds"] + (observed_s or 0.0)
    tx.change(db.odometer, 1, seconds=seconds, adder=me)
    if observed_s:
        tx.notes.append(("observed", (began_at - observed_s, began_at)))
    last = max(tx.rows(db.odometer_mark), key=itemgetter("seconds"))
    passed_s = seconds - last["seconds"]
    if meter["adder"] != me or now - last["at"] < passed_s - 1 or passed_s >= MARK_EVERY_S:
        tx.put(db.odometer_mark, seconds, {"seconds": seconds, "at": now})
    return True


def may_add(db: Database, tx: Transaction, me: int, observed_s: float | None) -> bool:
    """Whether the replica is the adder of the odometer, or may become it."""
    meter = tx.get(db.odometer, 1)
    assert meter is not None
    if meter["adder"] == me:
        return True
    adder = tx.get(db.replica, meter["adder"])
    return observed_s is None and (adder is None or bool(adder["expires_at"] <= db.wall()))


def read_clock(db: Database, tx: Transaction, marked_s: float) -> ClockReading:
    marks = sorted((row["seconds"], row["at"]) for row in tx.rows(db.odometer_mark))
    observed_s = db.observed_time(tx).observed_s
    return ClockReading(db.wall(), observed_s, [m for m in marks if m[0] >= marked_s])


# ------------------------------------------------------------- ends of replicas


def expire_row(
    db: Database,
    tx: Transaction,
    expirable: Expirable,
    actor: str | None,
    reason: str,
    lock_timeout_s: float | None,
) -> Steps[bool]:
    """Three statements in one message."""
    if lock_timeout_s is not None:
        tx.lock_timeout_s = int(lock_timeout_s * 1000) / 1000
    row = expirable_row(db, tx, *expirable)
    if row is None:
        return False
    yield Wait(db.replica, row["id"], EXCLUSIVE)
    row = expirable_row(db, tx, *expirable)
    if row is None:
        return False
    yield from release_owned(db, tx, row["id"], actor or f"replica {row['id']}", reason)
    yield from perform(remove_replica(db, tx, row["id"]))
    return True


def read_registered_labels(db: Database, tx: Transaction, labels: Sequence[str]) -> list[str]:
    rows = sorted(tx.rows(db.replica), key=itemgetter("id"))
    return [str(row["label"]) for row in rows if row["label"] in labels]


def release_owned(db: Database, tx: Transaction, me: int, actor: str, reason: str) -> Steps[None]:
    yield from _release(db, tx, me, _owned(db, tx, me), actor, reason)


def remove_replica(db: Database, tx: Transaction, replica_id: int) -> Steps[None]:
    yield Wait(db.replica, replica_id, EXCLUSIVE)
    tx.put(db.replica, replica_id, None)


# -------------------------------------------------------------------- ownership


def replica_rows(db: Database, tx: Transaction) -> list[Row]:
    """The rows of all replicas."""
    return list(tx.rows(db.replica))


def read_cluster(db: Database, tx: Transaction) -> ClusterSnapshot:
    cursor, rows = tx.get(db.cursor, 1), replica_rows(db, tx)
    assert cursor is not None
    return ClusterSnapshot(
        cursor["version"],
        cursor["erasures"],
        [Peer(r["id"], r["renewals"], r["lease_s"]) for r in rows],
        bool(read_ownership(db, tx, 0).unowned),
        {r["sequencer_pid"] for r in rows},
    )


def read_ownership(db: Database, tx: Transaction, me: int) -> OwnershipSnapshot:
    owned, mine, unowned = Counter[int](), set(), []
    for row in tx.rows(db.ownership):
        e = tx.get(db.endpoint, row["endpoint_id"])
        assert e is not None
        if e["state"] in ("removed", "disabled"):
            continue
        if row["replica_id"] is None:
            unowned.append(row["endpoint_id"])
        else:
            owned[row["replica_id"]] += 1
        if row["replica_id"] == me:
            mine.add(row["endpoint_id"])
    return OwnershipSnapshot(dict(owned), mine, unowned)


def claim(db: Database, tx: Transaction, me: int, ids: Sequence[UUID], actor: str) -> Steps[bool]:
    """Two statements in one message; returns whether the replica owns one of them."""
    tx.lock_timeout_s = CLAIM_LOCK_TIMEOUT_S
    yield from claim_endpoints(db, tx, me, ids, actor)
    if not (yield from fence(db, tx, me)):
        return False
    epochs = read_epochs(db, tx, me, ids)
    yield from perform(write_epochs(db, tx, epochs))
    return bool(epochs)


def claim_endpoints(
    db: Database, tx: Transaction, me: int, ids: Sequence[UUID], actor: str
) -> Steps[dict[UUID, int]]:
    claimed: dict[UUID, int] = {}
    if not (yield from fence(db, tx, me)):
        return claimed
    for endpoint_id in sorted(ids):
        row = tx.get(db.ownership, endpoint_id)
        if row is None or row["replica_id"] is not None:
            continue
        if not tx.try_lock(db.ownership, endpoint_id, UPDATE):
            continue
        row = tx.get(db.ownership, endpoint_id)
        if row is None or row["replica_id"] is not None:
            continue
        lanes = [r["lane_id"] for r in tx.rows(db.lane_progress) if r["endpoint_id"] == endpoint_id]
        if not all(tx.try_lock(db.lane_progress, lane_id, UPDATE) for lane_id in lanes):
            continue
        if not tx.try_lock(db.endpoint_health, endpoint_id, UPDATE):
            continue
        epoch = claimed[endpoint_id] = row["epoch"] + 1
        tx.change(db.ownership, endpoint_id, replica_id=me, epoch=epoch)
        data = {"epoch": epoch, "replica": me}
        add_to_journal(db, tx, "endpoint_claimed", actor, endpoint_id, data)
    return claimed


def write_epochs(db: Database, tx: Transaction, epochs: dict[UUID, int]) -> Steps[None]:
    """Write the new epochs to the rows that only an owner writes."""
    for endpoint_id, epoch in epochs.items():
        yield Wait(db.endpoint_health, endpoint_id, UPDATE)
        tx.change(db.endpoint_health, endpoint_id, epoch=epoch)
    for row in list(tx.rows(db.lane_progress)):
        if row["endpoint_id"] in epochs:
            yield Wait(db.lane_progress, row["lane_id"], UPDATE)
            tx.change(db.lane_progress, row["lane_id"], epoch=epochs[row["endpoint_id"]])


def read_epochs(db: Database, tx: Transaction, me: int, ids: Sequence[UUID]) -> dict[UUID, int]:
    rows = [tx.get(db.ownership, endpoint_id) for endpoint_id in ids]
    return {r["endpoint_id"]: r["epoch"] for r in rows if r is not None and r["replica_id"] == me}


def release_endpoints(
    db: Database, tx: Transaction, me: int, ids: Sequence[UUID], actor: str, reason: str
) -> Steps[None]:
    if (yield from fence(db, tx, me)):
        requested = set(ids)
        owned = [each for each in _owned(db, tx, me) if each in requested]
        yield from _release(db, tx, me, owned, actor, reason)


def _owned(db: Database, tx: Transaction, me: int) -> list[UUID]:
    return sorted(r["endpoint_id"] for r in tx.rows(db.ownership) if r["replica_id"] == me)


def _release(
    db: Database, tx: Transaction, me: int, owned: Iterable[UUID], actor: str, reason: str
) -> Steps[None]:
    for endpoint_id in owned:
        yield Wait(db.ownership, endpoint_id, UPDATE)
        row = tx.get(db.ownership, endpoint_id)
        if row is None or row["replica_id"] != me:
            continue
        new = tx.change(db.ownership, endpoint_id, replica_id=None, epoch=row["epoch"] + 1)
        data = {"epoch": new["epoch"], "replica": me, "reason": reason}
        add_to_journal(db, tx, "endpoint_released", actor, endpoint_id, data)

"""Leases, and the replica that owns each endpoint."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.cluster.lease import Peer
from outbox.store import replicas
from outbox.store.replicas import ClusterSnapshot, application_name
from tests.sim.database.engine import EXCLUSIVE, SHARE, UPDATE, Wait
from tests.sim.stores.routing_change import add_to_journal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from uuid import UUID

    from tests.sim.database.backend import Backend
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database


class ReplicaStore(replicas.ReplicaStore):
    """Stands in for `outbox.store.replicas.ReplicaStore`."""

    def __init__(self, connection: Any, timeline: int | None = None) -> None:
        assert timeline is None
        self._db: Connection = connection

    async def reserve_id(self) -> int:
        return await self._db.call(next_replica_id)

    async def name_session(self, replica_id: int) -> None:
        await self._db.call(name_session, application_name(replica_id))

    async def register(
        self,
        replica_id: int,
        name: str,
        version: str,
        lease_s: float,
        pids: Sequence[int] = (),
        keys: Sequence[str] = (),
    ) -> float:
        return await self._db.call(insert_replica, replica_id, name, lease_s, pids)

    async def renew(self, replica_id: int) -> float | None:
        return await self._db.call(renew_lease, replica_id)

    async def read_cluster(self) -> ClusterSnapshot:
        return await self._db.call(read_ownership)

    async def expire_replica(
        self,
        replica_id: int,
        actor: str,
        lock_timeout_s: float,
        renewals: int | None = None,
        *,
        name: str | None = None,
    ) -> bool:
        db, session = self._db, application_name(replica_id)
        try:
            async with db.transaction():
                await db.call(set_lock_timeout, lock_timeout_s)
                if not await db.call(lock_replica, replica_id, renewals, name):
                    return False
                async with db.transaction():
                    await db.call(terminate_backends, replica_id, session, renewals)
                await db.call(release_owned, replica_id, actor, "lease ran out")
                await db.call(remove_replica, replica_id)
        except asyncpg.LockNotAvailableError:
            await db.call(terminate_backends, replica_id, session, renewals)
            return False
        return True

    async def release_all(self, replica_id: int, actor: str) -> None:
        async with self._db.transaction():
            await self._db.call(lock_replica, replica_id, None, None)
            await self._db.call(release_owned, replica_id, actor, "clean stop")
            await self._db.call(remove_replica, replica_id)

    async def terminate_busy_sessions(self, replica_id: int, pids: Sequence[int]) -> None:
        if pids:
            with suppress(asyncpg.InsufficientPrivilegeError):
                await self._db.call(terminate_busy_sessions, pids, application_name(replica_id))

    async def claim(
        self, replica_id: int, endpoint_ids: Sequence[UUID], actor: str
    ) -> dict[UUID, int]:
        async with self._db.transaction():
            epochs = await self._db.call(claim_endpoints, replica_id, endpoint_ids, actor)
            await self._db.call(write_epochs, epochs)
        return epochs

    async def release(
        self, replica_id: int, endpoint_ids: Sequence[UUID], actor: str, why: str
    ) -> None:
        await self._db.call(release_endpoints, replica_id, endpoint_ids, actor, why)


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
    new = tx.get(db.replica, me)
    if new is row:
        return True
    return new is not None and bool(new["expires_at"] > db.wall())


def next_replica_id(db: Database, tx: Transaction) -> int:
    return db.serial(db.replica)


def name_session(db: Database, tx: Transaction, session: str) -> None:
    db.session_of(tx).name = session


def insert_replica(
    db: Database, tx: Transaction, new: int, name: str, lease_s: float, pids: Sequence[int]
) -> float:
    row = {"id": new, "name": name, "pids": list(pids), "renewals": 0, "lease_s": lease_s}
    tx.put(db.replica, new, {**row, "expires_at": db.wall() + lease_s})
    return db.wall()


def renew_lease(db: Database, tx: Transaction, me: int) -> Steps[float | None]:
    row = tx.get(db.replica, me)
    if row is None or row["expires_at"] <= db.wall():
        return None
    yield Wait(db.replica, me, UPDATE)
    row = tx.get(db.replica, me)
    if row is None or row["expires_at"] <= db.wall():
        return None
    expires_at = db.wall() + row["lease_s"]
    tx.change(db.replica, me, renewals=row["renewals"] + 1, expires_at=expires_at)
    return db.wall()


# ------------------------------------------------------------- ends of replicas


def set_lock_timeout(db: Database, tx: Transaction, seconds: float) -> None:
    tx.lock_timeout_s = int(seconds * 1000) / 1000


def lock_replica(
    db: Database, tx: Transaction, replica_id: int, renewals: int | None, name: str | None
) -> Steps[bool]:
    def matches() -> bool:
        row = tx.get(db.replica, replica_id)
        return (
            row is not None and renewals in (None, row["renewals"]) and name in (None, row["name"])
        )

    if not matches():
        return False
    yield Wait(db.replica, replica_id, EXCLUSIVE)
    if not matches():
        return False
    if _owned(db, tx, replica_id):
        for watcher in db.on_expiry:
            watcher(db.session_of(tx))
    return True


def terminate_backends(
    db: Database, tx: Transaction, replica_id: int, session: str, renewals: int | None
) -> None:
    row = tx.get(db.replica, replica_id)
    if row is not None and db.signals and renewals in (None, row["renewals"]):
        _terminate(db, _find_backends(db, row["pids"], session))


def terminate_busy_sessions(
    db: Database, tx: Transaction, pids: Sequence[int], session: str
) -> None:
    others = [b for b in _find_backends(db, pids, session) if b is not db.session_of(tx)]
    if db.signals:
        _terminate(db, [b for b in others if b.at_work or b.transaction is not None])


def _find_backends(db: Database, pids: Sequence[int], session: str) -> list[Backend]:
    return [b for pid in pids if (b := db.backends.get(pid)) is not None and b.name == session]


def _terminate(db: Database, backends: Iterable[Backend]) -> None:
    for backend in backends:
        db.world.after(db.pause_s(), None, backend.terminate)


def release_owned(db: Database, tx: Transaction, me: int, actor: str, why: str) -> Steps[None]:
    yield from _release(db, tx, me, _owned(db, tx, me), actor, why)


def remove_replica(db: Database, tx: Transaction, replica_id: int) -> Steps[None]:
    yield Wait(db.replica, replica_id, EXCLUSIVE)
    tx.put(db.replica, replica_id, None)


# -------------------------------------------------------------------- ownership


def replica_rows(db: Database, tx: Transaction) -> list[Row]:
    """The rows of all replicas."""
    return list(tx.rows(db.replica))


def read_ownership(db: Database, tx: Transaction) -> ClusterSnapshot:
    free = []
    for row in tx.rows(db.ownership):
        e = tx.get(db.endpoint, row["endpoint_id"])
        assert e is not None
        if row["replica_id"] is None and e["state"] not in ("removed", "disabled"):
            free.append(row["endpoint_id"])
    cursor, rows = tx.get(db.cursor, 1), replica_rows(db, tx)
    assert cursor is not None
    return ClusterSnapshot(
        cursor["version"],
        cursor["erasures"],
        [Peer(r["id"], r["renewals"], r["lease_s"]) for r in rows],
        free,
        {r["pids"][0] if r["pids"] else None for r in rows},
    )


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
        yield Wait(db.ownership, endpoint_id, UPDATE)
        row = tx.get(db.ownership, endpoint_id)
        if row is None or row["replica_id"] is not None:
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


def release_endpoints(
    db: Database, tx: Transaction, me: int, ids: Sequence[UUID], actor: str, why: str
) -> Steps[None]:
    if (yield from fence(db, tx, me)):
        requested = set(ids)
        owned = [each for each in _owned(db, tx, me) if each in requested]
        yield from _release(db, tx, me, owned, actor, why)


def _owned(db: Database, tx: Transaction, me: int) -> list[UUID]:
    return sorted(r["endpoint_id"] for r in tx.rows(db.ownership) if r["replica_id"] == me)


def _release(
    db: Database, tx: Transaction, me: int, owned: Iterable[UUID], actor: str, why: str
) -> Steps[None]:
    for endpoint_id in owned:
        yield Wait(db.ownership, endpoint_id, UPDATE)
        row = tx.get(db.ownership, endpoint_id)
        if row is None or row["replica_id"] != me:
            continue
        new = tx.change(db.ownership, endpoint_id, replica_id=None, epoch=row["epoch"] + 1)
        data = {"epoch": new["epoch"], "replica": me, "why": why}
        add_to_journal(db, tx, "endpoint_released", actor, endpoint_id, data)

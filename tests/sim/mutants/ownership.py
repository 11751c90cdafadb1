"""Mistakes with leases, take-overs and fences."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.core.cluster import lease
from outbox.relay import session
from outbox.relay.delivery import dispatcher
from outbox.store.cluster.replicas import Renewal
from tests.sim.database.engine import UPDATE, Wait
from tests.sim.mutants.catalogue import mutant, swap
from tests.sim.stores import lanes, replicas, sessions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from outbox.store.delivery.lanes import LoadedLane
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.simulation import Simulation


@mutant
def lease_counted_from_renewal_response(sim: Simulation) -> None:
    """The lease begins with the response instead of the request."""
    renewed = lease.Lease.renewed

    def patched(self: Any, started_at: float) -> None:
        renewed(self, asyncio.get_running_loop().time())

    swap(lease.Lease, "renewed", patched)


@mutant
def lapsed_lease_renewed(sim: Simulation) -> None:
    """Neither the database nor the replica checks whether the lease has expired."""

    def renew(db: Database, tx: Transaction, me: int, *_: object) -> Steps[Renewal]:
        yield Wait(db.replica, me, UPDATE)
        row = tx.get(db.replica, me)
        if row is None:
            return Renewal.FENCED
        expires_at = db.wall() + row["lease_s"]
        tx.change(db.replica, me, renewals=row["renewals"] + 1, expires_at=expires_at)
        return Renewal.RENEWED

    swap(replicas, "renew_lease", renew)
    swap(lease.Lease, "left_s", lambda self, now: max(self._until - now, 1.0))


@mutant
def takeover_starts_after_last_sent(sim: Simulation) -> None:
    """The new owner begins after the last delivery sent, not after the last acknowledged one."""

    read = lanes.read_lanes

    def read_lanes(db: Database, tx: Transaction, endpoint_ids: Any) -> list[LoadedLane]:
        return [_from_last_sent(lane) for lane in read(db, tx, endpoint_ids)]

    def _from_last_sent(lane: LoadedLane) -> LoadedLane:
        sent = sim.checker.book(lane.id).deliveries
        acked_seq = max([lane.progress.acked_seq, *sent])
        return replace(lane, progress=lane.progress._replace(acked_seq=acked_seq))

    swap(lanes, "read_lanes", read_lanes)


@mutant
def expired_replica_row_not_written(sim: Simulation) -> None:
    """The row of an expired replica stays unchanged, and is ignored afterwards."""
    ignored: set[int] = set()
    read = replicas.replica_rows

    def remove_replica(db: Database, tx: Transaction, replica_id: int) -> None:
        tx.append(lambda: ignored.add(replica_id))

    def replica_rows(db: Database, tx: Transaction) -> list[Row]:
        return [row for row in read(db, tx) if row["id"] not in ignored]

    swap(replicas, "remove_replica", remove_replica)
    swap(replicas, "replica_rows", replica_rows)


@mutant
def takeover_leaves_lane_epochs(sim: Simulation) -> None:
    """The epoch is increased, and not written to the lanes."""
    swap(replicas, "write_epochs", lambda db, tx, epochs: None)


@mutant
def no_lease_check_before_sending(sim: Simulation) -> None:
    """A request begins without a check of the lease."""
    init = dispatcher.Dispatcher.__init__

    def patched(
        self: Any, store: Any, recorder: Any, transport: Any, left: Any, *args: Any, **rest: Any
    ) -> None:
        init(self, store, recorder, transport, lambda: 1.0, *args, **rest)

    swap(dispatcher.Dispatcher, "__init__", patched)


@mutant
def stop_waits_for_database(sim: Simulation) -> None:
    """A relay that stops releases its endpoints without a time limit."""
    swap(session, "HAND_OVER_MIN_S", 1e9)


@mutant
def claim_waits_for_locked_rows(sim: Simulation) -> None:
    """A claim waits for rows that another session has locked, and with it all other endpoints."""

    def claim_endpoints(
        db: Database, tx: Transaction, me: int, ids: Sequence[UUID], actor: str
    ) -> Steps[None]:
        tx.lock_timeout_s = 0.0
        if not (yield from replicas.fence(db, tx, me)):
            return
        for endpoint_id in sorted(ids):
            yield Wait(db.ownership, endpoint_id, UPDATE)
            row = tx.get(db.ownership, endpoint_id)
            if row is None or row["replica_id"] is not None:
                continue
            tx.change(db.ownership, endpoint_id, replica_id=me, epoch=row["epoch"] + 1)
            for lane in list(tx.rows(db.lane_progress)):
                if lane["endpoint_id"] == endpoint_id:
                    yield Wait(db.lane_progress, lane["lane_id"], UPDATE)

    swap(replicas, "claim_endpoints", claim_endpoints)


@mutant
def sessions_without_label(sim: Simulation) -> None:
    """The sessions of a replica do not have its label, so that its expiry cannot end them."""
    swap(sessions, "find_backends", lambda db, tx, *names: [])

"""Mistakes with leases, take-overs and fences."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from outbox.core.cluster import lease
from outbox.relay import session
from outbox.relay.delivery import dispatcher
from outbox.store import lanes, replicas
from tests.sim.database.engine import UPDATE, Wait
from tests.sim.database.statements import lanes as lane_answers
from tests.sim.database.statements import registry
from tests.sim.mutants.catalogue import mutant, swap

if TYPE_CHECKING:
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.simulation import Simulation


@mutant
def lease_counted_from_the_end_of_the_renewal(sim: Simulation) -> None:
    """It begins when the answer is there."""
    renewed = lease.Lease.renewed

    def patched(self: Any, started_at: float) -> None:
        renewed(self, asyncio.get_running_loop().time())

    swap(lease.Lease, "renewed", patched)


@mutant
def a_lapsed_lease_that_may_renew(sim: Simulation) -> None:
    """Neither the database nor the replica itself minds that it ran out."""

    def renew(db: Database, tx: Transaction, me: int) -> Steps:
        yield Wait(db.replica, me, UPDATE)
        row = tx.get(db.replica, me)
        if row is None:
            return []
        expires_at = db.wall() + row["lease_s"]
        tx.change(db.replica, me, renewals=row["renewals"] + 1, expires_at=expires_at)
        return [{"now": db.wall()}]

    sim.database.changed[replicas.RENEW] = renew
    swap(lease.Lease, "left_s", lambda self, now: max(self._until - now, 1.0))


@mutant
def a_take_over_that_starts_from_the_last_sent(sim: Simulation) -> None:
    """… instead of the last acknowledged."""

    def read_lanes(db: Database, tx: Transaction, endpoint_ids: Any) -> list[Row]:
        rows = lane_answers.read_lanes(db, tx, endpoint_ids)
        for row in rows:
            told = sim.checker.book(row["id"]).told
            row["acked_seq"] = max([row["acked_seq"], *told])
        return rows

    sim.database.changed[lanes.READ_LANES] = read_lanes


@mutant
def a_take_over_that_locks_the_old_replicas_row_without_writing_it(sim: Simulation) -> None:
    """The row of a dead replica stays as it is; from then on it is overlooked."""
    overlooked: set[int] = set()
    look = registry.ANSWERS[replicas.LOOK]

    def remove_replica(db: Database, tx: Transaction, replica_id: int) -> str:
        tx.append(lambda: overlooked.add(replica_id))
        return "DELETE 0"

    def look_away(db: Database, tx: Transaction) -> list[Row]:
        (row,) = look(db, tx)
        seen = [n for n, replica_id in enumerate(row["ids"] or ()) if replica_id not in overlooked]
        for column in ("ids", "renewals", "leases_s", "cursor_pids"):
            row[column] = [row[column][n] for n in seen]
        return [row]

    sim.database.changed[replicas.REMOVE_REPLICA] = remove_replica
    sim.database.changed[replicas.LOOK] = look_away


@mutant
def a_take_over_that_leaves_the_lanes_epochs(sim: Simulation) -> None:
    """The epoch is raised, and not written to the lanes."""
    sim.database.changed[replicas.STAMP] = lambda db, tx, *_: "UPDATE 0"


@mutant
def a_session_that_no_burial_ends(sim: Simulation) -> None:
    """The one that claims, and buries others, is not among those that are ended."""
    register = registry.ANSWERS[replicas.REGISTER]

    def register_some(
        db: Database, tx: Transaction, new: int, name: str, version: str, pids: Any, *rest: Any
    ) -> Any:
        return register(db, tx, new, name, version, pids[:-1], *rest)

    sim.database.changed[replicas.REGISTER] = register_some


@mutant
def no_look_at_the_lease_before_sending(sim: Simulation) -> None:
    """A request begins, however long ago the lease was renewed."""
    init = dispatcher.Dispatcher.__init__

    def patched(
        self: Any, store: Any, recorder: Any, transport: Any, left: Any, *args: Any, **rest: Any
    ) -> None:
        init(self, store, recorder, transport, lambda: 1.0, *args, **rest)

    swap(dispatcher.Dispatcher, "__init__", patched)


@mutant
def a_stop_that_waits_for_the_database(sim: Simulation) -> None:
    """A relay that was told to stop hands over, however long that takes."""
    swap(session, "HAND_OVER_MIN_S", 1e9)

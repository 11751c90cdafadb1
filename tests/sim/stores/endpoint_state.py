"""State that an owner writes about a whole endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.store.connection.connect import map_errors
from outbox.store.database_stats import DatabaseStats
from outbox.store.delivery import endpoint_state
from tests.sim.database.engine import SHARE, UPDATE, Wait, perform
from tests.sim.stores import channels, endpoint_writes, routing_change
from tests.sim.stores.operational_events import (
    contains_ordinary_event,
    publish_endpoint_disabled,
    publish_health,
)
from tests.sim.stores.replicas import fence
from tests.sim.stores.routing_change import add_to_journal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from outbox.store.delivery.endpoint_state import EndpointState, LanePositions
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database


class EndpointStateStore(endpoint_state.EndpointStateStore):
    """Stands in for `outbox.store.delivery.endpoint_state.EndpointStateStore`."""

    def __init__(
        self, connection: Any, schema: str, replica_id: int, server_fence: int | None = None
    ) -> None:
        assert server_fence is None
        self._db: Connection = connection  # type: ignore[assignment]
        self._schema = schema
        self._me = replica_id
        self._actor = f"replica {replica_id}"

    async def write_health(self, rows: Sequence[EndpointState]) -> None:
        await self._db.call(write_health, self._me, rows)

    async def write_unsolicited(self, rows: Sequence[tuple[UUID, int, float]]) -> None:
        await self._db.call(write_unsolicited, self._me, rows)

    async def disable(self, endpoint_id: UUID, reason: str, details: Mapping[str, Any]) -> bool:
        with map_errors(self._schema, "operator"):
            return await self._db.call(
                disable, self._me, endpoint_id, self._actor, {"reason": reason, **details}
            )

    async def read_database_stats(self) -> DatabaseStats:
        return await self._db.call(count_database_stats)

    async def add_interval(self, since_s: float | None) -> bool:
        return True  # No decision depends on it.

    async def has_pending_ordinary(self, lanes: LanePositions) -> bool:
        return await self._db.call(find_pending_ordinary, lanes)

    async def read_over_count(self, lanes: LanePositions, excess: int) -> dict[int, int]:
        return await self._db.call(find_over_count, lanes, excess)

    async def read_over_age(self, lanes: LanePositions, age_max_s: float) -> dict[int, int]:
        return await self._db.call(find_over_age, lanes, age_max_s)


# ----------------------------------------------------------------------- health


def write_health(
    db: Database, tx: Transaction, me: int, rows: Sequence[EndpointState]
) -> Steps[None]:
    if not (yield from fence(db, tx, me)):
        return
    for state in rows:
        endpoint, record = state.endpoint, state.health
        yield Wait(db.endpoint_health, endpoint.id, UPDATE)
        old = tx.get(db.endpoint_health, endpoint.id)
        assert old is not None
        if old["epoch"] != state.epoch:
            continue
        new = {
            "resumes": endpoint.resumes,
            "state": record.state.value,
            "since": record.since,
            "held_until": record.held_until,
            "last_response": record.last_response,
            "reported_held_since": state.reported.held_since,
            "reported_stalled_at": state.reported.stalled_at,
            "stalled_since": state.stalled_since,
        }
        held_since = yield from publish_health(db, tx, old, new, state.disabled_at)
        failing_at = old["failing_reported_at"]
        if old["reported_held_since"] is None:
            failing_at = held_since or failing_at
        new |= {"reported_held_since": held_since, "failing_reported_at": failing_at}
        tx.change(db.endpoint_health, endpoint.id, **new)
        if new["state"] != "recovering":
            add_to_journal(db, tx, "endpoint_health", f"replica {me}", endpoint.id, {})


def write_unsolicited(
    db: Database, tx: Transaction, me: int, rows: Sequence[tuple[UUID, int, float]]
) -> Steps[None]:
    if not (yield from fence(db, tx, me)):
        return
    for endpoint_id, epoch, at in rows:
        yield Wait(db.endpoint_health, endpoint_id, UPDATE)
        row = tx.get(db.endpoint_health, endpoint_id)
        assert row is not None
        if row["epoch"] == epoch:
            tx.change(db.endpoint_health, endpoint_id, unsolicited_at=at)
            add_to_journal(db, tx, "endpoint_unsolicited_data", f"replica {me}", endpoint_id, {})


def disable(
    db: Database,
    tx: Transaction,
    me: int,
    endpoint_id: UUID,
    actor: str,
    data: Mapping[str, Any],
) -> Steps[bool]:
    """The statements of one message, which is aborted if the state or the owner has changed."""
    yield from perform(routing_change.lock_cursor(db, tx))
    if not (yield from lock_ownership(db, tx, me, endpoint_id)):
        return False
    if not (yield from begin_disabling(db, tx, endpoint_id, actor, data["reason"])):
        return False
    yield from perform(routing_change.raise_version(db, tx))
    endpoint_writes.end_subscriptions(db, tx, [endpoint_id])
    yield from endpoint_writes.stop_feeds(db, tx, [endpoint_id], "disabled")
    journalled = {**data, "to_batch": routing_change.next_batch(db)}
    add_to_journal(db, tx, "endpoint_disabling", actor, endpoint_id, journalled)
    yield from publish_endpoint_disabled(db, tx, endpoint_id, data.get("last_response"))
    channels.notify_all(db, tx)
    return True


def lock_ownership(db: Database, tx: Transaction, me: int, endpoint_id: UUID) -> Steps[bool]:
    """Whether the replica owns the endpoint and its lease runs."""
    yield Wait(db.ownership, endpoint_id, SHARE)
    row, replica = tx.get(db.ownership, endpoint_id), tx.get(db.replica, me)
    if row is None or row["replica_id"] != me or replica is None:
        return False
    return bool(replica["expires_at"] > db.wall())


def begin_disabling(
    db: Database, tx: Transaction, endpoint_id: UUID, by: str, reason: str
) -> Steps[bool]:
    yield Wait(db.endpoint, endpoint_id, UPDATE)
    e = tx.get(db.endpoint, endpoint_id)
    assert e is not None
    if e["state"] not in ("active", "paused"):
        return False
    tx.change(db.endpoint, endpoint_id, state="disabling", state_by=by, state_comment=reason)
    return True


# --------------------------------------------------------------------- backlogs


def count_database_stats(db: Database, tx: Transaction) -> DatabaseStats:
    """Statistics; no decision depends on them."""
    dead = sum(row["state"] == "dead" for row in tx.rows(db.dead_letter))
    alive = sum(row["expires_at"] > db.wall() for row in tx.rows(db.replica))
    lapsed = sum(row["expires_at"] <= db.wall() for row in tx.rows(db.replica))
    return DatabaseStats(dead, None, None, 0.0, 0, alive, lapsed, ())


def find_pending_ordinary(db: Database, tx: Transaction, lanes: LanePositions) -> bool:
    return any(
        contains_ordinary_event(db, lane_id, seq + 1, db.lane_counter.rows[lane_id]["last_seq"])
        for lane_id, _, seq in lanes
    )


def find_over_count(
    db: Database, tx: Transaction, lanes: LanePositions, excess: int
) -> dict[int, int]:
    pending = sorted(
        (g.batch, g.seq, lane_id)
        for lane_id, _, seq in lanes
        for g in db.deliveries.get(lane_id, ())
        if g.seq > seq
    )[:excess]
    last: dict[int, int] = {}
    for _, seq, lane_id in pending:
        last[lane_id] = max(seq, last.get(lane_id, 0))
    return last


def find_over_age(
    db: Database, tx: Transaction, lanes: LanePositions, age_max_s: float
) -> dict[int, int]:
    odometer = db.observed_time(tx)
    last: dict[int, int] = {}
    for lane_id, _, seq in lanes:
        old = [
            g.seq
            for g in db.deliveries.get(lane_id, ())
            if g.seq > seq and odometer.since(db.batch(g.batch).at.timestamp()) > age_max_s
        ]
        if old:
            last[lane_id] = max(old)
    return last

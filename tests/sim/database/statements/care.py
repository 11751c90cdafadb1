"""What an owner writes about an endpoint as a whole, and maintenance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.store import database_stats, endpoint_state, routing_change
from tests.sim.database.engine import EXCLUSIVE, SHARE, UPDATE, Wait
from tests.sim.database.statements.operational import holds_ordinary, tell_health
from tests.sim.database.statements.ownership import fence, journal
from tests.sim.database.statements.registry import answers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database

_HEALTH = (
    "resumes",
    "state",
    "since",
    "held_until",
    "last_answer",
    "told_held_since",
    "told_stalled_at",
)


@answers(routing_change.LOCK_CURSOR)
def lock_cursor(db: Database, tx: Transaction) -> Steps:
    yield Wait(db.cursor, 1, EXCLUSIVE)
    return "SELECT 1"


@answers(routing_change.RAISE_VERSION)
def raise_version(db: Database, tx: Transaction) -> Steps:
    yield Wait(db.cursor, 1, EXCLUSIVE)
    row = tx.get(db.cursor, 1)
    assert row is not None
    tx.change(db.cursor, 1, version=row["version"] + 1)
    return "UPDATE 1"


@answers(routing_change.WRITE_JOURNAL)
def write_journal(
    db: Database, tx: Transaction, kind: str, actor: str, endpoint_id: UUID | None, data: str
) -> str:
    journal(db, tx, kind, actor, endpoint_id, data)
    return "INSERT 0 1"


@answers(endpoint_state.WRITE_HEALTH)
def write_health(db: Database, tx: Transaction, me: int, *columns: Any) -> Steps:
    if not (yield from fence(db, tx, me)):
        return "INSERT 0 0"
    for endpoint_id, epoch, *values, stalled_since, disabled_at in zip(*columns, strict=True):
        yield Wait(db.endpoint_health, endpoint_id, UPDATE)
        h = tx.get(db.endpoint_health, endpoint_id)
        assert h is not None
        if h["epoch"] == epoch:
            new = dict(zip(_HEALTH, values, strict=True))
            stalled = {"since": stalled_since, "until": disabled_at}
            new["told_held_since"] = yield from tell_health(db, tx, h, new, stalled)
            tx.change(db.endpoint_health, endpoint_id, **new)
    return f"INSERT 0 {len(columns[0])}"


@answers(database_stats.SURVEY)
def look_around(db: Database, tx: Transaction) -> list[Row]:
    # Numbers for people: nothing is decided by them.
    ages = {"gap_age_s": None, "horizon_age_s": None}
    return [{"dead_letters": len(list(tx.rows(db.dead_letter))), **ages, "alive": 1, "lapsed": 0}]


@answers(endpoint_state.READ_OWES_ORDINARY)
def read_owes_ordinary(
    db: Database,
    tx: Transaction,
    lane_ids: Sequence[int],
    floors: Sequence[int],
    acked: Sequence[int],
) -> list[Row]:
    owes = [
        holds_ordinary(db, lane_id, seq + 1, db.lane_counter.rows[lane_id]["last_seq"])
        for lane_id, seq in zip(lane_ids, acked, strict=True)
    ]
    return [{"bool_or": any(owes) if owes else None}]


@answers(endpoint_state.LOCK_OWNERSHIP)
def lock_ownership(db: Database, tx: Transaction, me: int, endpoint_id: UUID) -> Steps:
    yield Wait(db.ownership, endpoint_id, SHARE)
    row = tx.get(db.ownership, endpoint_id)
    replica = tx.get(db.replica, me)
    if row is None or row["replica_id"] != me or replica is None:
        return []
    return [{"one": 1}] if replica["expires_at"] > db.wall() else []


@answers(endpoint_state.BEGIN_DISABLING)
def begin_disabling(db: Database, tx: Transaction, endpoint_id: UUID, by: str, why: str) -> Steps:
    yield Wait(db.endpoint, endpoint_id, UPDATE)
    e = tx.get(db.endpoint, endpoint_id)
    assert e is not None
    if e["state"] not in ("active", "paused"):
        return []
    tx.change(db.endpoint, endpoint_id, state="disabling", state_by=by, state_why=why)
    return [{"name": e["name"]}]


@answers(endpoint_state.READ_OVER_COUNT)
def read_over_count(
    db: Database,
    tx: Transaction,
    lane_ids: Sequence[int],
    floors: Sequence[int],
    acked: Sequence[int],
    excess: int,
) -> list[Row]:
    owed = sorted(
        (g.batch, g.seq, lane_id)
        for lane_id, seq in zip(lane_ids, acked, strict=True)
        for g in db.deliveries.get(lane_id, ())
        if g.seq > seq
    )[:excess]
    last: dict[int, int] = {}
    for _, seq, lane_id in owed:
        last[lane_id] = max(seq, last.get(lane_id, 0))
    return [{"lane_id": lane_id, "seq": seq} for lane_id, seq in last.items()]


@answers(endpoint_state.READ_OVER_AGE)
def read_over_age(
    db: Database,
    tx: Transaction,
    lane_ids: Sequence[int],
    floors: Sequence[int],
    acked: Sequence[int],
    age_max_s: float,
) -> list[Row]:
    limit = db.wall() - age_max_s
    rows = []
    for lane_id, seq in zip(lane_ids, acked, strict=True):
        old = [
            g.seq
            for g in db.deliveries.get(lane_id, ())
            if g.seq > seq and db.batch(g.batch).at.timestamp() < limit
        ]
        if old:
            rows.append({"lane_id": lane_id, "seq": max(old)})
    return rows

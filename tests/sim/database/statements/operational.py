"""What the relay tells about itself, in the statements that change what it tells of."""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.delivery import operational_events as kinds
from outbox.store import operational_events
from tests.sim.database.engine import EXCLUSIVE
from tests.sim.database.inserts import insert_event
from tests.sim.database.statements.registry import answers

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database

RESERVED = "outbox."


def names(pattern: str, kind: str) -> bool:
    """Whether a pattern is for an operational type; only the last segment may be a wildcard."""
    if pattern.endswith(".**"):
        return kind.startswith(pattern[:-2]) and pattern.startswith(RESERVED)
    return pattern == kind


def announce(
    db: Database, tx: Transaction, kind: str, endpoint_id: UUID | None, told: dict[str, Any]
) -> Steps:
    """An operational event, if somebody wants it; whether that is so."""
    wanted = any(
        names(pattern, kind)
        for s in tx.rows(db.subscription)
        if s["to_batch"] is None
        for pattern in s["types"]
    )
    if not wanted:
        return False
    payload = {"version": 1, "at": rfc3339(db.clock_timestamp()), **told}
    if endpoint_id is not None:
        e = tx.get(db.endpoint, endpoint_id)
        assert e is not None
        payload["endpoint"] = {"id": str(endpoint_id), "name": e["name"]}
    payload = {name: value for name, value in payload.items() if value is not None}
    key = None if endpoint_id is None else str(endpoint_id)
    yield from insert_event(db, tx, kind, key, orjson.dumps(payload).decode())
    tx.notes.append(("told", (kind, endpoint_id, payload)))
    return True


def rfc3339(at: datetime | None) -> str | None:
    if at is None:
        return None
    return at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def answer_of(row: Row) -> dict[str, Any]:
    last = orjson.loads(row.get("last_answer") or "{}")
    return {"status": last.get("status"), "failure": last.get("failure")}


def lane_of(db: Database, tx: Transaction, lane_id: int) -> str:
    lane = tx.get(db.lane, lane_id)
    assert lane is not None
    return f"{lane['endpoint_id'].hex[:12]}-{lane['generation']}-{lane['slot']}"


def holds_ordinary(db: Database, lane_id: int, first: int, last: int) -> bool:
    """Whether an ordinary event is among these numbers of a lane."""
    return any(
        not db.outbox[g.outbox_id].type.startswith(RESERVED)
        for g in db.deliveries.get(lane_id, ())
        if first <= g.seq <= last
    )


def is_ordinary(db: Database, letter: Row) -> bool:
    """Whether a dead letter is of an ordinary event, or has one among its numbers."""
    if letter.get("type") is not None:
        return not letter["type"].startswith(RESERVED)
    return holds_ordinary(db, letter["lane_id"], letter["seq"], letter["to_seq"])


def tell_letter(db: Database, tx: Transaction, letter: Row, *, blocks: bool = False) -> Steps:
    """A dead letter that is new, or holds an ordinary event only now."""
    if not is_ordinary(db, letter):
        return
    place = {
        "dead_letter": letter["id"],
        "lane": lane_of(db, tx, letter["lane_id"]),
        "sequence": letter["seq"],
        "reason": letter["reason"],
    }
    event_id = letter.get("event_id")
    told = {
        **place,
        "to_sequence": letter["to_seq"],
        "event": event_id and str(event_id),
        "type": letter.get("type"),
        "attempts": letter["attempts"],
        **answer_of(letter),
    }
    yield from announce(db, tx, kinds.DEAD_LETTER_CREATED, letter["endpoint_id"], told)
    if blocks:
        yield from announce(db, tx, kinds.LANE_BLOCKED, letter["endpoint_id"], place)


def tell_health(db: Database, tx: Transaction, h: Row, new: Row, stalled: Row) -> Steps:
    """What is news in a row of health; returns since when its hold is told of."""
    was, held, endpoint_id = h["told_held_since"], new["told_held_since"], h["endpoint_id"]
    is_told = was is not None
    if held is not None and not is_told:
        told = {
            "state": new["state"],
            "since": rfc3339(held),
            "held_until": rfc3339(new["held_until"]),
            **answer_of(new),
        }
        is_told = yield from announce(db, tx, kinds.ENDPOINT_HELD, endpoint_id, told)
    elif held is None and is_told:
        told = {"held_since": rfc3339(was)}
        yield from announce(db, tx, kinds.ENDPOINT_RECOVERED, endpoint_id, told)
    if new["told_stalled_at"] not in (None, h["told_stalled_at"]) and stalled["since"] is not None:
        told = {
            "since": rfc3339(stalled["since"]),
            "will_be_disabled_at": rfc3339(stalled["until"]),
        }
        yield from announce(db, tx, kinds.ENDPOINT_STALLED, endpoint_id, told)
    return held if is_told else None


@answers(operational_events.TELL_DISABLED)
def tell_disabled(
    db: Database, tx: Transaction, endpoint_id: UUID, status: int | None, failure: str | None
) -> Steps:
    e = tx.get(db.endpoint, endpoint_id)
    assert e is not None
    told = {"why": e["state_why"], "by": e["state_by"], "status": status, "failure": failure}
    yield from announce(db, tx, kinds.ENDPOINT_DISABLED, endpoint_id, told)
    return "SELECT 1"


@answers(operational_events.TELL_LAGGING)
def tell_lagging(
    db: Database, tx: Transaction, leader: int, lagging_s: float, every_s: float
) -> Steps:
    row = tx.get(db.cursor, 1)
    assert row is not None
    if row["writer"] != leader or row["lagging"]:
        return []
    if row["lagging_at"] is not None and row["lagging_at"] >= db.wall() - every_s:
        return []
    if not tx.try_lock(db.cursor, 1, EXCLUSIVE):
        return []
    if tx.get(db.cursor, 1) is not row:
        return []
    high = db.batches[-1].high
    waiting = next((i for i in db.outbox_ids if i > high), None)
    if waiting is None or db.outbox[waiting].type.startswith(RESERVED):
        return []
    waiting_s = (db.clock_timestamp() - db.outbox[waiting].created_at).total_seconds()
    told = {"waiting_s": round(waiting_s, 1)}
    if waiting_s <= lagging_s:
        return []
    if not (yield from announce(db, tx, kinds.RELAY_LAGGING, None, told)):
        return []
    tx.change(db.cursor, 1, lagging=True, lagging_at=db.wall())
    return [{"one": 1}]


@answers(operational_events.END_LAGGING)
def end_lagging(db: Database, tx: Transaction, leader: int) -> list[Row]:
    row = tx.get(db.cursor, 1)
    assert row is not None
    if row["writer"] != leader or not tx.try_lock(db.cursor, 1, EXCLUSIVE):
        return []
    row = tx.get(db.cursor, 1)
    assert row is not None
    if row["writer"] != leader:
        return []
    if row["lagging"]:
        tx.change(db.cursor, 1, lagging=False)
    return [{"one": 1}]

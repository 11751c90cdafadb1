"""Operational events, written by the statements whose changes they report."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.delivery import operational_events as kinds
from outbox.core.model.ids import lane_name
from tests.sim.database.inserts import insert_event

if TYPE_CHECKING:
    from uuid import UUID

    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database

RESERVED = "outbox."


def publish_operational_event(
    db: Database, tx: Transaction, kind: str, endpoint_id: UUID | None, data: dict[str, Any]
) -> Steps[bool]:
    """Insert an operational event if a subscription or feed names its type; returns whether one
    does."""
    subscribed = any(
        selects(pattern, kind)
        for table, end in ((db.subscription, "to_batch"), (db.feed, "ended_at"))
        for row in tx.rows(table)
        if row[end] is None
        for pattern in row["types"]
    )
    if not subscribed:
        return False
    payload = {"version": 1, "at": rfc3339(db.wall()), **data}
    if endpoint_id is not None:
        e = tx.get(db.endpoint, endpoint_id)
        assert e is not None
        payload["endpoint"] = {"id": str(endpoint_id), "name": e["name"]}
    payload = {name: value for name, value in payload.items() if value is not None}
    key = None if endpoint_id is None else str(endpoint_id)
    yield from insert_event(db, tx, kind, key, orjson.dumps(payload).decode())
    tx.notes.append(("operational", (kind, endpoint_id, payload)))
    return True


def selects(pattern: str, kind: str) -> bool:
    """Whether a pattern names an operational type; its last segment may be a wildcard."""
    if pattern.endswith(".**"):
        return kind.startswith(pattern[:-2]) and pattern.startswith(RESERVED)
    return pattern == kind


def rfc3339(at: float | None) -> str | None:
    """Format epoch seconds as operational events do."""
    if at is None:
        return None
    utc = datetime.fromtimestamp(at, UTC).replace(tzinfo=None)
    return utc.isoformat(timespec="microseconds") + "Z"


def response_fields(last_response: dict[str, Any] | None) -> dict[str, Any]:
    last = last_response or {}
    return {"status": last.get("status"), "failure": last.get("failure")}


# ----------------------------------------------------------------- dead letters


def contains_ordinary_event(db: Database, lane_id: int, first: int, last: int) -> bool:
    """Whether these sequence numbers of a lane include an ordinary event."""
    return any(
        not db.outbox[g.outbox_id].type.startswith(RESERVED)
        for g in db.deliveries.get(lane_id, ())
        if first <= g.seq <= last
    )


def is_ordinary(db: Database, dead_letter: Row) -> bool:
    """Whether a dead letter has an ordinary event among its sequence numbers."""
    if dead_letter["type"] is not None:
        return not dead_letter["type"].startswith(RESERVED)
    return contains_ordinary_event(
        db, dead_letter["lane_id"], dead_letter["seq"], dead_letter["to_seq"]
    )


def publish_dead_letter_created(
    db: Database, tx: Transaction, dead_letter: Row, *, blocks: bool = False
) -> Steps[None]:
    """Report a dead letter that is new, or that includes an ordinary event only now."""
    if not is_ordinary(db, dead_letter):
        return
    lane = tx.get(db.lane, dead_letter["lane_id"])
    assert lane is not None
    place = {
        "dead_letter": dead_letter["id"],
        "lane": lane_name(lane["endpoint_id"], lane["generation"], lane["slot"]),
        "sequence": dead_letter["seq"],
        "reason": dead_letter["reason"],
    }
    data = {
        **place,
        "to_sequence": dead_letter["to_seq"],
        "event": dead_letter["event_id"] and str(dead_letter["event_id"]),
        "type": dead_letter["type"],
        "attempts": dead_letter["attempts"],
        **response_fields(dead_letter["last_response"]),
    }
    yield from publish_operational_event(
        db, tx, kinds.DEAD_LETTER_CREATED, dead_letter["endpoint_id"], data
    )
    if blocks:
        yield from publish_operational_event(
            db, tx, kinds.LANE_BLOCKED, dead_letter["endpoint_id"], place
        )


# -------------------------------------------------------------------- endpoints


def publish_health(
    db: Database, tx: Transaction, old: Row, new: Row, disabled_at: float | None
) -> Steps[float | None]:
    """Report the changes of an endpoint's health.

    Args:
        disabled_at: the end of a stall that is new, in epoch seconds.

    Returns:
        The beginning of the hold that was reported; None: no hold was reported.
    """
    reported_since, held, endpoint_id = (
        old["reported_held_since"],
        new["reported_held_since"],
        old["endpoint_id"],
    )
    reported = reported_since is not None
    if held is not None and not reported:
        data = {
            "state": new["state"],
            "since": rfc3339(held),
            "held_until": rfc3339(new["held_until"]),
            **response_fields(new["last_response"]),
        }
        reported = yield from publish_operational_event(
            db, tx, kinds.ENDPOINT_FAILING, endpoint_id, data
        )
    elif held is None and reported:
        data = {"held_since": rfc3339(reported_since)}
        yield from publish_operational_event(db, tx, kinds.ENDPOINT_RECOVERED, endpoint_id, data)
    since = new["stalled_since"]
    if new["reported_stalled_at"] not in (None, old["reported_stalled_at"]) and since is not None:
        data = {"since": rfc3339(since), "will_be_disabled_at": rfc3339(disabled_at)}
        yield from publish_operational_event(db, tx, kinds.ENDPOINT_STALLED, endpoint_id, data)
    return held if reported else None


def publish_endpoint_disabled(
    db: Database, tx: Transaction, endpoint_id: UUID, last_response: dict[str, Any] | None
) -> Steps[None]:
    e = tx.get(db.endpoint, endpoint_id)
    assert e is not None
    data = {"reason": e["state_comment"], "by": e["state_by"], **response_fields(last_response)}
    yield from publish_operational_event(db, tx, kinds.ENDPOINT_DISABLED, endpoint_id, data)

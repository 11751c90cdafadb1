"""Recording one delivery in the inbox: the statements to run, and the result.

Sans-IO: `receive` yields statements with their parameters, is sent the rows of each, and
returns the outcome.  All of it runs in the transaction of the effects, with a global lock
order: lanes by name, then the X-Delivery.

A delivery is new if neither its sequence number, nor its X-Delivery, nor the number that it
replays was recorded before.  Usually one of them would suffice; together they also hold when
one was forgotten: X-Delivery values expire, and a replay has a new number.

    fresh        new: process it
    duplicate    processed before: respond 2xx
    conflict     its number was used by another delivery, or lies beyond the end of its
                 lane: two senders claim the same lane.  Nothing was recorded
    early        numbers before it are missing, and the caller requires them first.
                 Nothing was recorded
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import orjson

from outbox.drivers.statement import Call
from outbox.receiver.lane_order import (
    LaneGaps,
    LaneOrder,
    Observation,
    OrderKind,
    SequenceState,
    StoredLane,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.model.int_ranges import Range
    from outbox.drivers.statement import Plan
    from outbox.receiver.inbox.statements import Statements
    from outbox.receiver.message import Message

TOLERANCE = 20
"""A missing number is overdue once it was overtaken by more than this many numbers."""


class DeliveryOutcome(StrEnum):
    """Outcome of recording a delivery; see the top of this module."""

    FRESH = "fresh"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    EARLY = "early"


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """Result of recording one delivery."""

    outcome: DeliveryOutcome
    observation: Observation | None = None
    """Its order check; None if it has no lane, or was early."""
    missing: tuple[Range, ...] = ()
    """The numbers missing before an early delivery."""
    overdue: tuple[Range, ...] = ()
    """Missing numbers that became overdue with this delivery."""

    @property
    def fresh(self) -> bool:
        """The delivery is new and has to be processed."""
        return self.outcome is DeliveryOutcome.FRESH


_IN_ORDER = Observation(OrderKind.IN_ORDER)


def receive(
    sql: Statements,
    message: Message,
    *,
    gaps: bool = True,
    from_start: bool = False,
    tolerance: int = TOLERANCE,
    expired_before: str = "",
) -> Plan[DeliveryResult]:
    """Record a delivery of a relay.

    Args:
        gaps: record it although numbers before it are missing.
        from_start: this inbox is older than every lane.
        tolerance: see `TOLERANCE`.
        expired_before: deliveries received before this time may have expired, RFC 3339.
    """
    claim = {
        "delivery_id": message.delivery_id,
        "lane": message.lane,
        "sequence": message.sequence,
    }
    is_next = message.previous_sequence == message.sequence - 1
    if sql.advance and is_next and message.replay_of is None and not message.lane_ends:
        ((moved, claimed),) = yield Call(sql.advance, claim)
        if moved:
            return DeliveryResult(
                DeliveryOutcome.FRESH if claimed else DeliveryOutcome.DUPLICATE, _IN_ORDER
            )
    replayed_lane, replayed_number = message.replay_of or (message.lane, 0)
    yield Call(sql.add_lane, {"lane": message.lane})
    rows = yield Call(sql.lock_lanes, {"lane": message.lane, "replayed": replayed_lane})
    lanes = {lane.name: lane for lane in map(StoredLane.from_row, rows)}
    own_lane = lanes[message.lane]
    order = LaneOrder.from_state(own_lane.state, from_start=from_start)
    if not gaps and (missing := order.missing_before(message.sequence, message.previous_sequence)):
        return DeliveryResult(DeliveryOutcome.EARLY, missing=missing)
    before = order.high
    observation = order.observe(
        message.sequence, message.previous_sequence, lane_ends=message.lane_ends
    )
    if observation.kind is OrderKind.CONFLICT:
        return DeliveryResult(DeliveryOutcome.CONFLICT, observation)
    claimed = bool((yield Call(sql.claim, claim)))
    is_kept = message.sequence > own_lane.forgotten or message.timestamp > expired_before
    if claimed and observation.kind is OrderKind.DUPLICATE and is_kept:
        # The number was seen with another X-Delivery.  The row of this one cannot have
        # expired, because the event is younger than the retention.
        yield Call(sql.unclaim, {"delivery_id": message.delivery_id})
        return DeliveryResult(
            DeliveryOutcome.CONFLICT, replace(observation, kind=OrderKind.CONFLICT)
        )
    seen = not claimed or observation.kind is OrderKind.DUPLICATE
    replayed = lanes.get(replayed_lane)
    if message.replay_of is not None and replayed is not None:
        other = order if replayed is own_lane else LaneOrder.from_state(replayed.state)
        closed = other.close(replayed_number)
        observation = replace(observation, closed=closed)
        # The replayed number was received, or replayed before.
        seen = seen or (closed is None and replayed_number <= other.high)
        if replayed is not own_lane:
            yield _save_lane(sql, replayed_lane, other)
    yield _save_lane(sql, message.lane, order)
    outcome = DeliveryOutcome.DUPLICATE if seen else DeliveryOutcome.FRESH
    return DeliveryResult(outcome, observation, overdue=_overdue(order, before, tolerance))


def receive_run(sql: Statements, messages: Sequence[Message]) -> Plan[list[DeliveryResult] | None]:
    """Record deliveries with consecutive numbers of a lane in one statement.

    Returns:
        Their results; None: nothing is recorded, and each has to be recorded by `receive`.
    """
    first = messages[0]
    if sql.advance_run is None or not all(
        message.lane == first.lane
        and message.sequence == first.sequence + n
        and message.previous_sequence == message.sequence - 1
        and message.replay_of is None
        and not message.lane_ends
        for n, message in enumerate(messages)
    ):
        return None
    ids = [message.delivery_id for message in messages]
    if len(set(ids)) < len(ids):
        return None
    run = {
        "lane": first.lane,
        "first": first.sequence,
        "last": messages[-1].sequence,
        "ids": orjson.dumps(ids).decode(),
    }
    ((moved, claimed),) = yield Call(sql.advance_run, run)
    if not moved:
        return None
    new = set(orjson.loads(claimed))
    return [
        DeliveryResult(
            DeliveryOutcome.FRESH if each in new else DeliveryOutcome.DUPLICATE, _IN_ORDER
        )
        for each in ids
    ]


def foreign_delivery_id(message_id: str) -> str:
    """Return what is recorded for a `webhook-id`: the prefix keeps it apart from X-Delivery."""
    return f"foreign {message_id}"


def receive_foreign(sql: Statements, message_id: str) -> Plan[DeliveryResult]:
    """Record a request of another sender by its `webhook-id`; it has no lane."""
    claim = {"delivery_id": foreign_delivery_id(message_id), "lane": None, "sequence": None}
    claimed = yield Call(sql.claim, claim)
    return DeliveryResult(DeliveryOutcome.FRESH if claimed else DeliveryOutcome.DUPLICATE)


def end_lane(
    sql: Statements,
    lane: str,
    sequence: int,
    previous_sequence: int,
    siblings: Sequence[str],
    *,
    gaps: bool = True,
    from_start: bool = False,
) -> Plan[DeliveryResult]:
    """Record the end entry of a lane, and the lanes of its generation, each of which ends.

    A reader of the next generation finds there which lanes it has to wait for, also those that
    it has received nothing of.

    Args:
        siblings: names of the lanes of its generation.
        gaps, from_start: see `receive`.
    """
    known = {name for name, *_ in (yield Call(sql.lanes, {}))}
    for name in sorted({lane, *siblings} - known):
        yield Call(sql.add_lane, {"lane": name})
    rows = yield Call(sql.lock_lanes, {"lane": lane, "replayed": lane})
    order = LaneOrder.from_state(StoredLane.from_row(rows[0]).state, from_start=from_start)
    if not gaps and (missing := order.missing_before(sequence, previous_sequence)):
        return DeliveryResult(DeliveryOutcome.EARLY, missing=missing)
    has_ended = order.ended
    observation = order.end(sequence, previous_sequence)
    if observation.kind is OrderKind.CONFLICT:
        return DeliveryResult(DeliveryOutcome.CONFLICT, observation)
    yield _save_lane(sql, lane, order)
    outcome = DeliveryOutcome.DUPLICATE if has_ended else DeliveryOutcome.FRESH
    return DeliveryResult(outcome, observation)


def skip(sql: Statements, lane: str, sequence: int, *, lane_ends: bool) -> Plan[None]:
    """Do not expect the numbers of a lane up to this one any more."""
    yield Call(sql.add_lane, {"lane": lane})
    rows = yield Call(sql.lock_lanes, {"lane": lane, "replayed": lane})
    order = LaneOrder.from_state(StoredLane.from_row(rows[0]).state)
    order.skip(sequence)
    order.ended = order.ended or lane_ends
    yield _save_lane(sql, lane, order)


def record_gaps(sql: Statements, lane: str, gaps: LaneGaps) -> Plan[tuple[Range, ...]]:
    """Record what a catch-up of a lane did not process.

    Returns:
        The unavailable numbers that were missing until now, also at the end of the lane.
    """
    yield Call(sql.add_lane, {"lane": lane})
    rows = yield Call(sql.lock_lanes, {"lane": lane, "replayed": lane})
    before = StoredLane.from_row(rows[0]).state
    order = LaneOrder.from_state(before)
    order.apply_progress(gaps.through, gaps.dead_lettered)
    lost = tuple(each for lo, hi in gaps.unavailable for each in order.mark_unavailable(lo, hi))
    if order.to_state() != before:
        yield _save_lane(sql, lane, order)
    return lost


def _overdue(order: LaneOrder, before: int, tolerance: int) -> tuple[Range, ...]:
    """Return the ranges that became overdue, when the highest number was `before` until now.

    A range becomes overdue as a whole, when its last number is overtaken by more than
    `tolerance`, so that each is reported once.
    """
    return tuple(
        (lo, hi)
        for lo, hi in order.ranges(SequenceState.MISSING)
        if before <= hi + tolerance < order.high
    )


def _save_lane(sql: Statements, lane: str, order: LaneOrder) -> Call:
    state = order.to_state()
    return Call(
        sql.keep_lane,
        {
            "lane": lane,
            "high": state.high,
            "ended": state.ended,
            "missing": orjson.dumps(state.missing).decode(),
            "holes": orjson.dumps(state.holes).decode(),
            "unknown": orjson.dumps(state.unknown).decode(),
        },
    )

"""How one delivery is taken: what to ask of the database, and what follows from it.

Without I/O: `take` yields statements with their parameters, is sent the rows of each,
and returns what the delivery is.  Everything happens in the transaction of the effects,
in which the order of locks is the same for everybody: lanes by their names, then the
X-Delivery.

A delivery is processed if neither its number nor its X-Delivery nor the number that it
stands for was there before.  Either alone would do most of the time; together they also
hold when one of them was forgotten: X-Delivery values expire, and a replay has a new
number.  What the receiver had sent again has a new X-Delivery, too, and says whose copy
it is.

    fresh        process it
    duplicate    it was processed; answer 2xx
    conflict     its number was taken by another delivery, or lies beyond the end of its
                 lane: two senders say that they are the same one.  Nothing was kept
    early        numbers before it are not here yet, and the caller wants them first.
                 Nothing was kept
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from outbox.receiver.catch_up import to_catch_up
from outbox.receiver.fetch import LaneStanding
from outbox.receiver.lane_order import Kind, LaneOrder, LaneState, Observation, State

if TYPE_CHECKING:
    from outbox.core.delivery.receiver_checkpoint import Mark
    from outbox.core.model.int_ranges import Range
    from outbox.receiver.inbox.statements import Statements
    from outbox.receiver.message import Message

TOLERANCE = 20
"""Numbers by which a missing one may be overtaken before it is overdue."""


class Outcome(StrEnum):
    """What a delivery is; see the top of this module."""

    FRESH = "fresh"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    EARLY = "early"


@dataclass(frozen=True, slots=True)
class Taken:
    """One delivery, held against what was there before."""

    outcome: Outcome
    observation: Observation | None = None
    """How it stands in its lane; None: it has no lane, or it was early."""
    missing: tuple[Range, ...] = ()
    """Of an early one: what should have come before it."""
    overdue: tuple[Range, ...] = ()
    """Numbers that are missing, and have now been overtaken by more than is tolerated."""

    @property
    def fresh(self) -> bool:
        """Whether to process it."""
        return self.outcome is Outcome.FRESH


@dataclass(frozen=True, slots=True)
class Compared:
    """What a checkpoint says about each lane of which something is missing."""

    shown: dict[str, tuple[Range, ...]]
    """The numbers that nobody knew of until now."""
    missing: dict[str, tuple[Range, ...]]
    """All that the sender has as delivered, and this receiver has not."""


@dataclass(frozen=True, slots=True)
class Call:
    """A statement, by its name in `Statements`, and its parameters."""

    sql: str
    parameters: dict[str, Any]


Rows: TypeAlias = Sequence[Sequence[Any]]
Steps: TypeAlias = Generator[Call, Rows, Taken]

_IN_ORDER = Observation(Kind.IN_ORDER)


def take(
    sql: Statements,
    message: Message,
    *,
    gaps: bool = True,
    from_start: bool = False,
    tolerance: int = TOLERANCE,
    expired_before: str = "",
) -> Steps:
    """Take a delivery of a relay.

    Args:
        gaps: take it although numbers before it are missing.
        from_start: this inbox is older than every lane.
        tolerance: see `TOLERANCE`.
        expired_before: what was processed before this time may be forgotten, RFC 3339.
    """
    where = {"lane": message.lane, "sequence": message.sequence}
    claim = where | {"delivery_id": message.identity}
    is_next = message.previous_sequence == message.sequence - 1
    if sql.advance and is_next and message.replay_of is None and not message.lane_ends:
        ((moved, claimed),) = yield Call(sql.advance, claim)
        if moved:
            return Taken(Outcome.FRESH if claimed else Outcome.DUPLICATE, _IN_ORDER)
    replayed_lane, replayed_number = message.replay_of or (message.lane, 0)
    yield Call(sql.add_lane, {"lane": message.lane})
    rows = yield Call(sql.lock_lanes, {"lane": message.lane, "replayed": replayed_lane})
    lanes = {lane.name: lane for lane in map(KeptLane.of, rows)}
    own = lanes[message.lane]
    order = LaneOrder.of(own.state, from_start=from_start)
    if not gaps and (missing := order.skips(message.sequence, message.previous_sequence)):
        return Taken(Outcome.EARLY, missing=missing)
    before = order.high
    observation = order.observe(
        message.sequence,
        message.previous_sequence,
        message.delivery_id,
        lane_ends=message.lane_ends,
    )
    if observation.kind is Kind.CONFLICT:
        return Taken(Outcome.CONFLICT, observation)
    claimed = bool((yield Call(sql.claim, claim)))
    is_kept = message.sequence > own.forgotten or message.timestamp > expired_before
    if claimed and observation.kind is Kind.DUPLICATE and is_kept:
        # Whoever had this number had another X-Delivery, or its row would be there: of an
        # event that is younger than what is forgotten, no copy can be.
        yield Call(sql.unclaim, {"delivery_id": message.identity})
        return Taken(Outcome.CONFLICT, replace(observation, kind=Kind.CONFLICT))
    seen = not claimed or observation.kind is Kind.DUPLICATE
    replayed = lanes.get(replayed_lane)
    if message.replay_of is not None and replayed is not None:
        other = order if replayed is own else LaneOrder.of(replayed.state)
        closed = other.close(replayed_number)
        observation = replace(observation, closed=closed)
        # Closed before, or received: somebody processed it.
        seen = seen or (closed is None and replayed_number <= other.high)
        if replayed is not own:
            yield _keep(sql, replayed_lane, other)
    yield _keep(sql, message.lane, order)
    outcome = Outcome.DUPLICATE if seen else Outcome.FRESH
    return Taken(outcome, observation, overdue=_overdue(order, before, tolerance))


def take_foreign(sql: Statements, message_id: str) -> Steps:
    """Take a request of a sender that has no lanes, by its `webhook-id` alone."""
    # So that nobody's id is taken for an X-Delivery.
    claim = {"delivery_id": f"foreign {message_id}", "lane": None, "sequence": None}
    claimed = yield Call(sql.claim, claim)
    return Taken(Outcome.FRESH if claimed else Outcome.DUPLICATE)


def compare(
    sql: Statements, marks: Sequence[Mark], *, from_start: bool = False
) -> Generator[Call, Rows, Compared]:
    """Hold what is known of lanes against what their sender says of them."""
    rows = yield Call(sql.lanes, {})
    known = {lane.name: lane for lane in map(KeptLane.of, rows)}
    told = [LaneStanding(mark.lane, mark.sequence, mark.generation) for mark in marks]
    behind = set(to_catch_up(known, told))
    shown: dict[str, tuple[Range, ...]] = {}
    still: dict[str, tuple[Range, ...]] = {}
    # In the order in which everybody locks lanes.
    for mark in sorted(marks, key=lambda mark: mark.lane):
        if mark.lane not in behind and not (from_start and mark.lane not in known):
            continue
        yield Call(sql.add_lane, {"lane": mark.lane})
        rows = yield Call(sql.lock_lanes, {"lane": mark.lane, "replayed": mark.lane})
        before = KeptLane.of(rows[0]).state
        order = LaneOrder.of(before)
        if missing := order.hear_of(mark.sequence, mark.given_up):
            shown[mark.lane] = missing
        if order.kept() != before:
            yield _keep(sql, mark.lane, order)
        left = tuple((lo, hi) for lo, hi in order.ranges(State.MISSING) if lo <= mark.sequence)
        if left:
            still[mark.lane] = left
    return Compared(shown, still)


def forgo(
    sql: Statements, lane: str, numbers: Sequence[Range]
) -> Generator[Call, Rows, tuple[Range, ...]]:
    """Wait no longer for numbers that nobody can send any more; returns those missed."""
    yield Call(sql.touch_lane, {"lane": lane})
    rows = yield Call(sql.lock_lanes, {"lane": lane, "replayed": lane})
    if not rows:
        return ()
    order = LaneOrder.of(KeptLane.of(rows[0]).state)
    missed = tuple(each for lo, hi in numbers for each in order.forgo(lo, hi))
    if missed:
        yield _keep(sql, lane, order)
    return missed


@dataclass(frozen=True, slots=True)
class KeptLane:
    """A lane as it stands in the database."""

    name: str
    state: LaneState
    forgotten: int
    """Deliveries up to this number may have expired."""

    @classmethod
    def of(cls, row: Sequence[Any]) -> KeptLane:
        """Of a row of `lock_lanes` or `lanes`."""
        name, high, ended, missing, holes, unknown, forgotten = row
        ranges = [
            tuple((lo, hi) for lo, hi in orjson.loads(text)) for text in (missing, holes, unknown)
        ]
        return cls(name, LaneState(high, bool(ended), *ranges), forgotten)


def _overdue(order: LaneOrder, before: int, tolerance: int) -> tuple[Range, ...]:
    """What became overdue just now, when the highest number was `before` until now.

    Each range as a whole, when its last number was overtaken by more than is tolerated.
    """
    return tuple(
        (lo, hi) for lo, hi in order.ranges(State.MISSING) if before <= hi + tolerance < order.high
    )


def _keep(sql: Statements, lane: str, order: LaneOrder) -> Call:
    kept = order.kept()
    return Call(
        sql.keep_lane,
        {
            "lane": lane,
            "high": kept.high,
            "ended": kept.ended,
            "missing": orjson.dumps(kept.missing).decode(),
            "holes": orjson.dumps(kept.holes).decode(),
            "unknown": orjson.dumps(kept.unknown).decode(),
        },
    )

"""Order check and gap detection for the deliveries of a lane.

A lane numbers its deliveries 1, 2, 3 …  Every delivery also carries the previous
sequence number that was not dead-lettered, so a receiver can distinguish two kinds of
absent numbers:

* **a hole** was dead-lettered by the sender: 6 is followed by 8 with previous 6, so 7
  is a dead letter that can be fetched or replayed;
* **missing** is a number that the sender recorded as delivered and this receiver did
  not get: 6 is followed by 8 with previous 7.

Every sequence number from 1 to the highest one received is in exactly one state:

    seen      received, or replaced by the replay of a hole
    missing   should have been received
    hole      dead-lettered by the sender
    unknown   from before this receiver joined the lane, or forgotten

The transitions are:

    event                                        from              to
    received                                     any but seen      seen
    skipped, at or below the sender's previous   (new)             missing
    skipped, above the sender's previous         (new)             hole
    acknowledged according to a checkpoint       (new)             missing
    skipped by an older delivery that comes late missing, unknown  hole
    replayed (`replay_of`)                       any but seen      seen
    no longer retained by the sender             missing           unknown
    first number of a lane joined in the middle  (new, below it)   unknown
    too many ranges in a lane                    any, the lowest   unknown

"Skipped" numbers lie between the highest one received and the one that just
arrived.  The first reception wins: a received number stays seen, even if a later
delivery lists it as dead-lettered, because an acknowledgement can be lost in a crash.

A lane ends when the number of lanes of its endpoint changes; `lane_ends` marks its last
delivery.  Once an ended lane has neither missing numbers nor holes, only its last
number is kept.  It identifies late copies (duplicates) and new numbers beyond the end
(conflicts).  The end may also lie below the highest number received, when a failover
of the sender's database lost the deliveries after it.  The numbers beyond the end are
*lost*: they were received and stay seen, but the sender has no record of them.

Memory is bounded: states are stored as ranges, with limits on the ranges of a lane, on
the lanes, and on the `X-Delivery` values kept to detect a sequence number used twice.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING

from outbox.core.model.int_ranges import Range, RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox.core.delivery.receiver_checkpoint import LaneMark

RANGES_MAX = 1000
"""Ranges kept for a lane; beyond this the lowest ones become unknown."""
LANES_MAX = 10_000
IDS_MAX = 128
"""Newest `X-Delivery` values kept for each lane."""


class OrderKind(StrEnum):
    """Position of a delivery relative to those received before it in its lane."""

    IN_ORDER = "in_order"
    """The next number, or the next one after holes declared by the sender."""
    JOINED = "joined"
    """This receiver's first delivery of a running lane; earlier numbers are unknown."""
    GAP = "gap"
    """Numbers before it are missing."""
    DUPLICATE = "duplicate"
    OLD = "old"
    """Not seen before, but overtaken by a higher number; `was` is its state until now."""
    CONFLICT = "conflict"
    """The number was seen with another `X-Delivery`, or lies beyond the end of its
    lane: two senders, or a forgery."""


class SequenceState(StrEnum):
    """State of a sequence number that was not seen."""

    MISSING = "missing"
    HOLE = "hole"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Observation:
    """Result of the order check for one delivery."""

    kind: OrderKind
    missing: tuple[Range, ...] = ()
    """Numbers that this delivery reveals to be missing."""
    holes: tuple[Range, ...] = ()
    """Numbers that this delivery declares as dead-lettered."""
    was: SequenceState | None = None
    """For an old number: its state until now."""
    closed: SequenceState | None = None
    """For a replay: the state, until now, of the number that it replaces."""
    lost: Range | None = None
    """Numbers received beyond this end of the lane, which the sender lost."""


@dataclass(frozen=True, slots=True)
class LaneState:
    """Persistent state of a lane: everything except its newest `X-Delivery` values."""

    high: int = 0
    ended: bool = False
    missing: tuple[Range, ...] = ()
    holes: tuple[Range, ...] = ()
    unknown: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class OrderTotals:
    """Totals over all lanes."""

    received: int
    """All deliveries observed; the next five fields count kinds of them."""
    duplicates: int
    gaps: int
    out_of_order: int
    """Old deliveries that had been missing: a higher number overtook them."""
    late: int
    """Old deliveries that had been a hole or unknown: copies that were delayed."""
    conflicts: int
    missing: int
    """Numbers missing now."""
    holes: int
    """Dead-lettered numbers that were neither delivered late nor replayed."""


class LaneOrder:
    """The order check of one lane.

    Args:
        from_start: this receiver is older than the lane, so that numbers before the
            first one received are missing, not unknown.
    """

    __slots__ = ("_from_start", "_ids", "_states", "ended", "forgotten", "high")

    def __init__(self, *, from_start: bool = False) -> None:
        self._from_start = from_start
        self._states = {state: RangeSet() for state in SequenceState}
        self._ids: OrderedDict[int, str] = OrderedDict()
        self.high = 0
        """Highest sequence number received; 0 before the first."""
        self.ended = False
        """`high` is the last number of the lane."""
        self.forgotten = dict.fromkeys(SequenceState, 0)
        """Forgotten numbers, by their state when they were forgotten."""

    @classmethod
    def from_state(cls, kept: LaneState, *, from_start: bool = False) -> LaneOrder:
        """Restore an order check from its persistent state."""
        order = cls(from_start=from_start)
        order.high, order.ended = kept.high, kept.ended
        for state, ranges in zip(
            (SequenceState.MISSING, SequenceState.HOLE, SequenceState.UNKNOWN),
            (kept.missing, kept.holes, kept.unknown),
            strict=True,
        ):
            for numbers in ranges:
                order._states[state].add(*numbers)
        return order

    def to_state(self) -> LaneState:
        """Return the persistent state."""
        missing, holes, unknown = map(
            self.ranges, (SequenceState.MISSING, SequenceState.HOLE, SequenceState.UNKNOWN)
        )
        return LaneState(self.high, self.ended, missing, holes, unknown)

    def ranges(self, state: SequenceState) -> tuple[Range, ...]:
        """Return the numbers in this state, ascending."""
        return tuple(self._states[state])

    def count(self, state: SequenceState) -> int:
        """Count the numbers in this state, including forgotten ones."""
        return self._states[state].count + self.forgotten[state]

    @property
    def is_complete(self) -> bool:
        """The lane ended and has neither missing numbers nor holes."""
        return (
            self.ended
            and not self._states[SequenceState.MISSING]
            and not self._states[SequenceState.HOLE]
        )

    def last(self) -> tuple[int, str | None]:
        """Return the highest number received and its `X-Delivery`, if known."""
        return self.high, self._ids.get(self.high)

    def observe(
        self, sequence: int, previous_sequence: int, delivery_id: str, *, lane_ends: bool = False
    ) -> Observation:
        """Record one delivery.  A conflict changes nothing.

        Raises:
            ValueError: not 0 <= previous_sequence < sequence.
        """
        _check(sequence, previous_sequence)
        if self.ended and sequence > self.high:
            return Observation(OrderKind.CONFLICT)
        lost = _lost(sequence, self.high) if lane_ends else None
        if sequence > self.high:
            observation = self._observe_ahead(sequence, previous_sequence)
        else:
            observation = self._observe_behind(sequence, previous_sequence, delivery_id)
        if observation.kind not in (OrderKind.DUPLICATE, OrderKind.CONFLICT):
            self._ids[sequence] = delivery_id
            if len(self._ids) > IDS_MAX:
                self._ids.popitem(last=False)
            self._forget()
        if lane_ends and observation.kind is not OrderKind.CONFLICT:
            self.ended = True
            observation = replace(observation, lost=lost)
        return observation

    def close(self, sequence: int) -> SequenceState | None:
        """Mark a number as seen because its replay arrived.

        Returns:
            The state of the number until now.  None: it was received already, or lies
            beyond the highest number received.
        """
        for state, numbers in self._states.items():
            if numbers.remove(sequence, sequence):
                return state
        return None

    def apply_checkpoint(
        self, sequence: int, dead_lettered: Iterable[Range] = ()
    ) -> tuple[Range, ...]:
        """Apply a checkpoint: the sender delivered everything up to this number.

        Args:
            sequence: the last acknowledged number.
            dead_lettered: ranges below it that were dead-lettered instead.

        Returns:
            The ranges that this reveals to be missing.
        """
        if self.ended and sequence > self.high:
            return ()
        shown = RangeSet()
        if sequence > self.high:
            for numbers in (shown, self._states[SequenceState.MISSING]):
                numbers.add(self.high + 1, sequence)
            self.high = sequence
        for lo, hi in dead_lettered:
            shown.remove(lo, hi)
            self._mark_holes(lo, min(hi, self.high))
        self._forget()
        return tuple(shown)

    def mark_unavailable(self, lo: int, hi: int) -> tuple[Range, ...]:
        """Change missing numbers that cannot be fetched any more to unknown.

        Returns:
            The ranges that were missing until now.
        """
        unavailable = self._states[SequenceState.MISSING].remove(lo, hi)
        for numbers in unavailable:
            self._states[SequenceState.UNKNOWN].add(*numbers)
        return unavailable

    def missing_before(self, sequence: int, previous_sequence: int) -> tuple[Range, ...]:
        """Return the numbers missing before this delivery; changes nothing."""
        joins = self.high == 0 and not self._from_start
        before = RangeSet()
        for lo, hi in self._states[SequenceState.MISSING]:
            before.add(lo, min(hi, previous_sequence))
        if not joins:
            before.add(self.high + 1, previous_sequence)
        return tuple(before)

    def _observe_ahead(self, sequence: int, previous: int) -> Observation:
        joins = self.high == 0 and not self._from_start
        first, last = self.high + 1, previous
        self._states[SequenceState.UNKNOWN if joins else SequenceState.MISSING].add(first, last)
        renamed = self._mark_holes(previous + 1, self.high)
        fresh = (max(first, previous + 1), sequence - 1)
        self._states[SequenceState.HOLE].add(*fresh)
        self.high = sequence
        skipped = first <= last
        kind = OrderKind.IN_ORDER if not skipped else OrderKind.JOINED if joins else OrderKind.GAP
        return Observation(
            kind,
            missing=((first, last),) if kind is OrderKind.GAP else (),
            holes=(*renamed, fresh) if fresh[0] <= fresh[1] else renamed,
        )

    def _observe_behind(self, sequence: int, previous: int, delivery_id: str) -> Observation:
        known = self._ids.get(sequence)
        if known is not None:
            return Observation(OrderKind.DUPLICATE if known == delivery_id else OrderKind.CONFLICT)
        was = self.close(sequence)
        if was is None:
            return Observation(OrderKind.DUPLICATE)
        return Observation(
            OrderKind.OLD, holes=self._mark_holes(previous + 1, sequence - 1), was=was
        )

    def _mark_holes(self, lo: int, hi: int) -> tuple[Range, ...]:
        """Turn missing and unknown numbers of a dead-lettered range into holes."""
        named = [
            *self._states[SequenceState.MISSING].remove(lo, hi),
            *self._states[SequenceState.UNKNOWN].remove(lo, hi),
        ]
        for numbers in named:
            self._states[SequenceState.HOLE].add(*numbers)
        return tuple(sorted(named))

    def _forget(self) -> None:
        """Enforce RANGES_MAX by merging the two lowest ranges into one unknown range."""
        while sum(map(len, self._states.values())) > RANGES_MAX:
            lowest = sorted(r for numbers in self._states.values() for r in islice(numbers, 2))
            horizon = lowest[1][1]
            for state, numbers in self._states.items():
                before = numbers.count
                numbers.remove(1, horizon)
                if state is not SequenceState.UNKNOWN:
                    self.forgotten[state] += before - numbers.count
            self._states[SequenceState.UNKNOWN].add(1, horizon)


class OrderTracker:
    """The order check for all lanes of a receiver, in memory.

    Args:
        from_start: this receiver is older than every lane.
        lanes_max: lanes kept.  Beyond it the least recently used lane is forgotten;
            its missing numbers stay in the totals.  As many completed lanes are kept
            by their last number.
    """

    def __init__(self, *, from_start: bool = False, lanes_max: int = LANES_MAX) -> None:
        self._from_start = from_start
        self._lanes_max = lanes_max
        self._lanes: OrderedDict[str, LaneOrder] = OrderedDict()
        self._completed: OrderedDict[str, tuple[int, str | None]] = OrderedDict()
        self._kinds = dict.fromkeys(OrderKind, 0)
        self._was = dict.fromkeys(SequenceState, 0)
        self._forgotten = dict.fromkeys(SequenceState, 0)

    @property
    def lanes(self) -> dict[str, LaneOrder]:
        """Lanes that are not complete, the most recently used one last."""
        return dict(self._lanes)

    def observe(
        self,
        lane: str,
        sequence: int,
        previous_sequence: int,
        delivery_id: str,
        replay_of: tuple[str, int] | None = None,
        *,
        lane_ends: bool = False,
    ) -> Observation:
        """Record one delivery and check its order.

        Args:
            replay_of: lane and sequence number that this delivery replays.
            lane_ends: this delivery is the last one of its lane.

        Raises:
            ValueError: not 0 <= previous_sequence < sequence.
        """
        _check(sequence, previous_sequence)
        if lane in self._completed:
            observation = self._observe_completed(lane, sequence, delivery_id, lane_ends=lane_ends)
        else:
            order = self._lanes.get(lane) or LaneOrder(from_start=self._from_start)
            observation = order.observe(
                sequence, previous_sequence, delivery_id, lane_ends=lane_ends
            )
            self._lanes[lane] = order
            self._lanes.move_to_end(lane)
            self._drop_if_complete(lane)
        if len(self._lanes) > self._lanes_max:
            self._forget(self._lanes.popitem(last=False)[1])
        if replay_of is not None and observation.kind is not OrderKind.CONFLICT:
            replayed = self._lanes.get(replay_of[0])
            if replayed is not None:
                observation = replace(observation, closed=replayed.close(replay_of[1]))
                self._drop_if_complete(replay_of[0])
        self._kinds[observation.kind] += 1
        if observation.was is not None:
            self._was[observation.was] += 1
        return observation

    def apply_checkpoint(self, mark: LaneMark) -> tuple[Range, ...]:
        """Apply a checkpoint of one lane.

        A lane without any delivery here is ignored unless `from_start` is set: its
        deliveries may have been made to an earlier receiver.

        Returns:
            The ranges that this reveals to be missing.
        """
        order = self._lanes.get(mark.lane)
        if order is None:
            if mark.lane in self._completed or not self._from_start:
                return ()
            order = self._lanes[mark.lane] = LaneOrder(from_start=True)
        return order.apply_checkpoint(mark.sequence, mark.dead_lettered)

    def totals(self) -> OrderTotals:
        """Return the totals up to now."""
        return OrderTotals(
            received=sum(self._kinds.values()),
            duplicates=self._kinds[OrderKind.DUPLICATE],
            gaps=self._kinds[OrderKind.GAP],
            out_of_order=self._was[SequenceState.MISSING],
            late=self._was[SequenceState.HOLE] + self._was[SequenceState.UNKNOWN],
            conflicts=self._kinds[OrderKind.CONFLICT],
            missing=self._sum(SequenceState.MISSING),
            holes=self._sum(SequenceState.HOLE),
        )

    def _observe_completed(
        self, lane: str, sequence: int, delivery_id: str, *, lane_ends: bool
    ) -> Observation:
        """Check a delivery of a completed lane: a duplicate or a conflict."""
        self._completed.move_to_end(lane)
        last, last_id = self._completed[lane]
        other = sequence == last and last_id not in (None, delivery_id)
        if sequence > last or other:
            return Observation(OrderKind.CONFLICT)
        return Observation(OrderKind.DUPLICATE, lost=_lost(sequence, last) if lane_ends else None)

    def _drop_if_complete(self, lane: str) -> None:
        """Keep only the last number of a completed lane."""
        order = self._lanes[lane]
        if order.is_complete:
            self._completed[lane] = order.last()
            self._forget(self._lanes.pop(lane))
            if len(self._completed) > self._lanes_max:
                self._completed.popitem(last=False)

    def _forget(self, order: LaneOrder) -> None:
        for state in SequenceState:
            self._forgotten[state] += order.count(state)

    def _sum(self, state: SequenceState) -> int:
        return self._forgotten[state] + sum(order.count(state) for order in self._lanes.values())


def _lost(last: int, high: int) -> Range | None:
    """Return the numbers received beyond the last number of a lane."""
    return (last + 1, high) if last < high else None


def _check(sequence: int, previous_sequence: int) -> None:
    if not 0 <= previous_sequence < sequence:
        raise ValueError(
            f"sequence {sequence} with previous {previous_sequence}: "
            "the previous one is 0 or more, and lower"
        )

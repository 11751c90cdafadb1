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
    completed according to the sender            (new)             missing
    dead-lettered according to the sender        missing, unknown  hole
    skipped by an older delivery that comes late missing, unknown  hole
    replayed (`replay_of`)                       any but seen      seen
    no longer retained by the sender             missing           unknown
    skipped by an operator                       missing, (new)    unknown
    first number of a lane joined in the middle  (new, below it)   unknown
    too many ranges in a lane                    any, the lowest   unknown

"Skipped" numbers lie between the highest one received and the one that just
arrived.  The first reception wins: a received number stays seen, even if a later
delivery lists it as dead-lettered, because an acknowledgement can be lost in a crash.

A lane ends when the number of lanes of its endpoint changes; `lane_ends` marks its last
delivery.  A number beyond the end is a conflict.  The end may also lie below the highest
number received, when a failover of the sender's database lost the deliveries after it.  The
numbers beyond the end are *lost*: they were received and stay seen, but the sender has no
record of them.

Memory is bounded: states are stored as ranges, with a limit on the ranges of a lane.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.model.int_ranges import Range, RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


RANGES_MAX = 1000
"""Ranges kept for a lane; beyond this the lowest ones become unknown."""


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
    """The number was not seen before, but overtaken by a higher one; `was` is its state until
    now."""
    CONFLICT = "conflict"
    """The number lies beyond the end of its lane, or an inbox found that it was seen with
    another `X-Delivery`: two senders, or a forgery."""


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
    """The state of an old number until now."""
    closed: SequenceState | None = None
    """The state, until now, of the number that a replay replaces."""
    lost: Range | None = None
    """Numbers received beyond this end of the lane, which the sender lost."""


@dataclass(frozen=True, slots=True)
class LaneState:
    """Persistent state of a lane."""

    high: int = 0
    ended: bool = False
    missing: tuple[Range, ...] = ()
    holes: tuple[Range, ...] = ()
    unknown: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredLane:
    """A row of the inbox's lane table."""

    name: str
    state: LaneState
    forgotten: int
    """Deliveries up to this number may have expired."""

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> StoredLane:
        """Parse a row of the statements `lock_lanes` and `lanes`."""
        name, high, ended, missing, holes, unknown, forgotten = row
        ranges = [
            tuple((lo, hi) for lo, hi in orjson.loads(text)) for text in (missing, holes, unknown)
        ]
        return cls(name, LaneState(high, bool(ended), *ranges), forgotten)


@dataclass(frozen=True, slots=True)
class LaneGaps:
    """Numbers of a lane that a catch-up does not process, also at the end of the lane."""

    through: int
    """The catch-up has completed the numbers up to this one."""
    dead_lettered: tuple[Range, ...]
    """Numbers that the sender had dead-lettered."""
    unavailable: tuple[Range, ...]
    """Numbers that the sender no longer retains, or that a handler refused."""


class LaneOrder:
    """The order check of one lane.

    Args:
        from_start: this receiver is older than the lane, so that numbers before the
            first one received are missing, not unknown.
    """

    __slots__ = ("_from_start", "_states", "ended", "high")

    def __init__(self, *, from_start: bool = False) -> None:
        self._from_start = from_start
        self._states = {state: RangeSet() for state in SequenceState}
        self.high = 0
        """Highest sequence number received; 0 before the first."""
        self.ended = False
        """`high` is the last number of the lane."""

    @classmethod
    def from_state(cls, kept: LaneState, *, from_start: bool = False) -> LaneOrder:
        """Restore an order check from its persistent state."""
        order = cls(from_start=from_start)
        order.high, order.ended = kept.high, kept.ended
        for state, ranges in zip(
            SequenceState, (kept.missing, kept.holes, kept.unknown), strict=True
        ):
            for numbers in ranges:
                order._states[state].add(*numbers)
        return order

    def to_state(self) -> LaneState:
        """Return the persistent state."""
        return LaneState(self.high, self.ended, *map(self.ranges, SequenceState))

    def ranges(self, state: SequenceState) -> tuple[Range, ...]:
        """Return the numbers in this state, ascending."""
        return tuple(self._states[state])

    def observe(
        self, sequence: int, previous_sequence: int, *, lane_ends: bool = False
    ) -> Observation:
        """Record one delivery.  A conflict changes nothing.

        Raises:
            ValueError: not 0 <= previous_sequence < sequence.
        """
        if not 0 <= previous_sequence < sequence:
            raise ValueError(
                f"sequence {sequence} with previous {previous_sequence}: "
                "the previous one is 0 or more, and lower"
            )
        if self.ended and sequence > self.high:
            return Observation(OrderKind.CONFLICT)
        lost = (sequence + 1, self.high) if lane_ends and sequence < self.high else None
        if sequence > self.high:
            observation = self._observe_ahead(sequence, previous_sequence)
        else:
            observation = self._observe_behind(sequence, previous_sequence)
        self._forget()
        if lane_ends:
            self.ended = True
            observation = replace(observation, lost=lost)
        return observation

    def end(self, sequence: int, previous_sequence: int) -> Observation:
        """Record the end entry of a lane in a stream, which has a sequence number of its own.

        The numbers between `previous_sequence` and its own are holes: the sender assigned and
        dead-lettered them.

        Raises:
            ValueError: as for `observe`.
        """
        return self.observe(sequence, previous_sequence, lane_ends=True)

    def skip(self, sequence: int) -> None:
        """Do not expect the numbers up to this one any more: an operator has decided so."""
        self.mark_unavailable(1, sequence)
        if sequence > self.high:
            self._states[SequenceState.UNKNOWN].add(self.high + 1, sequence)
            self.high = sequence
        self._forget()

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

    def apply_progress(self, sequence: int, dead_lettered: Iterable[Range] = ()) -> None:
        """Apply the sender's progress: it completed every number up to this one.

        Numbers beyond the end of the lane are ignored.

        Args:
            sequence: the last completed number.
            dead_lettered: ranges that were dead-lettered instead of delivered.
        """
        if sequence > self.high and not self.ended:
            self._states[SequenceState.MISSING].add(self.high + 1, sequence)
            self.high = sequence
        for lo, hi in dead_lettered:
            self._mark_holes(lo, min(hi, self.high))
        self._forget()

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

    def _observe_behind(self, sequence: int, previous: int) -> Observation:
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
            for numbers in self._states.values():
                numbers.remove(1, horizon)
            self._states[SequenceState.UNKNOWN].add(1, horizon)

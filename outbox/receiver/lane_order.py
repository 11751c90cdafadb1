"""The receiver's order check: is anything missing, and was it meant to be?

A lane counts 1, 2, 3 …  Every delivery also names the number before it that
was not given up, so a receiver can tell two kinds of absence apart:

* **a hole** was given up by the sender, which says so: after 6 comes 8 with
  previous 6, so 7 is a dead letter that can be fetched or replayed;
* **missing** is a number that the sender delivered to somebody, only not to
  us: after 6 comes 8 with previous 7.

Every number from 1 to the highest one received is in exactly one state:

    seen      received, or replaced by the replay of a hole
    missing   should have been received
    hole      given up by the sender
    unknown   from before this receiver joined the lane, or forgotten

and these are all the ways between them:

    event                                        from              to
    received                                     any but seen      seen
    skipped, at or below the sender's previous   (new)             missing
    skipped, above the sender's previous         (new)             hole
    told by the sender to be delivered           (new)             missing
    named by an older delivery that comes late   missing, unknown  hole
    replayed (`replay_of`)                       any but seen      seen
    the sender does not keep it any more         missing           unknown
    first number of a lane joined in the middle  (new, below it)   unknown
    too many ranges in a lane                    any, the lowest   unknown

"Skipped" numbers lie between the highest one received and the one that just
came.  What was received first counts: a number that is there stays seen, even
if a later delivery names it as given up, because an acknowledgement can be
lost in a crash.

A lane ends when the number of lanes changes; its last delivery says so.  When
nothing of it is missing or a hole any more, no more is kept of it than its last
number, by which late copies are known, and contradictions: what lies beyond an
end and is new.  An end may also lie below what was received: a fail-over of the
sender's database lost what came after it.  The numbers beyond are *lost* then.
They were received, and stay so; the sender knows nothing of them any more.

Memory is bounded: states are ranges, and there is a limit to the ranges of a
lane, to the lanes, and to the `X-Delivery` values kept for finding a number
that was used twice.
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

    from outbox.core.delivery.receiver_checkpoint import Mark

RANGES_MAX = 1000
"""Ranges that a lane may take before its oldest trouble is forgotten."""
LANES_MAX = 10_000
IDS_MAX = 128
"""Newest `X-Delivery` values kept for each lane."""


class Kind(StrEnum):
    """How a delivery stands to those before it in its lane."""

    IN_ORDER = "in_order"
    """The next one, or the next one after holes that the sender named."""
    JOINED = "joined"
    """The lane's first for this receiver, in its middle; what was before is unknown."""
    GAP = "gap"
    """Numbers before it should have come and did not."""
    DUPLICATE = "duplicate"
    OLD = "old"
    """Not seen before, but a higher number was; `was` tells what it counted as."""
    CONFLICT = "conflict"
    """A number that was seen with another `X-Delivery`, or beyond the end of its
    lane: two senders, or a forgery."""


class State(StrEnum):
    """What a number not yet seen counts as."""

    MISSING = "missing"
    HOLE = "hole"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Observation:
    """What one delivery says about its lane."""

    kind: Kind
    missing: tuple[Range, ...] = ()
    """Numbers that this delivery shows to be missing."""
    holes: tuple[Range, ...] = ()
    """Numbers that this delivery names as given up."""
    was: State | None = None
    """Of an old number: what it counted as until now."""
    closed: State | None = None
    """Of a replay: what the number it stands for counted as until now."""
    lost: Range | None = None
    """Numbers received beyond this end of the lane: the sender lost them."""


@dataclass(frozen=True, slots=True)
class LaneState:
    """All that is known of a lane but its newest `X-Delivery` values, to be kept somewhere."""

    high: int = 0
    ended: bool = False
    missing: tuple[Range, ...] = ()
    holes: tuple[Range, ...] = ()
    unknown: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class OrderTotals:
    """Sums over all lanes."""

    received: int
    """All deliveries taken in; the next five are kinds of them."""
    duplicates: int
    gaps: int
    out_of_order: int
    """Old ones that had been missing: a higher number overtook them."""
    late: int
    """Old ones that had been given up, or were unknown: copies on a slow way."""
    conflicts: int
    missing: int
    """Numbers missing now."""
    holes: int
    """Numbers that the sender gave up, and neither sent late nor replayed."""


class LaneOrder:
    """The order check of one lane.

    `from_start` says that this receiver is there since the lane began, so that
    whatever precedes the first number received is missing, not unknown.
    """

    __slots__ = ("_from_start", "_ids", "_states", "ended", "forgotten", "high")

    def __init__(self, *, from_start: bool = False) -> None:
        self._from_start = from_start
        self._states = {state: RangeSet() for state in State}
        self._ids: OrderedDict[int, str] = OrderedDict()
        self.high = 0
        """The highest number received, 0 before the first."""
        self.ended = False
        """That number is the lane's last."""
        self.forgotten = dict.fromkeys(State, 0)
        """How many numbers were missing, or a hole, when they were forgotten."""

    @classmethod
    def of(cls, kept: LaneState, *, from_start: bool = False) -> LaneOrder:
        """The order check that goes on from what was kept."""
        order = cls(from_start=from_start)
        order.high, order.ended = kept.high, kept.ended
        for state, ranges in zip(
            (State.MISSING, State.HOLE, State.UNKNOWN),
            (kept.missing, kept.holes, kept.unknown),
            strict=True,
        ):
            for numbers in ranges:
                order._states[state].add(*numbers)
        return order

    def kept(self) -> LaneState:
        """What to keep of it."""
        missing, holes, unknown = map(self.ranges, (State.MISSING, State.HOLE, State.UNKNOWN))
        return LaneState(self.high, self.ended, missing, holes, unknown)

    def ranges(self, state: State) -> tuple[Range, ...]:
        """The numbers in this state, ascending."""
        return tuple(self._states[state])

    def count(self, state: State) -> int:
        """How many numbers are in this state, or were when they were forgotten."""
        return self._states[state].count + self.forgotten[state]

    @property
    def is_over(self) -> bool:
        """It ended, and there is nothing left that could be said of it."""
        return self.ended and not self._states[State.MISSING] and not self._states[State.HOLE]

    def last(self) -> tuple[int, str | None]:
        """The highest number received, and the `X-Delivery` it had, if that is known."""
        return self.high, self._ids.get(self.high)

    def observe(
        self, sequence: int, previous_sequence: int, delivery_id: str, *, lane_ends: bool = False
    ) -> Observation:
        """Take in one delivery.  A conflict changes nothing.

        Raises:
            ValueError: not 0 <= previous_sequence < sequence.
        """
        _check(sequence, previous_sequence)
        if self.ended and sequence > self.high:
            return Observation(Kind.CONFLICT)
        lost = _lost(sequence, self.high) if lane_ends else None
        if sequence > self.high:
            observation = self._ahead(sequence, previous_sequence)
        else:
            observation = self._behind(sequence, previous_sequence, delivery_id)
        if observation.kind not in (Kind.DUPLICATE, Kind.CONFLICT):
            self._ids[sequence] = delivery_id
            if len(self._ids) > IDS_MAX:
                self._ids.popitem(last=False)
            self._forget()
        if lane_ends and observation.kind is not Kind.CONFLICT:
            self.ended = True
            observation = replace(observation, lost=lost)
        return observation

    def close(self, sequence: int) -> State | None:
        """A replay of this number came; returns what the number counted as.

        None if there was nothing to close: it was received already, or lies
        beyond what this receiver knows of the lane.
        """
        for state, numbers in self._states.items():
            if numbers.remove(sequence, sequence):
                return state
        return None

    def hear_of(self, sequence: int, given_up: Iterable[Range] = ()) -> tuple[Range, ...]:
        """The sender has this number as delivered; returns what that shows to be missing.

        Everything up to it is there to be had, apart from what the sender gave up.
        """
        if self.ended and sequence > self.high:
            return ()
        shown = RangeSet()
        if sequence > self.high:
            for numbers in (shown, self._states[State.MISSING]):
                numbers.add(self.high + 1, sequence)
            self.high = sequence
        for lo, hi in given_up:
            shown.remove(lo, hi)
            self._name_holes(lo, min(hi, self.high))
        self._forget()
        return tuple(shown)

    def forgo(self, lo: int, hi: int) -> tuple[Range, ...]:
        """Nobody can send these any more: of them, what was missing is unknown now."""
        missed = self._states[State.MISSING].remove(lo, hi)
        for numbers in missed:
            self._states[State.UNKNOWN].add(*numbers)
        return missed

    def skips(self, sequence: int, previous_sequence: int) -> tuple[Range, ...]:
        """Numbers that should be here before this delivery, and are not; changes nothing."""
        joins = self.high == 0 and not self._from_start
        before = RangeSet()
        for lo, hi in self._states[State.MISSING]:
            before.add(lo, min(hi, previous_sequence))
        if not joins:
            before.add(self.high + 1, previous_sequence)
        return tuple(before)

    def _ahead(self, sequence: int, previous: int) -> Observation:
        joins = self.high == 0 and not self._from_start
        first, last = self.high + 1, previous
        self._states[State.UNKNOWN if joins else State.MISSING].add(first, last)
        renamed = self._name_holes(previous + 1, self.high)
        fresh = (max(first, previous + 1), sequence - 1)
        self._states[State.HOLE].add(*fresh)
        self.high = sequence
        skipped = first <= last
        kind = Kind.IN_ORDER if not skipped else Kind.JOINED if joins else Kind.GAP
        return Observation(
            kind,
            missing=((first, last),) if kind is Kind.GAP else (),
            holes=(*renamed, fresh) if fresh[0] <= fresh[1] else renamed,
        )

    def _behind(self, sequence: int, previous: int, delivery_id: str) -> Observation:
        known = self._ids.get(sequence)
        if known is not None:
            return Observation(Kind.DUPLICATE if known == delivery_id else Kind.CONFLICT)
        was = self.close(sequence)
        if was is None:
            return Observation(Kind.DUPLICATE)
        return Observation(Kind.OLD, holes=self._name_holes(previous + 1, sequence - 1), was=was)

    def _name_holes(self, lo: int, hi: int) -> tuple[Range, ...]:
        """The sender gave these up: of those we know of, the absent are holes."""
        named = [
            *self._states[State.MISSING].remove(lo, hi),
            *self._states[State.UNKNOWN].remove(lo, hi),
        ]
        for numbers in named:
            self._states[State.HOLE].add(*numbers)
        return tuple(sorted(named))

    def _forget(self) -> None:
        """Keep to RANGES_MAX: the two lowest ranges become one unknown one."""
        while sum(map(len, self._states.values())) > RANGES_MAX:
            lowest = sorted(r for numbers in self._states.values() for r in islice(numbers, 2))
            horizon = lowest[1][1]
            for state, numbers in self._states.items():
                before = numbers.count
                numbers.remove(1, horizon)
                if state is not State.UNKNOWN:
                    self.forgotten[state] += before - numbers.count
            self._states[State.UNKNOWN].add(1, horizon)


class OrderBook:
    """The order check of all lanes of a receiver.

    The least recently heard lane is forgotten beyond `lanes_max`; what it was
    missing stays in the totals.  Of lanes that are over, so many more are
    remembered by their last number.
    """

    def __init__(self, *, from_start: bool = False, lanes_max: int = LANES_MAX) -> None:
        self._from_start = from_start
        self._lanes_max = lanes_max
        self._lanes: OrderedDict[str, LaneOrder] = OrderedDict()
        self._over: OrderedDict[str, tuple[int, str | None]] = OrderedDict()
        self._kinds = dict.fromkeys(Kind, 0)
        self._was = dict.fromkeys(State, 0)
        self._forgotten = dict.fromkeys(State, 0)

    @property
    def lanes(self) -> dict[str, LaneOrder]:
        """What is known of lanes that are not over, the most recently heard one last."""
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
        """Take in one delivery, and say how it stands to those before it.

        `replay_of` is the lane and number that this delivery stands for;
        `lane_ends` says that nothing will follow it in its own lane.

        Raises:
            ValueError: not 0 <= previous_sequence < sequence.
        """
        _check(sequence, previous_sequence)
        if lane in self._over:
            observation = self._after_the_end(lane, sequence, delivery_id, lane_ends=lane_ends)
        else:
            order = self._lanes.get(lane) or LaneOrder(from_start=self._from_start)
            observation = order.observe(
                sequence, previous_sequence, delivery_id, lane_ends=lane_ends
            )
            self._lanes[lane] = order
            self._lanes.move_to_end(lane)
            self._retire(lane)
        if len(self._lanes) > self._lanes_max:
            self._forget(self._lanes.popitem(last=False)[1])
        if replay_of is not None and observation.kind is not Kind.CONFLICT:
            replayed = self._lanes.get(replay_of[0])
            if replayed is not None:
                observation = replace(observation, closed=replayed.close(replay_of[1]))
                self._retire(replay_of[0])
        self._kinds[observation.kind] += 1
        if observation.was is not None:
            self._was[observation.was] += 1
        return observation

    def hear_of(self, mark: Mark) -> tuple[Range, ...]:
        """The sender says how far a lane is; returns what that shows to be missing.

        Of a lane that was never heard of nobody knows whose it was, unless this receiver
        is there since all began.
        """
        order = self._lanes.get(mark.lane)
        if order is None:
            if mark.lane in self._over or not self._from_start:
                return ()
            order = self._lanes[mark.lane] = LaneOrder(from_start=True)
        return order.hear_of(mark.sequence, mark.given_up)

    def totals(self) -> OrderTotals:
        """The sums until now."""
        return OrderTotals(
            received=sum(self._kinds.values()),
            duplicates=self._kinds[Kind.DUPLICATE],
            gaps=self._kinds[Kind.GAP],
            out_of_order=self._was[State.MISSING],
            late=self._was[State.HOLE] + self._was[State.UNKNOWN],
            conflicts=self._kinds[Kind.CONFLICT],
            missing=self._sum(State.MISSING),
            holes=self._sum(State.HOLE),
        )

    def _after_the_end(
        self, lane: str, sequence: int, delivery_id: str, *, lane_ends: bool
    ) -> Observation:
        """A delivery in a lane that is over: a late copy, or a contradiction."""
        self._over.move_to_end(lane)
        last, last_id = self._over[lane]
        other = sequence == last and last_id not in (None, delivery_id)
        if sequence > last or other:
            return Observation(Kind.CONFLICT)
        return Observation(Kind.DUPLICATE, lost=_lost(sequence, last) if lane_ends else None)

    def _retire(self, lane: str) -> None:
        """Keep no more than the last number of a lane that is over."""
        order = self._lanes[lane]
        if order.is_over:
            self._over[lane] = order.last()
            self._forget(self._lanes.pop(lane))
            if len(self._over) > self._lanes_max:
                self._over.popitem(last=False)

    def _forget(self, order: LaneOrder) -> None:
        for state in State:
            self._forgotten[state] += order.count(state)

    def _sum(self, state: State) -> int:
        return self._forgotten[state] + sum(order.count(state) for order in self._lanes.values())


def _lost(last: int, high: int) -> Range | None:
    """What was received beyond the last number of a lane."""
    return (last + 1, high) if last < high else None


def _check(sequence: int, previous_sequence: int) -> None:
    if not 0 <= previous_sequence < sequence:
        raise ValueError(
            f"sequence {sequence} with previous {previous_sequence}: "
            "the previous one is 0 or more, and lower"
        )

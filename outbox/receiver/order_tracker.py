"""Order check of all lanes of a receiver, in memory, with its totals.

Once an ended lane has neither missing numbers nor holes, only its last number is kept.  It
identifies late copies (duplicates) and new numbers beyond the end (conflicts).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outbox.receiver.lane_order import LaneOrder, Observation, OrderKind, SequenceState

if TYPE_CHECKING:
    from outbox.core.delivery.receiver_checkpoint import LaneMark
    from outbox.core.model.int_ranges import Range

LANES_MAX = 10_000


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
        self._completed: OrderedDict[str, LaneOrder] = OrderedDict()
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
        lanes = self._completed if lane in self._completed else self._lanes
        order = lanes.get(lane) or LaneOrder(from_start=self._from_start)
        observation = order.observe(sequence, previous_sequence, delivery_id, lane_ends=lane_ends)
        lanes[lane] = order
        lanes.move_to_end(lane)
        self._drop_if_complete(lane)
        if len(self._lanes) > self._lanes_max:
            self._forget(self._lanes.popitem(last=False)[1])
        if replay_of is not None and observation.kind is not OrderKind.CONFLICT:
            replayed_lane, replayed_number = replay_of
            if replayed_lane in self._lanes:
                closed = self._lanes[replayed_lane].close(replayed_number)
                observation = replace(observation, closed=closed)
                self._drop_if_complete(replayed_lane)
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

    def _drop_if_complete(self, lane: str) -> None:
        """Keep only the last number of a completed lane."""
        order = self._lanes.get(lane)
        if order is not None and order.is_complete:
            self._forget(self._lanes.pop(lane))
            order.keep_only_last()
            self._completed[lane] = order
            if len(self._completed) > self._lanes_max:
                self._completed.popitem(last=False)

    def _forget(self, order: LaneOrder) -> None:
        for state in SequenceState:
            self._forgotten[state] += order.count(state)

    def _sum(self, state: SequenceState) -> int:
        return self._forgotten[state] + sum(order.count(state) for order in self._lanes.values())

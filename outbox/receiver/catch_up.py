"""Catch-up of a lane: which pages to fetch, and which deliveries to process.

Without I/O of its own: `catch_up` awaits the two functions of its caller that fetch a page
and process a delivery.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from outbox.core.model.int_ranges import Range, RangeSet
from outbox.receiver.lane_order import LaneGaps

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from outbox.receiver.fetch import LanePage, LaneProgress
    from outbox.receiver.lane_order import LaneState, StoredLane
    from outbox.receiver.requests import Request


class FetchedOutcome(Enum):
    """Outcome of a fetched delivery."""

    PROCESSED = auto()
    RETRYABLE = auto()
    """It failed; a later catch-up tries again."""
    REFUSED = auto()
    """A handler refused it, or it conflicts; it is never processed."""


@dataclass(frozen=True, slots=True)
class CatchUpResult:
    """Result of catching up with one lane."""

    lane: str
    acknowledged: int
    """Last sequence number acknowledged according to the sender."""
    fetched: int = 0
    """Deliveries fetched and processed."""
    dead_lettered: int = 0
    """Missing numbers that the sender had dead-lettered."""
    unavailable: tuple[Range, ...] = ()
    """Missing numbers that the sender no longer retains, or that a handler refused; unknown from
    now on."""
    failed: int | None = None
    """The sequence number that could not be processed; later ones were not fetched."""


async def catch_up(
    lane: str,
    state: LaneState,
    fetch_page: Callable[[int], Awaitable[LanePage]],
    process: Callable[[Request], Awaitable[FetchedOutcome]],
    record: Callable[[LaneGaps], Awaitable[tuple[Range, ...]]],
) -> CatchUpResult:
    """Fetch the missing deliveries of a lane and those after its highest number, in order.

    Args:
        lane: the lane's name.
        state: the lane's state in the inbox.
        fetch_page: fetches the page after a sequence number.
        process: processes a delivery as if received.
        record: records what is not processed; returns the unavailable numbers that were missing.
    """
    missing = RangeSet(state.missing)
    dead_lettered, unavailable = RangeSet(), RangeSet()
    after: int | None = min((lo for lo, _ in state.missing), default=state.high + 1) - 1
    fetched = dead_letters = acknowledged = through = 0
    failed: int | None = None
    while after is not None and failed is None:
        page = await fetch_page(after)
        acknowledged = page.acknowledged
        unavailable.add(after + 1, page.kept_from - 1)
        through = max(through, page.kept_from - 1)
        for item in page.items:
            if item.sequence <= state.high and item.sequence not in missing:
                continue
            if item.dead_lettered:  # Its event may have been erased since.
                dead_letters += 1
                dead_lettered.add(item.sequence, item.sequence)
            elif item.request is None:
                unavailable.add(item.sequence, item.sequence)
            else:
                outcome = await process(item.request)
                if outcome is FetchedOutcome.RETRYABLE:
                    failed = item.sequence
                    break
                if outcome is FetchedOutcome.REFUSED:
                    unavailable.add(item.sequence, item.sequence)
                else:
                    fetched += 1
            through = item.sequence
        after = page.next
    lost: tuple[Range, ...] = ()
    if dead_lettered or unavailable:
        lost = await record(LaneGaps(through, tuple(dead_lettered), tuple(unavailable)))
    return CatchUpResult(lane, acknowledged, fetched, dead_letters, lost, failed)


def lanes_behind(
    known: Mapping[str, StoredLane], lanes: Iterable[LaneProgress], *, from_start: bool = False
) -> list[str]:
    """Return the lanes with missing deliveries, those of older generations first.

    A lane without any delivery here is fetched from its beginning if this receiver already
    existed when the lane began: its inbox is older than every lane (`from_start`), or has another
    lane of the same generation from sequence number 1 on, or a lane of an older generation.
    Otherwise the deliveries of that lane were made to an earlier receiver.
    """
    progress = list(lanes)
    complete = {
        each.generation
        for each in progress
        if (lane := known.get(each.lane)) is not None and not lane.state.unknown
    }
    oldest = min((each.generation for each in progress if each.lane in known), default=None)
    behind = []
    for each in progress:
        lane = known.get(each.lane)
        if lane is not None:
            is_behind = bool(lane.state.missing) or lane.state.high < each.acknowledged
        else:
            is_behind = each.acknowledged > 0 and (
                from_start
                or each.generation in complete
                or (oldest is not None and each.generation > oldest)
            )
        if is_behind:
            behind.append(each.lane)
    return behind

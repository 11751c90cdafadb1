"""Catching up with a lane: which pages to fetch, and what to process of them.

Without I/O: `catch_up` yields what is to be done and is sent what came of it, so that
it is the same with asyncio and in threads.

    Ask(after)          the page behind a number            → Page
    Process(request)    a delivery, as if it had been sent  → its Fate
    Forgo(ranges)       numbers that nobody has any more    → those that were missing
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeAlias

from outbox.core.model.int_ranges import Range, RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from outbox.receiver.fetch import LaneStanding
    from outbox.receiver.inbox.process import KeptLane
    from outbox.receiver.lane_order import LaneState
    from outbox.receiver.requests import Request


class Fate(Enum):
    """What became of a delivery that was fetched."""

    TAKEN = auto()
    LATER = auto()
    """It failed, and may be processed another time."""
    NEVER = auto()
    """This receiver refuses it."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Fetch the page behind this number."""

    after: int


@dataclass(frozen=True, slots=True)
class Process:
    """Take this delivery."""

    request: Request


@dataclass(frozen=True, slots=True)
class Forgo:
    """Wait no longer for these numbers."""

    numbers: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """What came of it in one lane."""

    lane: str
    acknowledged: int
    """How far the lane was, as its sender has it."""
    fetched: int = 0
    """Deliveries that were processed."""
    given_up: int = 0
    """Numbers that were missing, and that the sender had given up."""
    gone: tuple[Range, ...] = ()
    """Numbers that were missing, and that the sender does not keep any more, or a handler
    refuses."""
    failed: int | None = None
    """The number that could not be processed; what follows it was not fetched."""


Steps: TypeAlias = Generator[Ask | Process | Forgo, Any, CaughtUp]


def catch_up(lane: str, state: LaneState) -> Steps:
    """Fetch what is missing of a lane, and what follows its highest number, in order."""
    missing = RangeSet()
    for numbers in state.missing:
        missing.add(*numbers)
    gone = RangeSet()
    after: int | None = min((lo for lo, _ in state.missing), default=state.high + 1) - 1
    fetched = given_up = acknowledged = 0
    failed: int | None = None
    while after is not None and failed is None:
        page = yield Ask(after)
        acknowledged = page.acknowledged
        gone.add(after + 1, page.kept_from - 1)
        for item in page.items:
            if item.sequence <= state.high and item.sequence not in missing:
                continue
            if item.request is None:
                gone.add(item.sequence, item.sequence)
            elif item.given_up:
                given_up += 1
                # What follows names it, unless it came before: then it is waited for.
                if item.sequence in missing:
                    gone.add(item.sequence, item.sequence)
            else:
                fate: Fate = yield Process(item.request)
                if fate is Fate.LATER:
                    failed = item.sequence
                    break
                if fate is Fate.NEVER:
                    gone.add(item.sequence, item.sequence)
                else:
                    fetched += 1
        after = page.next
    forgone = (yield Forgo(tuple(gone))) if gone else ()
    return CaughtUp(lane, acknowledged, fetched, given_up, forgone, failed)


def to_catch_up(known: Mapping[str, KeptLane], standings: Iterable[LaneStanding]) -> list[str]:
    """The lanes of which something is missing, those of older generations first.

    A lane that was never heard of is fetched from its beginning if this receiver was there
    when it began: it knows a lane of the same generation from its number 1, or one of an
    older generation.  Otherwise it was somebody else's, and so is what it was sent.
    """
    told = list(standings)
    from_start = {
        standing.generation
        for standing in told
        if (lane := known.get(standing.lane)) is not None and not lane.state.unknown
    }
    oldest = min((each.generation for each in told if each.lane in known), default=None)
    wanted = []
    for standing in told:
        lane = known.get(standing.lane)
        if lane is not None:
            is_behind = bool(lane.state.missing) or lane.state.high < standing.acknowledged
        else:
            is_behind = standing.acknowledged > 0 and (
                standing.generation in from_start
                or (oldest is not None and standing.generation > oldest)
            )
        if is_behind:
            wanted.append(standing.lane)
    return wanted

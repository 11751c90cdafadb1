"""Feeds: an endpoint that begins at a position gets the events of earlier batches first.

The batches alone say which events they sequenced, and in which order (`split_by_batch`), so a feed
goes through them from its *place* on.  The leader adds what was read ahead to its own batches, and
writes the new place with them, so a feed goes on exactly where it was after any crash.  In the
batch before which nothing is left, the endpoint becomes a subscriber, and the batch's own events
follow the fed ones: without a gap, and without a copy.

    place ──▶ read ahead (whole batches) ──▶ taken by batches, up to `FeedPace` ──▶ arrived
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from outbox.core.model.int_ranges import RangeSet
from outbox.core.sequencing.router import Router

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from uuid import UUID

    from outbox.core.model.int_ranges import Range
    from outbox.core.sequencing.router import Placements, Refused, RoutableEvent, Route

READ_EVENTS_MAX = 1_000
"""Events after which a read takes no further batch."""
FEED_LIVE_S = 2.0
"""Events are live for this time after the last one was sequenced."""
LIVE_PER_S, LIVE_DUE, LIVE_MAX = 2_100, 24, 40
"""While events are live: fed deliveries per second, with how many a batch is due, and how many one
that comes late may have.  A batch of their own delays few live events; with each of those, they
would delay all.  With ten, batches would cost a relay a tenth more of its time.  What a larger one
feeds is sent all at once, and a live event that comes then waits for it."""
ROUNDING = 1e-6
"""Share of a delivery by which a sum of floating-point times may be off."""
LARGE_BATCH = 8
"""What is fed with so many live events delays them less than a batch of its own would."""
IDLE_MAX = 1_500
"""Fed deliveries of a batch otherwise: more would take the owners' time in one piece."""
OWN_SHARE = 2
"""A batch may feed so many times its own events: a relay that catches up itself must not keep a
feed from arriving."""
FED_PENDING_MAX = 10_000
"""Pending deliveries of an endpoint up to which it is fed."""
ARRIVING_S = 10.0
"""If less is left than arrives in this time, an endpoint is fed regardless of what is pending: one
that is slower than the arrivals would never subscribe."""


class Place(NamedTuple):
    """What a feed has passed: earlier batches, and of this one the ids up to `id`."""

    batch: int
    id: int


class PassedBatch(NamedTuple):
    """A row of `batch`, with what is needed to know its events."""

    batch: int
    high_before: int
    """`high` of the row before, which need not be the number before."""
    high: int
    young: Sequence[Range]
    found: Sequence[Range]
    events: int


class PastEvent(NamedTuple):
    """An event that was sequenced before."""

    event: RoutableEvent
    is_erased: bool
    is_expired: bool


def split_by_batch(
    batches: Sequence[PassedBatch], events: Iterable[PastEvent]
) -> list[list[PastEvent]]:
    """The events of each batch, in the order in which they were sequenced.

    Args:
        batches: consecutive ones.
        events: those above the first batch's `high_before`, and those that were found, by id;
            others are ignored.
    """
    highs = [each.high for each in batches]
    young = [RangeSet(each.young) for each in batches]
    found_in = RangeSet(r for each in batches for r in each.found)
    finders = sorted((lo, hi, n) for n, each in enumerate(batches) for lo, hi in each.found)
    los = [lo for lo, _, _ in finders]
    split: list[list[PastEvent]] = [[] for _ in batches]
    for past in events:
        event_id = past.event.id
        if event_id in found_in:
            n = finders[bisect_right(los, event_id) - 1][2]
            split[n].append(past)
            continue
        # The first batch that has passed it; those after it with the same `high` have no new event.
        at = bisect_left(highs, event_id)
        if at == len(batches) or event_id <= batches[at].high_before:
            continue
        if event_id not in young[at]:
            split[at].append(past)
    return split


@dataclass(slots=True)
class FeedCounts:
    """What a feed has skipped."""

    expired: int = 0
    erased: int = 0
    missing: int = 0
    """Events whose rows are gone without a record."""

    def add(self, other: FeedCounts) -> None:
        """Add other counts to these."""
        self.expired += other.expired
        self.erased += other.erased
        self.missing += other.missing


@dataclass(slots=True)
class ReadAhead:
    """A batch with deliveries and those after it without any, as they were read."""

    batch: int
    to: Place
    deliveries: Placements
    skipped: FeedCounts


@dataclass(frozen=True, slots=True)
class LoadedFeed:
    """A running feed as it is stored, with the endpoint's lanes."""

    id: int
    endpoint_id: UUID
    place: Place
    seen: tuple[Range, ...]
    """Ids that the reader of the position has seen before they were sequenced."""
    route: Route
    backlog_max: int | None = None
    """Pending deliveries above which the endpoint's oldest ones become dead letters."""

    @property
    def pending_max(self) -> int:
        """Pending deliveries up to which the endpoint is fed."""
        if self.backlog_max is None:
            return FED_PENDING_MAX
        return max(min(FED_PENDING_MAX, self.backlog_max // 2), 1)


@dataclass(slots=True)
class FedPart:
    """What a batch takes of one feed."""

    feed: Feed
    place: Place
    deliveries: Placements = field(default_factory=list)
    skipped: FeedCounts = field(default_factory=FeedCounts)
    whole: int = 0
    """Reads that are taken wholly."""
    arrives: bool = False
    """Whether nothing is left before this batch, so the endpoint becomes a subscriber with it."""


class Feed:
    """A running feed with what was read ahead.  A new state of the tables makes a new one."""

    def __init__(self, loaded: LoadedFeed) -> None:
        self.loaded = loaded
        self.router = Router([loaded.route])
        self.place = loaded.place
        self.read_to = loaded.place
        """Everything up to here was read."""
        self.pending_max: int | None = 0
        """Deliveries that may be fed until the endpoint's pending ones are counted again; None: no
        limit, because little is left."""
        self._seen = RangeSet(loaded.seen)
        self._reads: deque[ReadAhead] = deque()
        # How many of them are in the batch that is being written.
        self._taken = 0
        self.ahead = 0
        """Deliveries that were read ahead."""

    @property
    def id(self) -> int:
        return self.loaded.id

    def continues(self, loaded: LoadedFeed) -> bool:
        """Whether a feed is stored as this one is, so that what was read ahead is still right."""
        mine = self.loaded
        return (loaded.place, loaded.seen, loaded.route) == (self.place, mine.seen, mine.route)

    def wanted(self, events: Iterable[PastEvent]) -> list[RoutableEvent]:
        """The events that it may need, after what its reader has seen and what cannot be sent."""
        return [
            past.event
            for past in events
            if not (past.is_erased or past.is_expired or past.event.id in self._seen)
        ]

    def add(
        self,
        after: Place,
        batches: Sequence[PassedBatch],
        split: Sequence[Sequence[PastEvent]],
        refused: Refused,
    ) -> int:
        """Add the batches after a place, up to which everything was read; others are ignored.

        Args:
            refused: results of the feed's filter.

        Returns:
            How many events are missing.
        """
        missing = 0
        if after > self.read_to:
            # They would leave out what is between.
            return 0
        for row, events in zip(batches, split, strict=True):
            to = Place(row.batch, row.high)
            if to <= self.read_to:
                continue
            skipped = self._count_skipped(row, events)
            missing += skipped.missing
            left = [each for each in events if (row.batch, each.event.id) > self.read_to]
            placed = self.router.placements(self.wanted(left), refused)
            self.read_to = to
            self.ahead += len(placed)
            if placed or len(self._reads) <= self._taken:
                self._reads.append(ReadAhead(row.batch, to, placed, skipped))
            else:
                self._reads[-1].to = to
                self._reads[-1].skipped.add(skipped)
        return missing

    def _count_skipped(self, row: PassedBatch, events: Sequence[PastEvent]) -> FeedCounts:
        """What is skipped of a whole batch; it is stored when the feed has passed the batch."""
        new = [each for each in events if each.event.id not in self._seen]
        erased = sum(each.is_erased for each in new)
        expired = sum(each.is_expired and not each.is_erased for each in new)
        return FeedCounts(expired, erased, max(row.events - len(events), 0))

    def plan_part(self, numbers_max: int) -> FedPart:
        """Plan what the next batch takes, at most so many deliveries."""
        if self.pending_max is not None:
            numbers_max = min(numbers_max, self.pending_max)
        part = FedPart(self, self.place)
        for read in self._reads:
            some = read.deliveries[: max(numbers_max - len(part.deliveries), 0)]
            part.deliveries += some
            if len(some) < len(read.deliveries):
                if some:
                    part.place = Place(read.batch, some[-1][1])
                break
            part.place = read.to
            part.skipped.add(read.skipped)
            part.whole += 1
        self._taken = part.whole + 1
        return part

    def rejected(self) -> None:
        """Forget what was planned: the batch was not written."""
        self._taken = 0

    def committed(self, part: FedPart) -> None:
        """Apply what a durable batch took."""
        self.place, taken = part.place, len(part.deliveries)
        self._taken = 0
        self.ahead -= taken
        if self.pending_max is not None:
            self.pending_max -= taken
        for _ in range(part.whole):
            taken -= len(self._reads.popleft().deliveries)
        if taken:
            self._reads[0].deliveries = self._reads[0].deliveries[taken:]


@dataclass(slots=True)
class FeedPace:
    """How much the feeds of a leader may add to its batches; times are steady seconds."""

    live_until: float = 0.0
    fed_at: float = 0.0
    _earns_since: float = 0.0
    _then_since: float = 0.0
    _turn: int = field(default=0)

    @property
    def next_at(self) -> float:
        """When a batch is due for what is fed, while events are live."""
        return self.fed_at + LIVE_DUE / LIVE_PER_S

    def may_go_with(self, now: float, own_events: int) -> bool:
        """Whether a batch with so many live events may feed some."""
        if now >= self.live_until or own_events >= LARGE_BATCH:
            return True
        # Live events that come all the time must not keep it from going on.
        return now >= (self.next_at if not own_events else 2 * self.next_at - self.fed_at)

    def record_live_events(self, now: float) -> None:
        """Record that live events were sequenced."""
        self.live_until = now + FEED_LIVE_S

    def limit(self, now: float, own_events: int) -> int:
        """Deliveries that a batch may feed.

        Args:
            own_events: live events of the batch before.
        """
        since = max(self._earns_since, now - LIVE_MAX / LIVE_PER_S)
        earned = int((now - since) * LIVE_PER_S + ROUNDING)
        # A part of a delivery is earned for the next batch.
        self._then_since = since + earned / LIVE_PER_S
        if now >= self.live_until:
            return IDLE_MAX
        return max(earned, OWN_SHARE * own_events) if earned else 0

    def record_fed(self, now: float) -> None:
        """Record that a batch fed some."""
        # The batch is earned for, too, while it is written.
        self.fed_at, self._earns_since = now, self._then_since

    def in_turn(self, feeds: Sequence[Feed]) -> list[Feed]:
        """The feeds in the order in which the next batch serves them, which is round robin."""
        if not feeds:
            return []
        self._turn = (self._turn + 1) % len(feeds)
        return [*feeds[self._turn :], *feeds[: self._turn]]

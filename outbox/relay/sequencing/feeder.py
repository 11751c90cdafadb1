"""The feeder: adds what is left of feeds to the leader's batches.

`outbox.relay.sequencing.feed_reader` reads ahead.  Only the end is read here, in the leader's
turn: the endpoint subscribes in the batch before which nothing is left, and a read beside the
leader would never have the newest batch.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from outbox.core.sequencing.feeds import Feed, FeedPace, Place, split_by_batch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from outbox.core.sequencing.feeds import FedPart
    from outbox.core.sequencing.filter_budget import FilterFailure
    from outbox.core.sequencing.gaps import CursorState
    from outbox.core.sequencing.router import Refused, RoutableEvent, Router, TenantFilter
    from outbox.store.sequencing.feeds import FeedStore

    Failed = Mapping[TenantFilter, FilterFailure]
    Evaluate = Callable[[Router, Sequence[RoutableEvent]], Awaitable[tuple[Refused, Failed]]]

log = structlog.get_logger("outbox.sequencer")

READ_AHEAD_MAX, READ_AHEAD_MIN, READ_AHEAD_ALL = 4_000, 100, 40_000
"""Deliveries that are read ahead: of one feed at most and at least, and of all together."""
LIVE_AHEAD_ALL = 2_000
"""Those of all together while events are live, about a second's: to read more would only delay the
live events."""
TAIL_IDS, TAIL_BATCHES = 500, 200
"""So many ids and batches before the end, the rest is read in the leader's turn."""
TAILS_MAX = 8
"""Feeds whose rest is read in one turn."""
WAITING_S = 0.02
"""Delay before it is asked again whether what a position has seen was sequenced."""
REFUSED_S = 60.0
"""How long feeds wait after the database refused their rows."""


class Feeder:
    """The running feeds of a leader.

    Args:
        evaluate: evaluates filters, on the sequencer's connection.
    """

    def __init__(self, store: FeedStore, evaluate: Evaluate) -> None:
        self._store = store
        self._evaluate = evaluate
        self._pace = FeedPace()
        self._feeds: dict[int, Feed] = {}
        self._own_events = 0
        self._wait_until = 0.0
        self._last: Place | None = None
        self.runs = False
        """Whether there is a feed; without one, nothing else is asked of this."""
        self.failed: dict[TenantFilter, FilterFailure] = {}
        """Filters to be stopped with the next batch, because they failed ahead of it."""
        self.changed = asyncio.Event()
        """Set when there is something to read ahead."""

    def forget(self) -> None:
        """Drop all cached state."""
        self._feeds.clear()
        self.runs = False

    async def load(self, stopped_for_s: float) -> None:
        """Load the running feeds; what was read ahead stays, if nothing has changed."""
        feeds = {}
        for loaded in await self._store.read_feeds(stopped_for_s):
            feed = self._feeds.get(loaded.id)
            if feed is None or not feed.continues(loaded):
                feed = Feed(loaded)
            feeds[loaded.id] = feed
        self._feeds, self.runs = feeds, bool(feeds)
        if feeds:
            self.changed.set()

    # ------------------------------------------------------------- the reader

    @property
    def is_live(self) -> bool:
        """Whether live events were sequenced lately."""
        return _now() < self._pace.live_until

    def hungry(self) -> list[Feed]:
        """The feeds that need more events."""
        if self._last is None:
            return []
        ahead_max = self.ahead_max
        return [
            feed
            for feed in self._feeds.values()
            if feed.ahead < ahead_max
            and feed.pending_max != 0
            and self._last.batch > feed.read_to.batch
            and self._last.id - feed.read_to.id > TAIL_IDS // 2
        ]

    def sharing(self, place: Place) -> list[Feed]:
        """The feeds that share a read at a place: also some that do not need it yet."""
        ahead_max = 2 * self.ahead_max
        return [f for f in self._feeds.values() if f.read_to == place and f.ahead < ahead_max]

    @property
    def feeds(self) -> list[Feed]:
        """The running feeds."""
        return [*self._feeds.values()]

    @property
    def filters(self) -> set[TenantFilter]:
        """The filters of the running feeds."""
        return {each for feed in self._feeds.values() for each in feed.router.filters}

    @property
    def ahead_max(self) -> int:
        """Deliveries of each feed that are read ahead."""
        of_all = LIVE_AHEAD_ALL if self.is_live else READ_AHEAD_ALL
        return min(max(of_all // max(len(self._feeds), 1), READ_AHEAD_MIN), READ_AHEAD_MAX)

    # -------------------------------------------------------------- batches

    @property
    def due_at(self) -> float | None:
        """When the next batch may feed some, by the loop's clock; None: nothing is ready."""
        now = _now()
        if not any(feed.pending_max != 0 and self._is_ready(feed) for feed in self._feeds.values()):
            return None
        at = now if now >= self._pace.live_until else self._pace.next_at
        return max(at, self._wait_until)

    def may_go_with(self, own_events: int) -> bool:
        """Whether a batch with so many live events may have what was planned."""
        return self._pace.may_go_with(_now(), own_events)

    def _is_ready(self, feed: Feed) -> bool:
        return feed.ahead > 0 or self._is_near(feed)

    def _is_near(self, feed: Feed) -> bool:
        return self._last is not None and self._last.id - feed.read_to.id <= TAIL_IDS

    async def next_batch(self, state: CursorState) -> list[FedPart]:
        """Plan what the next batch feeds; call `committed` or `rejected` with the result."""
        self._last = Place(state.batch, state.high)
        now = _now()
        if now < self._wait_until:
            return []
        left = self._pace.limit(now, self._own_events)
        parts: list[FedPart] = []
        near: list[FedPart] = []
        tails = TAILS_MAX
        if not left:
            return parts
        for feed in self._pace.in_turn(self.feeds):
            part = feed.plan_part(left)
            if part.place == feed.read_to and self._is_near(feed) and feed.pending_max is None:
                if feed.read_to < self._last and tails:
                    tails -= 1
                    await self._read_rest(feed)
                    part = feed.plan_part(left)
                if part.place == self._last:
                    near.append(part)
            left -= len(part.deliveries)
            parts.append(part)
        await self._mark_arrived(near)
        return [part for part in parts if part.place != part.feed.place or part.arrives]

    async def _mark_arrived(self, parts: Sequence[FedPart]) -> None:
        """Mark those that may subscribe: nothing is left, also of what their readers have seen."""
        seen = [part.feed.id for part in parts if part.feed.loaded.seen]
        waiting = await self._store.read_waiting(seen) if seen else set()
        for part in parts:
            part.arrives = part.feed.id not in waiting
        if waiting:
            self._wait_until = _now() + WAITING_S

    async def _read_rest(self, feed: Feed) -> None:
        place = feed.read_to
        batches = await self._store.read_batches(place, TAIL_IDS, TAIL_BATCHES)
        if batches:
            split = split_by_batch(batches, await self._store.read_events(batches))
            wanted = [event for some in split for event in feed.wanted(some)]
            refused, failed = await self._evaluate(feed.router, wanted)
            self.failed |= failed
            note_missing(feed, feed.add(place, batches, split, refused))

    async def own_placements(
        self, parts: Sequence[FedPart], events: Sequence[RoutableEvent]
    ) -> list[tuple[int, int]]:
        """The batch's own events in the lanes of endpoints that subscribe with it."""
        placements = []
        for part in parts:
            if part.arrives and events:
                refused, failed = await self._evaluate(part.feed.router, events)
                self.failed |= failed
                placements += part.feed.router.placements(events, refused)
        return placements

    def committed(
        self, parts: Sequence[FedPart], own_events: int, stopped: Iterable[TenantFilter]
    ) -> None:
        """Apply a batch that is durable, with its number of live events and the stopped filters."""
        now = _now()
        self._own_events = own_events
        if own_events:
            self._pace.record_live_events(now)
        for each in stopped:
            self.failed.pop(each, None)
        if any(part.deliveries for part in parts):
            self._pace.record_fed(now)
        for feed in self._feeds.values():
            feed.rejected()
        for part in parts:
            part.feed.committed(part)
            if part.arrives:
                self._feeds.pop(part.feed.id, None)
        if self._feeds:
            self.changed.set()

    def rejected(self) -> None:
        """Forget a batch that was not written."""
        for feed in self._feeds.values():
            feed.rejected()

    def refused(self, reason: str) -> None:
        """Wait, because the database refused a batch with rows of feeds."""
        self.rejected()
        self._wait_until = _now() + REFUSED_S
        log.error("the database refuses rows of feeds", reason=reason, retry_s=REFUSED_S)


def note_missing(feed: Feed, missing: int) -> None:
    """Log that events of a batch are gone without a record."""
    if missing:
        log.error(
            "events to be fed are missing; run outbox verify",
            endpoint_id=str(feed.loaded.endpoint_id),
            events=missing,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()

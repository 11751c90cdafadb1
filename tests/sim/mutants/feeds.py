"""Mistakes with feeds."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing import feeds, router
from outbox.core.sequencing.feeds import Place
from outbox.relay.sequencing import cursor, feed_reader, feeder
from tests.sim.mutants.catalogue import mutant, swap
from tests.sim.stores import endpoint_changes, endpoint_writes, periods
from tests.sim.stores import feeds as feed_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.sequencing.feeds import FedPart, LoadedFeed, PassedBatch, PastEvent
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.simulation import Simulation


@mutant
def fed_endpoint_subscribes_one_batch_late(sim: Simulation) -> None:
    """The events of the batch in which an endpoint subscribes are not its own yet."""
    end_feeds = feed_store.end_feeds

    def patched(
        db: Database, tx: Transaction, batch: int, feed_ids: Sequence[int], actor: str
    ) -> Steps[None]:
        return end_feeds(db, tx, batch + 1, feed_ids, actor)

    async def own_placements(self: Any, parts: Any, events: Any) -> list[tuple[int, int]]:
        return []

    swap(feed_store, "end_feeds", patched)
    swap(feeder.Feeder, "own_placements", own_placements)


@mutant
def fed_endpoint_misses_the_events_of_its_first_batch(sim: Simulation) -> None:
    """The batch in which an endpoint subscribes has its fed events only."""

    async def own_placements(self: Any, parts: Any, events: Any) -> list[tuple[int, int]]:
        return []

    swap(feeder.Feeder, "own_placements", own_placements)


@mutant
def fed_endpoint_subscribes_one_batch_early(sim: Simulation) -> None:
    """An endpoint subscribes before the newest batch was read for it."""

    async def read_rest(self: Any, feed: Any) -> None:
        await original(self, feed)
        feed.read_to = self._last
        if feed._reads:
            feed._reads[-1].to = self._last
        else:
            feed.place = self._last

    original = feeder.Feeder._read_rest
    read_batches = feed_store.read_passed_batches

    def read_passed_batches(
        db: Database, tx: Transaction, place: Place, *limits: int
    ) -> list[PassedBatch]:
        found = read_batches(db, tx, place, *limits)
        newest = db.batches[-1].batch
        return [each for each in found if each.batch < newest]

    swap(feeder.Feeder, "_read_rest", read_rest)
    swap(feed_store, "read_passed_batches", read_passed_batches)


@mutant
def fed_endpoint_subscribes_before_seen_events(sim: Simulation) -> None:
    """An endpoint subscribes although events that its position has seen are not sequenced yet."""
    swap(feed_store, "read_waiting", lambda db, tx, feed_ids: set())


@mutant
def feed_sends_seen_events(sim: Simulation) -> None:
    """What the position has seen is fed, too."""

    def wanted(self: Any, events: Sequence[PastEvent]) -> list[Any]:
        return [past.event for past in events if not (past.is_erased or past.is_expired)]

    swap(feeds.Feed, "wanted", wanted)


@mutant
def feed_goes_by_id(sim: Simulation) -> None:
    """An event is fed with the batch that has passed its id, and not with the one that found it."""

    def split_by_batch(
        batches: Sequence[PassedBatch], events: Sequence[PastEvent]
    ) -> list[list[PastEvent]]:
        split: list[list[PastEvent]] = [[] for _ in batches]
        highs = [each.high for each in batches]
        for past in events:
            at = bisect_left(highs, past.event.id)
            if at < len(batches) and past.event.id > batches[at].high_before:
                split[at].append(past)
        return split

    swap(feeder, "split_by_batch", split_by_batch)
    swap(feed_reader, "split_by_batch", split_by_batch)


@mutant
def feed_passes_a_half_read_batch(sim: Simulation) -> None:
    """The place is the end of a batch of which a part was fed."""
    plan_part = feeds.Feed.plan_part

    def patched(self: Any, numbers_max: int) -> FedPart:
        part = plan_part(self, numbers_max)
        whole = [self._reads[n] for n in range(part.whole)]
        if len(part.deliveries) > sum(len(each.deliveries) for each in whole):
            part.place = self._reads[part.whole].to
        return part

    swap(feeds.Feed, "plan_part", patched)


@mutant
def fed_events_unmarked_behind_live_ones(sim: Simulation) -> None:
    """Fed events are placed like those of the batch, after them."""
    assign_sequences = router.assign_sequences

    def patched(placements: Any, replays: Any, counters: Any, fed: Any = ()) -> Any:
        placed = [*placements, *(each for _, some in fed for each in some)]
        return assign_sequences(placed, replays, counters)

    swap(cursor, "assign_sequences", patched)


@mutant
def fed_events_behind_live_ones(sim: Simulation) -> None:
    """In the batch in which an endpoint subscribes, its own events come first, and count as fed."""
    own_placements, assign_sequences = feeder.Feeder.own_placements, router.assign_sequences
    early: dict[tuple[int, int], int] = {}

    async def patched(self: Any, parts: Any, events: Any) -> list[tuple[int, int]]:
        early.clear()
        for part in parts:
            placed = await own_placements(self, [part], events)
            early.update(dict.fromkeys(placed, part.feed.id))
        return list(early)

    def assign(placements: Any, replays: Any, counters: Any, fed: Any = ()) -> Any:
        first = [(feed_id, [each]) for each, feed_id in early.items()]
        rest = [each for each in placements if each not in early]
        return assign_sequences(rest, replays, counters, [*first, *fed])

    swap(feeder.Feeder, "own_placements", patched)
    swap(cursor, "assign_sequences", assign)


@mutant
def feed_begins_again_with_each_leader(sim: Simulation) -> None:
    """A leader begins where the feed began."""
    read = feed_store.read_feeds

    def read_feeds(db: Database, tx: Transaction) -> list[LoadedFeed]:
        found = read(db, tx)
        rows = [db.feed.rows[each.id] for each in found]
        return [
            type(each)(
                each.id,
                each.endpoint_id,
                Place(row["from_batch"], row["from_id"]),
                each.seen,
                each.route,
            )
            for each, row in zip(found, rows, strict=True)
        ]

    swap(feed_store, "read_feeds", read_feeds)


@mutant
def enabling_ignores_a_running_feed(sim: Simulation) -> None:
    """An endpoint that is fed counts as disabled."""
    swap(endpoint_changes, "is_fed", lambda db, tx, endpoint_id: False)


@mutant
def disabling_leaves_a_feed_running(sim: Simulation) -> None:
    """The feed of a disabled endpoint goes on when it is enabled."""
    swap(endpoint_writes, "stop_feeds", lambda db, tx, ids, reason: iter(()))


@mutant
def feed_does_not_wait_for_its_job(sim: Simulation) -> None:
    """What was pending before does not come first."""
    swap(feed_store, "waits_for_job", lambda db, tx, feed: False)


@mutant
def events_of_a_feed_dropped(sim: Simulation) -> None:
    """Feeds do not keep a period."""
    sim.database.maintained = True
    swap(periods, "pinned_by_feeds", lambda db, tx, open_ranges, last_batch: False)

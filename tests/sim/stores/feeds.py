"""Feeds, as the leader reads and writes them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.sequencing import partition_window
from outbox.core.sequencing.feeds import LoadedFeed, PassedBatch, PastEvent, Place
from outbox.core.sequencing.router import RoutableEvent, Route
from outbox.store.sequencing import feeds as real
from outbox.store.sequencing.feeds import FeedPending
from tests.sim.database.engine import UPDATE, Wait
from tests.sim.stores import channels, routing_change
from tests.sim.stores.routing import lanes_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from outbox.core.model.int_ranges import Range
    from outbox.core.sequencing.feeds import FedPart
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Batch, Database

SUBSCRIPTION_COLUMNS = ("types", "tenant", "all_tenants", "filter")


class FeedStore(real.FeedStore):
    """Stands in for `outbox.store.sequencing.feeds.FeedStore`."""

    def __init__(self, connection: Any) -> None:
        self._db: Connection = connection

    async def read_feeds(self, stopped_for_s: float) -> list[LoadedFeed]:
        return await self._db.call(read_feeds)

    async def read_batches(
        self, place: Place, events_max: int, batches_max: int
    ) -> list[PassedBatch]:
        return await self._db.call(read_passed_batches, place, events_max, batches_max)

    async def read_events(self, batches: Sequence[PassedBatch]) -> list[PastEvent]:
        return await self._db.call(read_past_events, batches)

    async def read_pending(
        self, endpoint_ids: Sequence[UUID], within_s: float
    ) -> dict[UUID, FeedPending]:
        return await self._db.call(read_pending, endpoint_ids, within_s)

    async def read_waiting(self, feed_ids: Sequence[int]) -> set[int]:
        return await self._db.call(read_waiting, feed_ids)


# ---------------------------------------------------------------------- reading


def running_feed(db: Database, tx: Transaction, endpoint_id: UUID) -> Row | None:
    """The running feed of an endpoint."""
    running = (row for row in tx.rows(db.feed) if row["ended_at"] is None)
    return next((row for row in running if row["endpoint_id"] == endpoint_id), None)


def read_feeds(db: Database, tx: Transaction) -> list[LoadedFeed]:
    found = []
    for f in tx.rows(db.feed):
        e = tx.get(db.endpoint, f["endpoint_id"])
        assert e is not None
        if f["ended_at"] is not None or e["state"] not in ("active", "paused"):
            continue
        if waits_for_job(db, tx, f):
            continue
        types, place = tuple(f["types"]), Place(f["batch"], f["outbox_id"])
        lane_ids = lanes_of(db, tx, e)
        route = Route(e["id"], types, f["tenant"], f["all_tenants"], lane_ids, f["filter"])
        found.append(LoadedFeed(f["id"], e["id"], place, f["seen"], route))
    return found


def waits_for_job(db: Database, tx: Transaction, feed: Row) -> bool:
    """Whether a job first sends again what was pending before."""
    part = tx.get(db.replay_job_endpoint, (feed["after_job"], feed["endpoint_id"]))
    return part is not None and part["ended_at"] is None


def kept_batches(db: Database, tx: Transaction) -> list[Batch]:
    """The rows of batch, without those of dropped periods."""
    kept = (p["number"] for p in tx.rows(db.period) if p["kind"] == "log" and not p["dropped"])
    first = min(kept) * partition_window.WIDTH
    return db.batches[bisect_left(db.batches, first, key=lambda b: b.batch) :]


def read_passed_batches(
    db: Database, tx: Transaction, place: Place, events_max: int, batches_max: int
) -> list[PassedBatch]:
    kept = kept_batches(db, tx)
    start = max(bisect_left(kept, place.batch, key=lambda b: b.batch) - 1, 0)
    found: list[PassedBatch] = []
    before, high_before = 0, 0
    for b in kept[start : start + batches_max + 2]:
        if before >= events_max:
            break
        if (b.batch, b.high) > place:
            found.append(PassedBatch(b.batch, high_before, b.high, b.young, b.found, b.events))
            before += b.events
        high_before = b.high
    return found


def read_past_events(
    db: Database, tx: Transaction, batches: Sequence[PassedBatch]
) -> list[PastEvent]:
    ids = set(_ids_between(db, batches[0].high_before + 1, batches[-1].high))
    for lo, hi in (r for each in batches for r in each.found):
        ids.update(_ids_between(db, lo, hi))
    now, past = db.clock_timestamp(), []
    for event in (db.outbox[i] for i in sorted(ids)):
        is_expired = event.expires_at is not None and event.expires_at <= now
        routable = RoutableEvent(event.id, None, event.type, event.key_hash)
        past.append(PastEvent(routable, is_erased=False, is_expired=is_expired))
    return past


def _ids_between(db: Database, lo: int, hi: int) -> list[int]:
    return db.outbox_ids[bisect_left(db.outbox_ids, lo) : bisect_right(db.outbox_ids, hi)]


def read_pending(
    db: Database, tx: Transaction, endpoint_ids: Sequence[UUID], within_s: float
) -> dict[UUID, FeedPending]:
    kept, since = kept_batches(db, tx), db.later(-within_s)
    high = kept[-1].high
    before = max((b for b in kept if b.at < since), key=lambda b: b.at, default=None)
    arrived = partition_window.count_arrived(0 if before is None else before.high, high)
    pending = dict.fromkeys(endpoint_ids, 0)
    for p in tx.rows(db.lane_progress):
        if p["endpoint_id"] in pending:
            c = tx.get(db.lane_counter, p["lane_id"])
            assert c is not None
            pending[p["endpoint_id"]] += c["last_seq"] - p["acked_seq"]
    return {i: FeedPending(numbers, high, arrived) for i, numbers in pending.items()}


def read_waiting(db: Database, tx: Transaction, feed_ids: Sequence[int]) -> set[int]:
    feeds = [tx.get(db.feed, feed_id) for feed_id in feed_ids]
    return {f["id"] for f in feeds if f is not None and _has_unsequenced(db, tx, f["seen"])}


def _has_unsequenced(db: Database, tx: Transaction, seen: Sequence[Range]) -> bool:
    high, gaps = db.batches[-1].high, db.open_gaps(tx)
    return any(
        hi > high or any(lo <= last and hi >= first for first, last in gaps) for lo, hi in seen
    )


# ---------------------------------------------------------------------- writing


def add_feed(db: Database, tx: Transaction, endpoint_id: UUID, columns: Row) -> None:
    """Begin a feed with what the endpoint's settings subscribe to."""
    if running_feed(db, tx, endpoint_id) is not None:
        raise asyncpg.UniqueViolationError("the endpoint has a running feed")
    e, new = tx.get(db.endpoint, endpoint_id), db.serial(db.feed)
    assert e is not None
    subscribed = {name: e[name] for name in SUBSCRIPTION_COLUMNS}
    counts = dict.fromkeys(("fed", "expired", "erased", "missing"), 0)
    began = {"from_batch": columns["batch"], "from_id": columns["outbox_id"]}
    ended = {"ended_at": None, "end_reason": None}
    ids = {"id": new, "endpoint_id": endpoint_id}
    tx.put(db.feed, new, {**ids, **columns, **began, **subscribed, **counts, **ended})


def write_feeds(
    db: Database, tx: Transaction, batch: int, parts: Sequence[FedPart], actor: str
) -> Steps[None]:
    """Store what a batch has fed, and which endpoints subscribe with it."""
    for part in parts:
        yield from advance_feed(db, tx, batch, part)
    arrived = [part.feed.id for part in parts if part.arrives]
    if arrived:
        yield from end_feeds(db, tx, batch, arrived, actor)
        yield from routing_change.begin_change(db, tx)
        channels.notify_all(db, tx)


def advance_feed(db: Database, tx: Transaction, batch: int, part: FedPart) -> Steps[None]:
    yield Wait(db.feed, part.feed.id, UPDATE)
    f = tx.get(db.feed, part.feed.id)
    assert f is not None
    skipped, fed = part.skipped, len(part.deliveries)
    tx.change(
        db.feed,
        f["id"],
        batch=part.place.batch,
        outbox_id=part.place.id,
        fed=f["fed"] + fed,
        expired=f["expired"] + skipped.expired,
        erased=f["erased"] + skipped.erased,
        missing=f["missing"] + skipped.missing,
    )
    if fed:
        step = {"feed_id": f["id"], "to_batch": part.place.batch, "to_id": part.place.id}
        tx.put(db.feed_step, (f["id"], *part.place), {**step, "batch": batch})


def end_feeds(
    db: Database, tx: Transaction, batch: int, feed_ids: Sequence[int], actor: str
) -> Steps[None]:
    """Make endpoints subscribers from a batch on, because nothing is left of their feeds."""
    for feed_id in feed_ids:
        yield Wait(db.feed, feed_id, UPDATE)
        f = tx.change(db.feed, feed_id, ended_at=db.clock_timestamp(), end_reason="arrived")
        row = {name: f[name] for name in ("endpoint_id", *SUBSCRIPTION_COLUMNS)}
        key = (f["endpoint_id"], batch)
        if tx.get(db.subscription, key) is not None:
            raise asyncpg.UniqueViolationError("the endpoint has this subscription")
        tx.put(db.subscription, key, {**row, "from_batch": batch, "to_batch": None})
        data = {"from_batch": batch, "fed": f["fed"], "expired": f["expired"]}
        kind = "endpoint_caught_up"
        routing_change.add_to_journal(db, tx, kind, actor, f["endpoint_id"], data)

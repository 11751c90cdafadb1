"""SQL of feeds: the batches and events that are left for an endpoint, and its progress.

Everything is read without a lock.  What was sequenced does not change; a feed itself changes only
by the leader's messages, or together with the routing version, on which each of those depends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from outbox.core.sequencing.feeds import LoadedFeed, PassedBatch, PastEvent, Place
from outbox.core.sequencing.partition_window import count_arrived
from outbox.core.sequencing.router import RoutableEvent, Route
from outbox.store.absence_proof import ranges_of
from outbox.store.channels import NOTIFY_ALL
from outbox.store.connection.row_security import rows_hidden, stop_hidden
from outbox.store.routing_change import BEGIN_CHANGE
from outbox.store.sql.expressions import key_hash
from outbox.store.sql.feed_progress import WAITS_FOR_JOB
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.sequencing.feeds import FedPart
    from outbox.store.sql.message import WriteCall

# Running feeds with their endpoints' lanes, as READ_ROUTES has subscriptions.  A row without values
# if row security may have hidden some.
READ_FEEDS = f"""
SELECT f.id, f.endpoint_id, f.batch, f.outbox_id, f.seen, f.types, f.tenant, f.all_tenants,
       CASE WHEN f.filter_stopped_at BETWEEN clock_timestamp() - make_interval(secs => $1)
                                         AND clock_timestamp() THEN NULL
            ELSE f.filter END AS filter,
       array(SELECT l.id FROM lane l
              WHERE l.endpoint_id = e.id AND l.generation = e.generation
              ORDER BY l.slot) AS lane_ids, e.backlog_max
  FROM feed f
  JOIN endpoint e ON e.id = f.endpoint_id AND e.state IN ('active', 'paused')
 WHERE f.ended_at IS NULL
   AND NOT {WAITS_FOR_JOB}
 UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
 WHERE {rows_hidden("feed", "endpoint", "lane", "replay_job_endpoint")}
"""  # noqa: S608 (constants only)

# The next batches after a place, up to the first one with which they have $2 events, at most $3;
# with the row before them.  Of a place inside a batch, that batch is read again.
READ_PASSED_BATCHES = f"""
SELECT batch, high_before, high, young, found, events
  FROM (SELECT *, lag(high) OVER (ORDER BY batch) AS high_before,
               sum(events) OVER (ORDER BY batch ROWS UNBOUNDED PRECEDING) - events AS before
          FROM (SELECT batch, high, young, found,
                       CASE WHEN (batch, high) > ($1, $4) THEN events ELSE 0 END AS events
                  FROM batch
                 WHERE batch >= coalesce((SELECT batch FROM batch WHERE batch < $1
                                           ORDER BY batch DESC LIMIT 1), $1)
                 ORDER BY batch LIMIT $3) next) counted
 WHERE before < $2
 UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL WHERE {rows_hidden("batch")}
 ORDER BY batch
"""  # noqa: S608 (constants only)

# Events by id: a range, and those that batches found.
READ_PAST_EVENTS = f"""
SELECT id, tenant, type, {key_hash("key", "id")} AS key_hash, erased_at IS NOT NULL AS is_erased,
       coalesce(expires_at <= clock_timestamp(), false) AS is_expired
  FROM (SELECT id, tenant, type, key, erased_at, expires_at FROM outbox WHERE id > $1 AND id <= $2
         UNION ALL
        SELECT o.id, o.tenant, o.type, o.key, o.erased_at, o.expires_at
          FROM unnest($3::bigint[], $4::bigint[]) AS r(lo, hi)
         CROSS JOIN LATERAL (SELECT * FROM outbox
                              WHERE id BETWEEN r.lo AND r.hi AND NOT (id > $1 AND id <= $2)) o) past
 UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL WHERE {rows_hidden("outbox")}
 ORDER BY id
"""  # noqa: S608 (constants only)

# Pending deliveries of endpoints, and how many ids were sequenced in the last $2 seconds.
READ_FEED_PENDING = f"""
SELECT e.id, coalesce(sum(c.last_seq - p.acked_seq), 0)::bigint AS pending,
       (SELECT high FROM batch ORDER BY batch DESC LIMIT 1) AS high,
       (SELECT high FROM batch WHERE at < clock_timestamp() - make_interval(secs => $2)
         ORDER BY at DESC LIMIT 1) AS high_before,
       {rows_hidden("lane", "lane_progress", "lane_counter", "batch")} AS hidden
  FROM unnest($1::uuid[]) AS e(id)
  LEFT JOIN lane l ON l.endpoint_id = e.id
  LEFT JOIN lane_progress p ON p.lane_id = l.id
  LEFT JOIN LATERAL (SELECT last_seq FROM lane_counter
                      WHERE lane_id = l.id ORDER BY last_seq DESC LIMIT 1) c ON true
 GROUP BY e.id
"""  # noqa: S608 (constants only)

# Which feeds' positions have seen an event that is not sequenced yet.
READ_UNSEQUENCED_SEEN = f"""
SELECT f.id, {rows_hidden("feed", "batch", "gap")} AS hidden
  FROM feed f, (SELECT high, young FROM batch ORDER BY batch DESC LIMIT 1) b
 WHERE f.id = ANY ($1)
   AND (f.seen && int8range(b.high, NULL, '(]') OR f.seen && b.young
        OR EXISTS (SELECT FROM gap WHERE f.seen && int8range(lo, hi, '[]')))
"""  # noqa: S608 (constants only)

# Advances feeds with batch $1.
ADVANCE_FEEDS = WriteStatement(
    "advance_feeds",
    """
WITH fed AS (
    SELECT * FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[],
                         $7::bigint[], $8::bigint[])
           AS f(id, batch, outbox_id, deliveries, expired, erased, missing)),
steps AS (
    INSERT INTO feed_step (feed_id, to_batch, to_id, batch)
    SELECT id, batch, outbox_id, $1 FROM fed WHERE deliveries > 0)
UPDATE feed f
   SET batch = fed.batch, outbox_id = fed.outbox_id, fed = f.fed + fed.deliveries,
       expired = f.expired + fed.expired, erased = f.erased + fed.erased,
       missing = f.missing + fed.missing
  FROM fed WHERE f.id = fed.id
""",
)

# Makes endpoints subscribers from batch $1 on, because nothing is left of their feeds.
END_FEEDS = WriteStatement(
    "end_feeds",
    """
WITH arrived AS (
    UPDATE feed SET ended_at = clock_timestamp(), end_reason = 'arrived' WHERE id = ANY ($2)
    RETURNING *),
subscribed AS (
    INSERT INTO subscription (endpoint_id, from_batch, types, tenant, all_tenants, filter,
                              filter_stopped_at, filter_stopped_reason)
    SELECT endpoint_id, $1, types, tenant, all_tenants, filter, filter_stopped_at,
           filter_stopped_reason
      FROM arrived)
INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT 'endpoint_caught_up', $3, endpoint_id, jsonb_build_object(
           'from_batch', $1::bigint, 'fed', fed, 'expired', expired, 'erased', erased,
           'missing', missing)
  FROM arrived ORDER BY id
""",
)


class FeedPending(NamedTuple):
    """What is pending at an endpoint, and how many ids were sequenced lately."""

    pending: int
    high: int
    arrived: int


class FeedStore:
    """Reads what is left of feeds, on the sequencer's connection or on one of its own."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._db = connection

    async def _fetch(self, statement: str, *arguments: object) -> list[Any]:
        rows = await self._db.fetch(statement, *arguments)
        if rows and rows[-1][0] is None:
            await stop_hidden(self._db)
        return list(rows)

    async def read_feeds(self, stopped_for_s: float) -> list[LoadedFeed]:
        """The running feeds.

        Args:
            stopped_for_s: a stopped filter is not evaluated for this time.
        """
        return [
            LoadedFeed(
                r["id"],
                r["endpoint_id"],
                Place(r["batch"], r["outbox_id"]),
                ranges_of(r["seen"]),
                Route(
                    r["endpoint_id"],
                    tuple(r["types"]),
                    r["tenant"],
                    r["all_tenants"],
                    tuple(r["lane_ids"]),
                    r["filter"],
                ),
                r["backlog_max"],
            )
            for r in await self._fetch(READ_FEEDS, stopped_for_s)
        ]

    async def read_batches(
        self, place: Place, events_max: int, batches_max: int
    ) -> list[PassedBatch]:
        """The next batches after a place; empty: there is none."""
        rows = await self._fetch(
            READ_PASSED_BATCHES, place.batch, events_max, batches_max + 2, place.id
        )
        return [
            PassedBatch(
                r["batch"],
                r["high_before"] or 0,
                r["high"],
                ranges_of(r["young"]),
                ranges_of(r["found"]),
                r["events"],
            )
            for r in rows
            if (r["batch"], r["high"]) > place
        ]

    async def read_events(self, batches: Sequence[PassedBatch]) -> list[PastEvent]:
        """The events of consecutive batches by id, and others, which they left out."""
        found = sorted(r for each in batches for r in each.found)
        rows = await self._fetch(
            READ_PAST_EVENTS,
            batches[0].high_before,
            batches[-1].high,
            [lo for lo, _ in found],
            [hi for _, hi in found],
        )
        return [PastEvent(RoutableEvent(*row[:4]), row[4], row[5]) for row in rows]

    async def read_pending(
        self, endpoint_ids: Sequence[UUID], within_s: float
    ) -> dict[UUID, FeedPending]:
        """What is pending at endpoints, and how many ids were sequenced within some seconds."""
        rows = await self._db.fetch(READ_FEED_PENDING, list(endpoint_ids), within_s)
        if any(r["hidden"] for r in rows):
            await stop_hidden(self._db)
        return {
            r["id"]: FeedPending(
                r["pending"], r["high"], count_arrived(r["high_before"] or 0, r["high"])
            )
            for r in rows
        }

    async def read_waiting(self, feed_ids: Sequence[int]) -> set[int]:
        """The feeds whose positions have seen an event that is not sequenced yet."""
        rows = await self._db.fetch(READ_UNSEQUENCED_SEEN, list(feed_ids))
        if any(r["hidden"] for r in rows):
            await stop_hidden(self._db)
        return {r["id"] for r in rows}


def write_feeds(batch: int, parts: Sequence[FedPart], actor: str) -> list[WriteCall]:
    """The statements that store what a batch has fed, and which endpoints subscribe with it."""
    rows = [
        (
            part.feed.id, *part.place, len(part.deliveries), part.skipped.expired,
            part.skipped.erased, part.skipped.missing,
        )
        for part in parts
    ]  # fmt: skip
    calls: list[WriteCall] = []
    if rows:
        places, counts = [each[:3] for each in rows], [each[3:] for each in rows]
        columns = *zip(*places, strict=True), *zip(*counts, strict=True)
        calls.append((ADVANCE_FEEDS, batch, *columns))
    if arrived := [part.feed.id for part in parts if part.arrives]:
        calls += [(END_FEEDS, batch, arrived, actor), (BEGIN_CHANGE,), (NOTIFY_ALL,)]
    return calls

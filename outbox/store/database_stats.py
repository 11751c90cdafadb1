"""Statistics of the database as a whole, which the leader reports periodically."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.store.sql.expressions import lease_runs
from outbox.store.sql.feed_progress import LEAPS, WAITS_FOR_JOB, count_ids

if TYPE_CHECKING:
    from asyncpg import Connection

COUNTED_DEAD_LETTERS_MAX = 100_000
"""Upper bound of the count of dead letters, which reads them one by one."""

# How many events are missing or superfluous, by the last count of each block.
COUNT_UNACCOUNTED = """
SELECT coalesce(sum(abs(present - expected)), 0)::bigint FROM event_block WHERE present <> expected
"""

# Statistics for metrics.  Ids are assigned in order, so the lowest open gap is the oldest: it
# exists since the first batch with a higher id.  The horizon's age excludes sessions that the
# role may not see (without pg_monitor), and VACUUM, which may take hours and does not hold
# back the removal of dead rows.  Computing the share of the notification queue trims it.
READ_DATABASE_STATS = f"""
WITH newest AS MATERIALIZED (SELECT young FROM batch ORDER BY batch DESC LIMIT 1),
oldest AS MATERIALIZED (
    SELECT least((SELECT lo FROM gap ORDER BY lo LIMIT 1), lower(young)) AS id FROM newest)
SELECT (SELECT count(*)
          FROM (SELECT FROM dead_letter WHERE state = 'dead' LIMIT {COUNTED_DEAD_LETTERS_MAX}) d)
           AS dead_letters,
       (SELECT extract(epoch FROM clock_timestamp() - b.at)::float8
          FROM oldest, LATERAL (
               SELECT at FROM batch WHERE high >= oldest.id ORDER BY high, batch LIMIT 1) b)
           AS gap_age_s,
       (SELECT extract(epoch FROM clock_timestamp() - min(began_at))::float8
          FROM (SELECT a.xact_start AS began_at FROM pg_stat_activity a
                 WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
                   AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
                   AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum v WHERE v.pid = a.pid)
                 UNION ALL
                SELECT prepared FROM pg_prepared_xacts WHERE database = current_database()) x)
           AS horizon_age_s,
       pg_notification_queue_usage() AS notification_queue_share,
       ({COUNT_UNACCOUNTED}) AS unaccounted_events,
       (SELECT count(*) FROM replica WHERE {lease_runs("replica")}) AS alive,
       (SELECT count(*) FROM replica WHERE NOT {lease_runs("replica")}) AS lapsed
"""  # noqa: S608 (constants only)

# Feeds that run, and wait for no replay.
READ_FEED_STATS = f"""
WITH leap AS MATERIALIZED ({LEAPS})
SELECT e.name AS endpoint, {count_ids("f.outbox_id", "newest.high")} AS remaining,
       greatest(extract(epoch FROM clock_timestamp() - b.at), 0)::float8 AS lag_s
  FROM feed f
  JOIN endpoint e ON e.id = f.endpoint_id
  JOIN batch b ON b.batch = f.batch
 CROSS JOIN (SELECT high FROM batch ORDER BY batch DESC LIMIT 1) newest
 WHERE f.ended_at IS NULL AND NOT {WAITS_FOR_JOB}
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class FeedStats:
    """How far the feed of an endpoint is."""

    endpoint: str
    remaining: int
    """Upper bound of the events, of all types, that it has not passed."""
    lag_s: float
    """Age of the newest batch that it has passed."""


@dataclass(frozen=True, slots=True)
class DatabaseStats:
    """The statistics; ages in seconds, None where there is nothing."""

    dead_letters: int
    gap_age_s: float | None
    horizon_age_s: float | None
    notification_queue_share: float
    """Share of the server's notification queue in use; when it is full, commits fail."""
    unaccounted_events: int
    """Events that are missing or superfluous, by the last count of each block of ids."""
    alive: int
    lapsed: int
    feeds: tuple[FeedStats, ...]


async def read_database_stats(connection: Connection[Any]) -> DatabaseStats:
    """Read the statistics; asyncpg's errors propagate."""
    row = await connection.fetchrow(READ_DATABASE_STATS)
    feeds = await connection.fetch(READ_FEED_STATS)
    return DatabaseStats(**dict(row), feeds=tuple(FeedStats(**dict(each)) for each in feeds))

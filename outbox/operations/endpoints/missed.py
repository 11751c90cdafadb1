"""Events that a disabled endpoint has missed.

They were sequenced while it had no subscription, so it has no deliveries of them.  A replay of the
time in which they were published sends them, and what it has got in that time once more.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from outbox.operations.replays.backfill import FIND_FIRST, FIND_LAST
from outbox.store.sql.type_match import FILTER_MET, MATCHES

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

MISSED_COUNTED_MAX = 50_000
"""Events of all types that are looked at, in at most about a second."""
RECENTLY_ENABLED_MAX, RECENTLY_COUNTED_MAX = 20, 5_000
"""Endpoints that the status looks at, and events of each."""

# When the events were published that a disabled endpoint has missed: from when it was disabled on,
# or earlier, because they were not sequenced yet.
READ_MISSED_SINCE = """
SELECT least(e.state_at, (
           SELECT min(created_at) FROM (
               (SELECT o.created_at FROM outbox o WHERE o.id > b.high ORDER BY o.id LIMIT 1)
                UNION ALL
               SELECT o.created_at FROM unnest(b.young) AS gap(ids)
                 JOIN outbox o ON o.id >= lower(gap.ids) AND o.id < upper(gap.ids)
           ) AS unsequenced))
  FROM endpoint e
  LEFT JOIN batch b
    ON b.batch = (SELECT max(s.to_batch) - 1 FROM subscription s WHERE s.endpoint_id = e.id)
 WHERE e.id = $1
"""
# All events of the batches before it was enabled were published before this time.
READ_ENABLED_AT = """
SELECT e.state_at, (SELECT high FROM batch WHERE batch < s.from_batch
                     ORDER BY batch DESC LIMIT 1) AS high
  FROM endpoint e JOIN subscription s ON s.endpoint_id = e.id AND s.to_batch IS NULL
 WHERE e.id = $1
"""

# Events that match the subscription as it is now, among the first ones of a range of ids.
#   gone, back: the last batch before it was disabled, and the last one before it was enabled.
COUNT_MISSED = f"""
SELECT count(*) FILTER (WHERE is_matching AND is_missed) AS missed,
       count(*) FILTER (WHERE is_matching AND NOT is_missed) AS again,
       count(*) > $4 AS more
  FROM (SELECT {MATCHES} AND {FILTER_MET} IS NOT FALSE AS is_matching,
               (o.id > coalesce(gone.high, 0) OR coalesce(gone.young @> o.id, false))
                   AND o.id <= back.high AND NOT back.young @> o.id AS is_missed
          FROM subscription s
          JOIN LATERAL (
               SELECT high, young FROM batch WHERE batch < s.from_batch
                ORDER BY batch DESC LIMIT 1) back ON true
          LEFT JOIN LATERAL (
               SELECT high, young FROM batch
                WHERE batch < (SELECT max(to_batch) FROM subscription WHERE endpoint_id = $1)
                ORDER BY batch DESC LIMIT 1) gone ON true
         CROSS JOIN LATERAL (
               SELECT * FROM outbox WHERE id BETWEEN $2 AND $3 ORDER BY id LIMIT $4 + 1) o
         WHERE s.endpoint_id = $1 AND s.to_batch IS NULL) counted
"""  # noqa: S608 (constants only)


# What endpoints have missed that were enabled within the last day, and that no backfill was
# requested for since then.  The batches are those of COUNT_MISSED.
READ_RECENTLY_MISSED = f"""
WITH enabled AS MATERIALIZED (
    SELECT s.*, e.name, gone.high AS gone_high, gone.young AS gone_young, back.high, back.young,
           back.at
      FROM subscription s
      JOIN endpoint e ON e.id = s.endpoint_id AND e.state IN ('active', 'paused')
     CROSS JOIN LATERAL (
           SELECT max(to_batch) AS to_batch FROM subscription
            WHERE endpoint_id = s.endpoint_id) ended
     CROSS JOIN LATERAL (
           SELECT high, young FROM batch WHERE batch < ended.to_batch
            ORDER BY batch DESC LIMIT 1) gone
     CROSS JOIN LATERAL (
           SELECT high, young, at FROM batch WHERE batch < s.from_batch
            ORDER BY batch DESC LIMIT 1) back
     WHERE s.to_batch IS NULL AND ended.to_batch < s.from_batch
       AND e.state_at > clock_timestamp() - interval '1 day'
       AND NOT EXISTS (
           SELECT FROM replay_job_endpoint p JOIN replay_job j ON j.id = p.job_id
            WHERE p.endpoint_id = s.endpoint_id AND j.kind = 'history'
              AND j.requested_at > back.at)
     ORDER BY s.from_batch DESC LIMIT {RECENTLY_ENABLED_MAX})
SELECT s.name AS endpoint, m.*
  FROM enabled s
 CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE is_matching) AS events,
              count(*) > {RECENTLY_COUNTED_MAX} AS more,
              min(created_at) FILTER (WHERE is_matching) AS since,
              CASE WHEN count(*) > {RECENTLY_COUNTED_MAX} THEN s.at
                   ELSE max(created_at) FILTER (WHERE is_matching) + interval '1 microsecond'
              END AS until
         FROM (SELECT o.created_at, {MATCHES} AND {FILTER_MET} IS NOT FALSE AS is_matching
                 FROM (SELECT * FROM outbox
                        WHERE id > coalesce(lower(s.gone_young) - 1, s.gone_high) AND id <= s.high
                          AND (id > s.gone_high OR s.gone_young @> id) AND NOT s.young @> id
                        ORDER BY id LIMIT {RECENTLY_COUNTED_MAX} + 1) o) counted) m
 WHERE m.events > 0
 ORDER BY s.name COLLATE "C"
"""  # noqa: S608 (constants only)


def replay_command(endpoint: str, since: datetime, until: datetime) -> str:
    """The command that sends an endpoint the events of some time."""
    return (
        f"outbox replay --endpoint {shlex.quote(endpoint)} --since {since.isoformat()} "
        f"--until {until.isoformat()}"
    )


@dataclass(frozen=True, slots=True)
class MissedEvents:
    """What an endpoint has missed while it was disabled."""

    endpoint: str
    events: int
    more: bool
    """There are so many events that not all were looked at."""
    since: datetime
    """They were published from this time on, and before `until`."""
    until: datetime

    @property
    def replay_command(self) -> str:
        """The command that sends them."""
        return replay_command(self.endpoint, self.since, self.until)


class Missed(NamedTuple):
    """What an endpoint has missed, and what a replay of that time would send."""

    until: datetime
    """When it was enabled; the missed events were published before."""
    events: int
    """Events that it missed, among the first `MISSED_COUNTED_MAX` of that time."""
    again: int
    """Events among them that it has got already."""
    more: bool
    """There are more events than were counted."""


async def read_missed(connection: Connection[Any], endpoint_id: UUID, since: datetime) -> Missed:
    """Count what an endpoint that was just enabled has missed.

    Args:
        since: the result of `READ_MISSED_SINCE` from before it was enabled.
    """
    until, high = await connection.fetchrow(READ_ENABLED_AT, endpoint_id)
    first = await connection.fetchval(FIND_FIRST, since, high or 0)
    last = first and await connection.fetchval(FIND_LAST, first, high, until)
    if not last:
        return Missed(until, 0, 0, more=False)
    counted = endpoint_id, first, last, MISSED_COUNTED_MAX
    return Missed(until, *await connection.fetchrow(COUNT_MISSED, *counted))

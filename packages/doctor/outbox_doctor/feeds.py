"""The check of feeds: what endpoints get of earlier batches, before they subscribe."""

from __future__ import annotations

import asyncio
import shlex
from typing import TYPE_CHECKING, Any

from outbox.core.model.duration import rounded
from outbox.core.model.text import count
from outbox.operations.feeds.progress import IS_FULL, describe_feed, read_feeds
from outbox.store.sql.expressions import lease_runs
from outbox.store.sql.feed_progress import LEAPS, WAITS_FOR_JOB, count_ids
from outbox_doctor.check import (
    ROWS_MAX,
    CheckResult,
    DoctorContext,
    Results,
    check,
    ok,
    problem,
    warning,
)

if TYPE_CHECKING:
    from outbox.operations.feeds.progress import FeedProgress

MOVED_POLL_S = 0.1

# Feeds that wait for nothing, and have fed nothing for more than $1 seconds.  Empty unless a relay
# is running: without one, the check of replicas reports the cause.
IDLE = f"""
SELECT f.id, e.name, f.batch, f.outbox_id, idle.since_s
  FROM feed f
  JOIN endpoint e ON e.id = f.endpoint_id AND e.state = 'active'
 CROSS JOIN LATERAL (
       SELECT extract(epoch FROM clock_timestamp() - greatest(
                  f.began_at,
                  (SELECT b.at FROM feed_step s JOIN batch b USING (batch)
                    WHERE s.feed_id = f.id ORDER BY s.batch DESC LIMIT 1),
                  (SELECT p.ended_at FROM replay_job_endpoint p
                    WHERE p.job_id = f.after_job AND p.endpoint_id = f.endpoint_id)))::float8
              AS since_s) idle
 WHERE f.ended_at IS NULL AND idle.since_s > $1 AND NOT {WAITS_FOR_JOB} AND NOT {IS_FULL}
   AND EXISTS (SELECT FROM replica WHERE {lease_runs("replica")})
 ORDER BY f.id
"""  # noqa: S608 (constants only)

# A place that has passed events without deliveries is stored with the next batch, so it may move
# although nothing was fed.
PLACES = "SELECT id, batch, outbox_id FROM feed WHERE ended_at IS NULL"

# Feeds that began more than $1 seconds ago and wait for nothing but their receiver, and the ids
# that were assigned per second in the last half minute.
OLD = f"""
WITH leap AS MATERIALIZED ({LEAPS})
SELECT e.name, {count_ids("past.high", "newest.high")}
               / extract(epoch FROM clock_timestamp() - past.at)::float8 AS arriving_per_s
  FROM feed f
  JOIN endpoint e ON e.id = f.endpoint_id AND e.state = 'active'
 CROSS JOIN (SELECT high FROM batch ORDER BY batch DESC LIMIT 1) newest
 CROSS JOIN (SELECT high, at FROM batch WHERE at < clock_timestamp() - interval '30 s'
              ORDER BY at DESC, batch DESC LIMIT 1) past
 WHERE f.ended_at IS NULL AND f.began_at < clock_timestamp() - make_interval(secs => $1)
   AND NOT {WAITS_FOR_JOB}
"""  # noqa: S608 (constants only)


@check("feeds", passed="no endpoint catches up")
async def progress(context: DoctorContext) -> Results:
    """Endpoints that catch up come closer to the newest events."""
    stuck = {row["name"]: row for row in await _find_stuck(context)}
    for row in [*stuck.values()][:ROWS_MAX]:
        yield _stuck_feed(row)
    arriving = {
        row["name"]: row["arriving_per_s"]
        for row in await context.db.fetch(OLD, context.limits.feed_s)
    }
    others = [feed for feed in await read_feeds(context.db) if feed.endpoint not in stuck]
    for feed in others[:ROWS_MAX]:
        arriving_per_s = arriving.get(feed.endpoint, 0.0)
        if (feed.rate_per_s or 0.0) < arriving_per_s:
            yield _slow_feed(feed, arriving_per_s)
        else:
            left = "" if feed.left_s is None else rounded(feed.left_s)
            yield ok(f'"{feed.endpoint}": {describe_feed(feed, left)}')
    for some in (stuck, others):
        if (more := len(some) - ROWS_MAX) > 0:
            yield warning(f"and {more} more of this kind", "outbox status")


async def _find_stuck(context: DoctorContext) -> list[Any]:
    """The feeds that do not move for `moved_s`, although they wait for nothing."""
    idle: list[Any] = await context.db.fetch(IDLE, context.limits.feed_s)
    loop = asyncio.get_running_loop()
    until = loop.time() + context.limits.moved_s
    while idle and loop.time() < until:
        await asyncio.sleep(MOVED_POLL_S)
        places = {tuple(row) for row in await context.db.fetch(PLACES)}
        idle = [row for row in idle if (row["id"], row["batch"], row["outbox_id"]) in places]
    return idle


def _stuck_feed(row: Any) -> CheckResult:
    return problem(
        f'"{row["name"]}" catches up, and its feed has not advanced for '
        f"{rounded(row['since_s'])}, although it waits for nothing",
        'see the log of the leader for "feeds cannot be read ahead" or "the database refuses rows '
        'of feeds", which say why',
    )


def _slow_feed(feed: FeedProgress, arriving_per_s: float) -> CheckResult:
    message = (
        f'"{feed.endpoint}" falls behind: its feed passes {_rate(feed.rate_per_s or 0.0)} events '
        f"per second, while {_rate(arriving_per_s)} are sequenced; at most "
        f"{count(feed.left_max or 0, 'event')} left"
    )
    name = shlex.quote(feed.endpoint)
    if feed.is_full:
        return warning(
            f"{message}; it waits for its receiver",
            f"see outbox endpoint show {name}; a limit of its requests is raised with: outbox "
            f"endpoint update {name} --in-flight-max N",
        )
    return warning(
        message,
        "pause some of the others that catch up, which share its pace: outbox endpoint pause NAME; "
        "later outbox endpoint resume NAME",
    )


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"

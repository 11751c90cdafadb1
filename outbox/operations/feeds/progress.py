"""How far the feeds of endpoints are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model.text import count
from outbox.core.sequencing.feeds import FED_PENDING_MAX
from outbox.operations.lanes import PENDING
from outbox.operations.rows import from_row
from outbox.store.sql.feed_progress import LEAPS, WAITS_FOR_JOB, count_ids

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

FEEDS_SHOWN_MAX = 100
"""Feeds of a status."""

IS_FULL = f"{PENDING} >= 0.9 * least(e.backlog_max / 2, {FED_PENDING_MAX})"
"""Whether the feed of an endpoint `e` waits for its receiver."""

# Running feeds of a tenant ($2; NULL: all), or of endpoints ($1; NULL: all).
#   at, newest: the batch that a feed has passed, and the newest.  then: the one that it had passed
#     half a minute ago, or where it began.
READ_RUNNING = f"""
WITH leap AS MATERIALIZED ({LEAPS})
SELECT e.name AS endpoint, f.began_at, f.fed, f.expired, f.erased, f.missing, b.at AS passed_until,
       {count_ids("f.outbox_id", "newest.high")} AS left_max,
       {count_ids("past.high", "b.high")}
           / extract(epoch FROM clock_timestamp() - past.at)::float8 AS rate_per_s,
       {WAITS_FOR_JOB} AS waits,
       {IS_FULL} AS is_full
  FROM feed f
  JOIN endpoint e ON e.id = f.endpoint_id
  JOIN batch b ON b.batch = f.batch
 CROSS JOIN (SELECT high FROM batch ORDER BY batch DESC LIMIT 1) newest
 CROSS JOIN LATERAL (
       (SELECT s.to_batch AS batch, d.at
          FROM (SELECT to_batch, batch FROM feed_step WHERE feed_id = f.id
                 ORDER BY batch DESC LIMIT 5000) s
          JOIN batch d ON d.batch = s.batch
         WHERE d.at < clock_timestamp() - interval '30 s' ORDER BY s.batch DESC LIMIT 1)
        UNION ALL
       SELECT f.from_batch, f.began_at LIMIT 1) then_at
 CROSS JOIN LATERAL (
       SELECT high, then_at.at FROM batch WHERE batch = then_at.batch) past
 WHERE f.ended_at IS NULL AND ($1::uuid[] IS NULL OR e.id = ANY ($1))
   AND ($2::text IS NULL OR e.tenant = $2)
 ORDER BY f.id LIMIT {FEEDS_SHOWN_MAX}
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class FeedProgress:
    """An endpoint that gets earlier events before new ones."""

    endpoint: str
    began_at: datetime
    fed: int
    """Deliveries so far."""
    expired: int
    """Events that were skipped because they have expired, …"""
    erased: int
    """… or were erased."""
    missing: int
    """Events whose rows are gone without a record; see outbox verify."""
    passed_until: datetime
    """It has passed what was sequenced until then."""
    left_max: int | None
    """Upper bound of the events that are left, of all types; null for tenant tokens, …"""
    rate_per_s: float | None
    """… as the events of all types that it has passed per second lately."""
    waits: bool
    """Whether a replay of what was pending before goes first."""
    is_full: bool
    """Whether it waits for the receiver, because many deliveries are pending."""

    @property
    def left_s(self) -> float | None:
        """Estimated seconds until it has arrived; None: not known yet."""
        if not self.rate_per_s or self.left_max is None or self.is_full:
            return None
        return self.left_max / self.rate_per_s


async def read_feeds(
    connection: Connection[Any],
    *,
    endpoint_ids: Sequence[UUID] | None = None,
    tenant: str | None = None,
) -> tuple[FeedProgress, ...]:
    """Read the running feeds, the oldest first.

    Args:
        endpoint_ids: only those of some endpoints.
        tenant: only those of endpoints of this tenant alone.
    """
    ids = None if endpoint_ids is None else list(endpoint_ids)
    rows = await connection.fetch(READ_RUNNING, ids, tenant)
    return tuple(from_row(FeedProgress, row) for row in rows)


def describe_feed(feed: FeedProgress, left: str) -> str:
    """What a feed does, in a sentence.

    Args:
        left: the time that it takes, as text; empty: not known.
    """
    if feed.waits:
        return "catching up: what was pending when it was disabled goes first"
    skipped = [
        f"{number} {what}"
        for number, what in (
            (feed.expired, "expired"), (feed.erased, "erased"), (feed.missing, "missing")
        )
        if number
    ]  # fmt: skip
    without = f", without {' and '.join(skipped)}" if skipped else ""
    time = f", in about {left}" if left else ""
    if feed.is_full:
        time = "; it waits for its receiver, because many deliveries are pending"
    return (
        f"catching up: {count(feed.fed, 'delivery')} so far{without}; at most "
        f"{count(feed.left_max or 0, 'event')} left{time}"
    )

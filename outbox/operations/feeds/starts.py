"""Where an endpoint begins: at a position, at a time, or at the oldest event that is kept.

From there on it is fed what earlier batches sequenced, until it subscribes
(`outbox.core.sequencing.feeds`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from asyncpg import Range

from outbox.core.model.position import Position
from outbox.core.model.start import BEGINNING
from outbox.core.sequencing.partition_window import WIDTH
from outbox.errors import Conflict, UsageError
from outbox.store.absence_proof import multirange, ranges_of
from outbox.store.connection.connect import map_errors
from outbox.store.sql.message import WriteStatement
from outbox.store.sql.type_match import FILTER_MET, MATCHES

if TYPE_CHECKING:
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox.core.model.int_ranges import Range as Ids
    from outbox.core.model.start import Start
    from outbox.store.change import Change

# The newest batch after which something is gone: with the oldest kept batch, or with an event.
#   log: the first batch of the kept log, which sequenced nothing.  events: the last batch that can
#     contain an event of a dropped period.
_GONE = f"""
SELECT greatest(log.first, events.last) AS batch, events.until
  FROM (SELECT min(number) * {WIDTH} AS first FROM period
         WHERE kind = 'log' AND dropped_at IS NULL) log,
       (SELECT max(last_batch) AS last, max(ended_at) AS until FROM period
         WHERE kind = 'events' AND dropped_at IS NOT NULL) events
"""  # noqa: S608 (constants only)

# A batch, and what a position of it must agree with.  The timeline is the server's: after a
# promotion, the stored one is the former one until a relay runs.
READ_BATCH = f"""
SELECT b.high, b.at, g.batch AS gone, g.until AS gone_until,
       coalesce(server_timeline(), c.timeline) AS timeline, i.id AS incarnation,
       history_changed() AS history_changed, (SELECT max(batch) FROM batch) AS newest
  FROM cursor c
  LEFT JOIN incarnation i ON i.by_xid = i.xmin::text::bigint
 CROSS JOIN ({_GONE}) g
  LEFT JOIN batch b ON b.batch = $1
"""  # noqa: S608 (constants only)

# The newest batch before a time ($1) or an age ($2), and whether something after it is gone.
FIND_BATCH_BEFORE = f"""
SELECT t.at, t.at > t.now AS is_future, b.batch, b.high,
       b.batch IS NULL OR b.batch < g.batch AS is_gone
  FROM (SELECT now, coalesce($1::timestamptz, now - $2::interval) AS at
          FROM (SELECT clock_timestamp() AS now) clock) t
 CROSS JOIN ({_GONE}) g
  LEFT JOIN LATERAL (
       SELECT batch, high FROM batch WHERE at < t.at ORDER BY at DESC, batch DESC LIMIT 1) b ON true
"""  # noqa: S608 (constants only)

# The oldest batch after which nothing is gone.
FIND_OLDEST = f"SELECT batch, b.high FROM ({_GONE}) g JOIN batch b USING (batch)"  # noqa: S608

READ_GONE = f"SELECT coalesce(batch > $1, false) FROM ({_GONE}) g"  # noqa: S608 (constants only)

COUNT_AFTER = "SELECT coalesce(sum(events), 0)::bigint FROM batch WHERE batch > $1"

# Events that batches after $1 sequenced, or will, as far as the kept ones match a subscription.
#   found: ids up to `high` that a later batch found, in a gap that was open.
COUNT_MATCHING = f"""
WITH found AS MATERIALIZED (
    SELECT r FROM batch, unnest(found) r
     WHERE batch > $1 AND NOT isempty(found) AND lower(r) <= $2)
SELECT count(*)
  FROM (SELECT * FROM outbox WHERE id > $2
         UNION ALL
        SELECT o.* FROM found CROSS JOIN LATERAL (
               SELECT * FROM outbox WHERE id >= lower(r) AND id < upper(r) AND id <= $2) o) o,
       (SELECT $4::text[] AS types, $5::text AS tenant, $6::boolean AS all_tenants,
               $7::text AS filter) s
 WHERE o.erased_at IS NULL AND coalesce(o.expires_at > clock_timestamp(), true)
   AND NOT $3::int8multirange @> o.id AND {MATCHES} AND {FILTER_MET} IS NOT FALSE
"""  # noqa: S608 (constants only)

# Aborts if a batch was changed or dropped since it was read, or events of later batches were.  That
# of a position ($4) aborts on a server of another history, to which a proxy may have passed it.
REQUIRE_START = WriteStatement(
    "require_start",
    f"""
SELECT abort_unless(NOT ($4 AND history_changed()) AND EXISTS (
    SELECT FROM ({_GONE}) g, batch b
     WHERE b.batch = $1 AND b.high = $2 AND coalesce(g.batch, 0) <= $3))
""",  # noqa: S608 (constants only)
)

# Begins to feed endpoints with what their settings subscribe to; a job that this message adds goes
# first.
BEGIN_FEED = WriteStatement(
    "begin_feed",
    """
INSERT INTO feed (endpoint_id, from_batch, from_id, batch, outbox_id, seen, types, tenant,
                  all_tenants, filter, after_job)
SELECT id, $2, $3, $2, $3, $4, types, tenant, all_tenants, filter,
       CASE WHEN $5 THEN currval('replay_job_id_seq') END
  FROM endpoint WHERE id = $1
""",
)

# Up to where an endpoint that was disabled has got everything: the batch before its subscription
# ended, or the place of a feed that ended before it arrived.
READ_LEFT_AT = """
SELECT f.batch, f.outbox_id, f.seen, b.high
  FROM feed f JOIN batch b USING (batch)
 WHERE f.endpoint_id = $1 AND f.end_reason IN ('disabled', 'removed')
   AND NOT EXISTS (SELECT FROM subscription s
                    WHERE s.endpoint_id = $1 AND s.to_batch - 1 > f.batch)
 UNION ALL
SELECT b.batch, b.high, '{}'::int8multirange, b.high
  FROM (SELECT max(to_batch) AS to_batch FROM subscription WHERE endpoint_id = $1) s
 CROSS JOIN LATERAL (
       SELECT batch, high FROM batch WHERE batch < s.to_batch ORDER BY batch DESC LIMIT 1) b
 ORDER BY batch DESC, outbox_id DESC LIMIT 1
"""

_MISSED_IS_GONE = (
    "some of what it has missed is gone, by retention; enable it without catching up, and send "
    "what is left with: outbox replay --endpoint NAME --since TIME"
)

# Whether an endpoint ever had a subscription or a feed.
HAS_BEGUN = """
SELECT EXISTS (SELECT FROM subscription WHERE endpoint_id = $1)
    OR EXISTS (SELECT FROM feed WHERE endpoint_id = $1)
"""


@dataclass(frozen=True, slots=True)
class StartPreview:
    """What an endpoint would get first."""

    name: str
    batch: int
    """The batch after which it would begin."""
    events: int
    """Events of all types that were sequenced since."""
    matching: int | None
    """Those that it would get, and others that are not sequenced yet; null: not counted."""


@dataclass(frozen=True, slots=True)
class FeedStart:
    """Where a feed begins: after an event of a batch, without what was seen."""

    batch: int
    outbox_id: int
    high: int
    """The greatest id that the batch has passed."""
    seen: tuple[Ids, ...] = ()
    is_position: bool = False
    """Whether this is what a position says, which holds in its history only."""

    @property
    def is_inside(self) -> bool:
        """Whether a part of the batch is left."""
        return self.outbox_id < self.high


async def resolve_start(db: Any, start: Start) -> FeedStart:
    """Find the batch after which an endpoint begins.

    Raises:
        Conflict: the position is of another state, or something after it is gone.
        UsageError: the time is in the future.
    """
    if isinstance(start, Position):
        row = await db.fetchrow(READ_BATCH, start.batch)
        _check_position(start, row)
        return FeedStart(start.batch, start.high, start.high, start.seen, is_position=True)
    if start == BEGINNING:
        row = await db.fetchrow(FIND_OLDEST)
        return FeedStart(row["batch"], row["high"], row["high"])
    is_age = isinstance(start, timedelta)
    row = await db.fetchrow(FIND_BATCH_BEFORE, *((None, start) if is_age else (start, None)))
    if row["is_future"]:
        raise UsageError(f"from: {row['at'].isoformat()} is in the future")
    if row["is_gone"]:
        raise Conflict(
            f"from: events after {row['at'].isoformat()} are gone; the oldest that are kept: "
            f"from {BEGINNING}"
        )
    return FeedStart(row["batch"], row["high"], row["high"])


def _check_position(position: Position, row: Any) -> None:
    """Check that what follows a position is what its snapshot did not see."""
    if row["incarnation"] != position.incarnation:
        raise Conflict(
            "from: this position is of another database, or of this one before it was restored; "
            "take a new snapshot"
        )
    # No relay had run yet, or the server does not say.
    if position.timeline and row["timeline"] != position.timeline:
        raise Conflict(
            "from: the server was promoted since this position was taken, which may have lost "
            "commits; take a new snapshot"
        )
    if row["history_changed"]:
        raise Conflict(
            "from: the database was restored or copied, and no relay has run since; start the "
            "relay, and take a new snapshot"
        )
    if row["gone"] is not None and position.batch < row["gone"]:
        until = row["gone_until"]
        events = "" if until is None else f", with events until {until:%Y-%m-%dT%H:%M:%SZ}"
        raise Conflict(
            f"from: some of what follows this position was dropped by retention{events}; take a "
            "new snapshot"
        )
    if row["high"] is None and position.batch > row["newest"]:
        raise Conflict("from: batches up to this position are lost; take a new snapshot")
    if (row["high"], row["at"]) != (position.high, position.at):
        raise Conflict(
            f"from: batch {position.batch} is not the one of this position, because commits were "
            "lost; take a new snapshot"
        )


async def resolve_missed(db: Any, endpoint_id: UUID) -> FeedStart | None:
    """Find where an endpoint that was disabled goes on; None: it never began.

    Raises:
        Conflict: some of what it has missed is gone.
    """
    row = await db.fetchrow(READ_LEFT_AT, endpoint_id)
    if row is None:
        # Or its batch was dropped with the log.
        if await db.fetchval(HAS_BEGUN, endpoint_id):
            raise Conflict(_MISSED_IS_GONE)
        return None
    start = FeedStart(row["batch"], row["outbox_id"], row["high"], ranges_of(row["seen"]))
    if await db.fetchval(READ_GONE, start.batch - start.is_inside):
        raise Conflict(_MISSED_IS_GONE)
    return start


async def preview_start(
    connection: Connection[Any],
    schema: str,
    settings: EndpointSettings,
    start: Start,
    *,
    matching: bool = False,
) -> StartPreview:
    """How many events follow a start, without a change.

    Args:
        matching: count those that the settings subscribe to, too, which reads all of them.

    Raises:
        Conflict, UsageError: as in `resolve_start`.
    """
    with map_errors(schema):
        begins = await resolve_start(connection, start)
        events = await count_after(connection, begins)
        found = None
        if matching:
            found = await connection.fetchval(
                COUNT_MATCHING,
                begins.batch,
                begins.high,
                [Range(lo, hi + 1) for lo, hi in begins.seen],
                *settings.subscription,
            )
    return StartPreview(settings.name, begins.batch, events, found)


async def count_after(db: Any, start: FeedStart) -> int:
    """How many events were sequenced after a start, of all types, without those that were seen."""
    events: int = await db.fetchval(COUNT_AFTER, start.batch)
    return max(events - sum(hi - lo + 1 for lo, hi in start.seen), 0)


def begin_feed(
    change: Change, endpoint_id: UUID, start: FeedStart, *, after_new_job: bool = False
) -> None:
    """Feed an endpoint from a start on, instead of a subscription.

    Args:
        after_new_job: first what a replay job sends that this change adds.
    """
    passed = start.batch - start.is_inside
    change.write(REQUIRE_START, start.batch, start.high, passed, start.is_position)
    change.write(
        BEGIN_FEED, endpoint_id, start.batch, start.outbox_id, multirange(start.seen), after_new_job
    )

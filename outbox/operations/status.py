"""Status overview: leader, sequencing lag, pending and failing deliveries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.partition_window import unsequenced_ids
from outbox.operations.dead_letters.queries import LAST_REPLAY
from outbox.operations.endpoints.missed import READ_RECENTLY_MISSED, MissedEvents
from outbox.operations.endpoints.statuses import READ_STATUSES, EndpointStatus, endpoint_statuses
from outbox.operations.events.future import HeldEvents, read_held
from outbox.operations.feeds.progress import FeedProgress, read_feeds
from outbox.operations.rows import from_row
from outbox.store.cluster.timeline import read_stopped
from outbox.store.connection.connect import map_errors
from outbox.store.connection.row_security import stop_empty
from outbox.store.database_stats import COUNT_UNACCOUNTED
from outbox.store.delivery.endpoint_state import CONDITION_EVERY_S, Condition
from outbox.store.sequencing.stalls import Blocker, read_cursor_blocker
from outbox.store.sql.expressions import lease_runs

if TYPE_CHECKING:
    from datetime import datetime

    from asyncpg import Connection

BLOCKED_AFTER_S = 2.0
"""Events wait at least this long if a session blocks their sequencing; a batch takes less."""

# The newest batch, and the first event above it.  The sequence has the last assigned id; some
# ids above `high` may be rolled back.
CURSOR = """
SELECT b.batch, b.high, b.at, clock_timestamp() AS seen_at, c.timeline, c.timeline_at,
       coalesce(pg_sequence_last_value(pg_get_serial_sequence('outbox', 'id')::regclass), 0)
           AS last_id,
       (SELECT extract(epoch FROM clock_timestamp() - o.created_at)::float8
          FROM outbox o WHERE o.id > b.high ORDER BY o.id LIMIT 1) AS waiting_s
  FROM batch b, cursor c ORDER BY b.batch DESC LIMIT 1
"""

# Open gaps: assigned ids that may still be committed.  The age of a gap is about the age of the
# next event.
GAPS = """
WITH open AS MATERIALIZED (
    SELECT lower(r) AS lo, upper(r) - 1 AS hi
      FROM (SELECT young FROM batch ORDER BY batch DESC LIMIT 1) b, unnest(b.young) AS r
    UNION ALL
    SELECT lo, hi FROM gap)
SELECT count(*) AS gaps, min(lo) AS oldest,
       (SELECT extract(epoch FROM clock_timestamp() - o.created_at)::float8
          FROM outbox o WHERE o.id > (SELECT min(hi) FROM open) ORDER BY o.id LIMIT 1) AS since_s
  FROM open
"""

# The last entries of the journal that a relay repeats while it has something to say.
RECENT = f"""
(SELECT id, kind, actor, data ->> 'reason' AS reason
   FROM (SELECT id, kind, actor, at, data FROM journal ORDER BY id DESC LIMIT 1000) AS last
  WHERE at BETWEEN clock_timestamp() - make_interval(secs => {2 * CONDITION_EVERY_S})
               AND clock_timestamp())
"""  # noqa: S608 (a constant only)


def _newest(condition: Condition) -> str:
    """What the newest entry of the relay `r` says about a condition."""
    return f"""
       (SELECT j.reason FROM {RECENT} j
         WHERE j.kind IN {condition.value} AND j.actor = 'replica ' || r.id
         ORDER BY j.id DESC LIMIT 1)"""  # noqa: S608 (constants only)


# Relays, and what is wrong with their processes.
REPLICAS = f"""
SELECT r.id, r.name, r.version, r.started_at, {lease_runs("r")} AS alive,
       {_newest(Condition.RESOURCES)} AS problem, {_newest(Condition.API)} AS api_problem,
       extract(epoch FROM r.expires_at - clock_timestamp())::float8 AS left_s,
       r.id IS NOT DISTINCT FROM (SELECT writer FROM cursor) AS leads,
       (SELECT count(*) FROM ownership o JOIN endpoint e ON e.id = o.endpoint_id
         WHERE o.replica_id = r.id AND e.state <> 'removed') AS endpoints
  FROM replica r ORDER BY r.id
"""  # noqa: S608 (a constant only)

# What a running relay has said last about sequencing, among the last entries of the journal; NULL:
# it goes on.  The newest one counts.
STOPPED = f"""
SELECT j.reason
  FROM {RECENT} j JOIN replica r ON j.actor = 'replica ' || r.id AND {lease_runs("r")}
 WHERE j.kind IN {Condition.SEQUENCING.value}
 ORDER BY j.id DESC LIMIT 1
"""  # noqa: S608 (constants only)

# Endpoints with a compat signature, and the end that is next.  Ends are compared as text, which is
# ordered like their times (see `format_until`), so that one that was edited fails no status.
COMPAT_SIGNATURES = """
WITH signed AS MATERIALIZED (
    SELECT name, compat ->> 'until' AS until,
           to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') AS now
      FROM endpoint WHERE compat IS NOT NULL AND state <> 'removed')
SELECT count(*) FILTER (WHERE until IS NULL OR until > now) AS endpoints,
       count(*) FILTER (WHERE until <= now) AS ended,
       min(until) FILTER (WHERE until > now) AS next_end,
       (array_agg(name ORDER BY until, name) FILTER (WHERE until > now))[1] AS next_endpoint
  FROM signed
"""

REPLAYS_MAX = 10_000
"""A replay is looked for among this many: each takes a look at its deliveries."""

# Dead letters by state.  The stored state of one that was replayed does not change any more.
#   running: those whose newest replay has pending deliveries.
COUNT_DEAD_LETTERS = f"""
WITH stored AS MATERIALIZED (
    SELECT d.state, count(*) AS dead_letters,
           count(*) FILTER (WHERE e.state = 'removed') AS of_removed
      FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id GROUP BY d.state),
newest AS MATERIALIZED (SELECT DISTINCT dead_id FROM (
    SELECT dead_id FROM replay ORDER BY id DESC LIMIT {REPLAYS_MAX}) r),
running AS MATERIALIZED (
    SELECT count(*) AS dead_letters
      FROM newest n JOIN dead_letter d ON d.id = n.dead_id {LAST_REPLAY}
     WHERE t.state = 'replaying')
SELECT state, dead_letters, of_removed FROM stored WHERE state <> 'replaying'
 UNION ALL
SELECT 'replaying', dead_letters, 0 FROM running WHERE dead_letters > 0
 UNION ALL
SELECT 'replayed', s.dead_letters - r.dead_letters, 0 FROM stored s, running r
 WHERE s.state = 'replaying' AND s.dead_letters > r.dead_letters
"""  # noqa: S608 (constants only)

# A monotonic counter, without a scan of the log partitions.
COUNT_SEQUENCED = """
SELECT (SELECT deliveries FROM removed_lanes) + coalesce(sum(last_seq), 0)::bigint FROM lane_counter
"""


@dataclass(frozen=True, slots=True)
class CursorStatus:
    """Progress of sequencing."""

    batch: int
    high: int
    last_id: int
    lag: int
    """Assigned ids above the highest sequenced one; 0 when no event among them is committed."""
    at: datetime
    waiting_s: float | None
    """Age of the oldest event that is not sequenced yet; None: there is none."""
    timeline: int | None
    """Server timeline of the last batch; None: the server does not report it."""
    timeline_at: datetime | None
    """When the timeline changed and new lanes began; None: never."""


@dataclass(frozen=True, slots=True)
class CompatSignatures:
    """Endpoints whose requests carry a second signature, in the form of another sender."""

    endpoints: int
    ended: int
    """Endpoints whose compat signature has ended, and is not sent any more."""
    next_end: str | None
    """The next end; null: none is set."""
    next_endpoint: str | None


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A registered relay."""

    id: int
    name: str
    version: str
    alive: bool
    """The lease has not expired, by the database's clock."""
    leads: bool
    """This relay is the leader, which sequences events."""
    endpoints: int
    started_at: datetime
    problem: str | None
    """What its process lacks for connections; None: nothing."""
    api_problem: str | None
    """What is wrong with the API that it has started; None: nothing, or it has started none."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The data of `outbox status`, from one snapshot."""

    schema: str
    at: datetime
    """The time by the server's clock."""
    cursor: CursorStatus
    blocker: Blocker | None
    """The session for which sequencing waits, while events wait; None: there is none."""
    stopped: str | None
    """Why relays sequence nothing, such as what a restored state lacks; None: they do."""
    open_gaps: int
    held: HeldEvents
    """What is held for the shares of tenants."""
    unaccounted_events: int
    """Events that are missing or superfluous, by a comparison with all ids."""
    replicas: tuple[ReplicaStatus, ...]
    missed: tuple[MissedEvents, ...]
    """What endpoints have missed that were enabled within the last day."""
    feeds: tuple[FeedProgress, ...]
    """Endpoints that get earlier events before new ones."""
    compat: CompatSignatures
    pending: int
    sequenced: int
    """Deliveries sequenced in all, since installation."""
    endpoints_total: int
    endpoints: tuple[EndpointStatus, ...]
    dead_letters: dict[str, int]
    """The number of dead letters by state: `replaying` while a new delivery is pending, and
    `replayed` afterwards, whatever became of it."""
    dead_letters_of_removed: int
    """Those among the dead ones that belong to removed endpoints: they cannot be replayed."""


async def read_overview(connection: Connection[Any], schema: str, *, limit: int = 100) -> Overview:
    """Read the overview in one snapshot, with at most `limit` endpoints, or those of a page.

    Raises:
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            row = await connection.fetchrow(CURSOR)
            if row is None:
                await stop_empty(connection, "cursor or batch")
            cursor = dict(row)
            stopped = await read_stopped(connection) or await connection.fetchval(STOPPED)
            waits = (cursor["waiting_s"] or 0.0) >= BLOCKED_AFTER_S
            blocker = await read_cursor_blocker(connection) if waits else None
            gaps = await connection.fetchrow(GAPS)
            replicas = await connection.fetch(REPLICAS)
            held = await read_held(connection, schema)
            endpoints = await connection.fetch(READ_STATUSES, limit, None)
            dead = await connection.fetch(COUNT_DEAD_LETTERS)
            missed = await connection.fetch(READ_RECENTLY_MISSED)
            feeds = await read_feeds(connection)
            compat = await connection.fetchrow(COMPAT_SIGNATURES)
            unaccounted: int = await connection.fetchval(COUNT_UNACCOUNTED)
            sequenced: int = await connection.fetchval(COUNT_SEQUENCED)
    seen_at = cursor.pop("seen_at")
    is_waiting = cursor["waiting_s"] is not None
    lag = unsequenced_ids(cursor["high"], cursor["last_id"]) if is_waiting else 0
    return Overview(
        schema=schema,
        at=seen_at,
        sequenced=sequenced,
        pending=endpoints[0]["pending_total"] if endpoints else 0,
        cursor=CursorStatus(**cursor, lag=lag),
        blocker=blocker,
        stopped=stopped,
        open_gaps=gaps["gaps"],
        held=held,
        unaccounted_events=unaccounted,
        replicas=tuple(from_row(ReplicaStatus, row) for row in replicas),
        missed=tuple(from_row(MissedEvents, row) for row in missed),
        feeds=feeds,
        compat=CompatSignatures(**compat),
        endpoints=await endpoint_statuses(endpoints),
        endpoints_total=endpoints[0]["endpoints_total"] if endpoints else 0,
        dead_letters={row["state"]: row["dead_letters"] for row in dead},
        dead_letters_of_removed=sum(row["of_removed"] for row in dead if row["state"] == "dead"),
    )


async def list_replicas(connection: Connection[Any], schema: str) -> list[ReplicaStatus]:
    """List the registered relays."""
    with map_errors(schema):
        return [from_row(ReplicaStatus, row) for row in await connection.fetch(REPLICAS)]

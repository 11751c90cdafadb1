"""One look at everything: who sequences, what is owed, what is failing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from outbox.core.model.endpoint_status import condition
from outbox.core.model.ids import lane_name
from outbox.core.sequencing.partition_window import waiting
from outbox.operations.endpoints import LANE_STATE, SUBSCRIBED
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from datetime import datetime

    from asyncpg import Connection

# The newest batch, and the first event it has not seen.  The sequence tells how
# many ids were given out; some of those above `high` may be rolled back.
CURSOR = """
SELECT b.batch, b.high, b.at, clock_timestamp() AS seen_at, c.timeline, c.timeline_at,
       coalesce(pg_sequence_last_value(pg_get_serial_sequence('outbox', 'id')::regclass), 0)
           AS last_id,
       (SELECT extract(epoch FROM clock_timestamp() - o.created_at)::float8
          FROM outbox o WHERE o.id > b.high ORDER BY o.id LIMIT 1) AS waiting_s
  FROM batch b, cursor c ORDER BY b.batch DESC LIMIT 1
"""

# Open gaps: ids that were given out and may still appear.
GAPS = """
SELECT (SELECT count(*) FROM gap) + (
    SELECT count(*) FROM (SELECT young FROM batch ORDER BY batch DESC LIMIT 1) b, unnest(b.young))
"""

REPLICAS = """
SELECT r.id, r.name, r.version, r.started_at, r.expires_at > clock_timestamp() AS alive,
       r.id IS NOT DISTINCT FROM (SELECT writer FROM cursor) AS leads,
       (SELECT count(*) FROM ownership o WHERE o.replica_id = r.id) AS endpoints
  FROM replica r ORDER BY r.id
"""

# Every endpoint, the ones that owe most first.  The lane that waits longest
# speaks for its endpoint, by its retry state and the age of what it owes.  Only
# what is shown is looked at closely.
ENDPOINTS = f"""
WITH lanes AS MATERIALIZED (
    SELECT s.*, s.generation < e.generation AND s.last_seq > s.acked_seq AS old,
           s.attempts > 0 AND s.head_seq = s.acked_seq + 1 AS failing
      FROM ({LANE_STATE}) s JOIN endpoint e ON e.id = s.endpoint_id
     WHERE e.state <> 'removed'),
totals AS MATERIALIZED (
    SELECT endpoint_id, sum(last_seq - acked_seq)::bigint AS owed,
           count(*) FILTER (WHERE failing) AS failing_lanes,
           count(*) FILTER (WHERE old) AS old_lanes,
           coalesce(sum(last_seq - acked_seq) FILTER (WHERE old), 0)::bigint AS old_owed
      FROM lanes GROUP BY endpoint_id),
shown AS MATERIALIZED (
    SELECT e.id, e.name, e.url, e.state, e.state_at, e.state_by, e.state_why, e.lanes, t.*
      FROM endpoint e JOIN totals t ON t.endpoint_id = e.id
     ORDER BY t.owed DESC, e.name COLLATE "C" LIMIT $1),
near AS MATERIALIZED (
    SELECT l.* FROM lanes l WHERE l.endpoint_id IN (SELECT id FROM shown)),
blocks AS MATERIALIZED (
    SELECT l.endpoint_id, l.generation, l.slot, b.seq, b.at,
           count(*) OVER endpoints AS lanes, row_number() OVER (endpoints ORDER BY b.at) AS nth,
           (SELECT d.id FROM dead_letter d
             WHERE d.lane_id = b.lane_id AND d.seq <= b.seq AND d.to_seq >= b.seq
             ORDER BY d.seq DESC LIMIT 1) AS dead_id
      FROM lane_block b JOIN near l ON l.lane_id = b.lane_id
    WINDOW endpoints AS (PARTITION BY l.endpoint_id))
SELECT e.*, (SELECT sum(owed) FROM totals)::bigint AS owed_by_all, r.name AS replica,
       (SELECT count(*) FROM dead_letter d WHERE d.endpoint_id = e.id AND d.state = 'dead')
           AS dead_letters,
       h.state AS health, h.since AS health_since, h.held_until, {SUBSCRIBED} AS subscribed,
       coalesce(k.lanes, 0) AS blocked_lanes, k.generation AS block_generation,
       k.slot AS block_slot, k.seq AS block_seq, k.at AS block_at, k.dead_id,
       f.generation, f.slot, f.head_seq, f.attempts, f.spent, f.next_attempt_at,
       f.last_answer::text AS last_answer,
       CASE WHEN e.owed > 0 THEN (
           SELECT extract(epoch FROM clock_timestamp() - min(oldest.created_at))::float8
             FROM near l CROSS JOIN LATERAL (
                  SELECT o.created_at FROM delivery d JOIN outbox o ON o.id = d.outbox_id
                   WHERE d.lane_id = l.lane_id AND d.batch >= l.floor_batch
                     AND d.seq > l.acked_seq
                   ORDER BY d.batch, d.seq LIMIT 1) oldest
            WHERE l.endpoint_id = e.id AND l.last_seq > l.acked_seq) END AS oldest_s
  FROM shown e
  LEFT JOIN ownership w ON w.endpoint_id = e.id
  LEFT JOIN replica r ON r.id = w.replica_id
  LEFT JOIN endpoint_health h ON h.endpoint_id = e.id
  LEFT JOIN blocks k ON k.endpoint_id = e.id AND k.nth = 1
  LEFT JOIN LATERAL (
       SELECT * FROM near l
        WHERE l.endpoint_id = e.id AND l.failing
        ORDER BY l.attempts DESC, l.lane_id LIMIT 1) f ON true
 ORDER BY e.owed DESC, e.name COLLATE "C"
"""  # noqa: S608 (constants only)

COUNT_ENDPOINTS = "SELECT count(*) FROM endpoint WHERE state <> 'removed'"

DEAD_LETTERS = "SELECT state, count(*) AS letters FROM dead_letter GROUP BY state"

# Two sums that only rise; the logs are left alone.
COUNT_NUMBERED = "SELECT coalesce(sum(last_seq), 0)::bigint FROM lane_counter"
COUNT_EVENTS = "SELECT coalesce(sum(events), 0)::bigint FROM batch WHERE batch > $1 AND batch <= $2"


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where sequencing is."""

    batch: int
    high: int
    last_id: int
    at: datetime
    waiting_s: float | None
    """Age of the oldest event that is not sequenced yet; None: nothing waits."""
    timeline: int | None
    """The server's, when something was last sequenced; None: it does not say."""
    timeline_at: datetime | None
    """When that changed, and new lanes began; None: never."""

    @property
    def lag(self) -> int:
        """Ids given out above the highest one sequenced, if there is an event among them.

        Otherwise they were rolled back, or are not committed yet.
        """
        return 0 if self.waiting_s is None else waiting(self.high, self.last_id)


@dataclass(frozen=True, slots=True)
class Replica:
    """A registered relay."""

    id: int
    name: str
    version: str
    alive: bool
    """Its lease runs, by the database's clock."""
    leads: bool
    """It is the one that sequences."""
    endpoints: int
    started_at: datetime


@dataclass(frozen=True, slots=True)
class Head:
    """The delivery that a lane is held up by."""

    lane: str
    sequence: int
    attempts: int
    probes: int
    """How many of them only found out how its receiver is: they count for no limit."""
    next_attempt_at: datetime | None
    """By its schedule; while its endpoint is not healthy that decides, and not this."""
    last_answer: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Health:
    """How its receiver answers, as its owner knows it."""

    state: str
    since: datetime
    held_until: datetime | None
    """By the receiver's Retry-After."""


@dataclass(frozen=True, slots=True)
class Block:
    """A lane that waits for an operator."""

    lane: str
    sequence: int
    """The number that was given up."""
    since: datetime
    dead_letter: int | None


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """How an endpoint is doing."""

    name: str
    url: str
    state: str
    """Its operator's word: active, paused, disabling, disabled or removing."""
    state_at: datetime
    state_by: str | None
    state_why: str | None
    condition: str
    """In a word, what its operator said, what waits for one, or how its receiver answers."""
    health: Health | None
    lanes: int
    owed: int
    oldest_s: float | None
    """Age of the oldest event it is owed."""
    failing_lanes: int
    failing: Head | None
    """Of the failing lanes' heads, the one tried most often."""
    blocked_lanes: int
    block: Block | None
    """Of the blocked lanes, the one that waits longest."""
    old_lanes: int
    """Lanes of an older generation that still owe something; the new ones wait for them."""
    old_owed: int
    dead_letters: int
    replica: str | None
    """Who delivers to it; None: nobody does just now."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened between two looks, per second."""

    events: float
    """Sequenced."""
    deliveries: float
    """Numbered in their lanes."""
    ended: float
    """Deliveries acknowledged or given up."""


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything that `outbox status` shows, of one moment."""

    at: datetime
    """By the server's clock."""
    rates: Rates | None
    """Since an earlier look, if there was one."""
    numbered: int
    """Deliveries made ever."""
    owed: int
    cursor: Cursor
    gaps: int
    replicas: tuple[Replica, ...]
    endpoints: tuple[EndpointStatus, ...]
    endpoints_total: int
    dead_letters: dict[str, int]
    """By state."""


async def read(
    connection: Connection[Any], schema: str, *, limit: int = 100, since: Overview | None = None
) -> Overview:
    """Look at everything, in one snapshot; at most `limit` endpoints.

    Args:
        since: an earlier look, for the rates between the two.

    Raises:
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            cursor = dict(await connection.fetchrow(CURSOR))
            gaps = await connection.fetchval(GAPS)
            replicas = await connection.fetch(REPLICAS)
            endpoints = await connection.fetch(ENDPOINTS, limit)
            endpoints_total: int = await connection.fetchval(COUNT_ENDPOINTS)
            dead = await connection.fetch(DEAD_LETTERS)
            numbered: int = await connection.fetchval(COUNT_NUMBERED)
            batch = cursor["batch"] if since is None else since.cursor.batch
            events: int = await connection.fetchval(COUNT_EVENTS, batch, cursor["batch"])
    seen_at = cursor.pop("seen_at")
    overview = Overview(
        at=seen_at,
        rates=None,
        numbered=numbered,
        owed=endpoints[0]["owed_by_all"] if endpoints else 0,
        cursor=Cursor(**cursor),
        gaps=gaps,
        replicas=tuple(Replica(**dict(row)) for row in replicas),
        endpoints=tuple(_endpoint(row) for row in endpoints),
        endpoints_total=endpoints_total,
        dead_letters={row["state"]: row["letters"] for row in dead},
    )
    return overview if since is None else replace(overview, rates=rates(since, overview, events))


async def replicas(connection: Connection[Any], schema: str) -> list[Replica]:
    """The relays that are registered, and nothing else."""
    with map_errors(schema):
        return [Replica(**dict(row)) for row in await connection.fetch(REPLICAS)]


class Counted(Protocol):
    """Sums over lanes at a moment."""

    @property
    def at(self) -> datetime: ...
    @property
    def numbered(self) -> int: ...
    @property
    def owed(self) -> int: ...


def rates(before: Counted, now: Counted, events: int) -> Rates | None:
    """How fast things moved between two looks; None: no time has passed.

    Args:
        events: sequenced between the two.
    """
    seconds = (now.at - before.at).total_seconds()
    if seconds <= 0:
        return None
    numbered = now.numbered - before.numbered
    # What was numbered and is owed no more has ended.
    ended = numbered - (now.owed - before.owed)
    return Rates(*(max(n, 0) / seconds for n in (events, numbered, ended)))


def _endpoint(row: Any) -> EndpointStatus:
    failing = health = block = None
    if row["head_seq"] is not None:
        failing = Head(
            lane=lane_name(row["id"], row["generation"], row["slot"]),
            sequence=row["head_seq"],
            attempts=row["attempts"],
            probes=row["attempts"] - row["spent"],
            next_attempt_at=row["next_attempt_at"],
            last_answer=orjson.loads(row["last_answer"]) if row["last_answer"] else None,
        )
    if row["health"] is not None:
        health = Health(row["health"], row["health_since"], row["held_until"])
    if row["block_seq"] is not None:
        block = Block(
            lane=lane_name(row["id"], row["block_generation"], row["block_slot"]),
            sequence=row["block_seq"],
            since=row["block_at"],
            dead_letter=row["dead_id"],
        )
    same = {
        name: row[name]
        for name in EndpointStatus.__slots__
        if name not in ("condition", "health", "failing", "block")
    }
    word = condition(
        row["state"], row["health"],
        blocked=row["blocked_lanes"] > 0, subscribed=row["subscribed"],
    )  # fmt: skip
    return EndpointStatus(**same, condition=word, health=health, failing=failing, block=block)

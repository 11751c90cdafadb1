"""What moves, every few seconds: for whoever watches a page, and so for little.

Unlike `status`, which is exact, this goes by what owners wrote down of their lanes, which
is at most a second old, and looks closely at what is shown alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model.endpoint_status import condition
from outbox.operations.endpoints import BLOCKED, SUBSCRIBED
from outbox.operations.status import COUNT_EVENTS
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection, Record

DEAD_LETTERS_MAX = 1000
"""More are not counted here: they are read one by one."""
LANES_MAX = 64
"""Lanes of an endpoint that are shown one by one."""

# Lanes as their owners last wrote them down.
_LANES = """
SELECT l.endpoint_id, l.id AS lane_id, l.generation, l.slot, c.last_seq, p.acked_seq,
       greatest(c.last_seq - p.acked_seq, 0) AS owed, p.floor_batch,
       p.attempts > 0 AND p.head_seq = p.acked_seq + 1 AS failing
  FROM lane l
  JOIN lane_counter c ON c.lane_id = l.id
  JOIN lane_progress p ON p.lane_id = l.id
"""

# One walk through the lanes of one tenant's endpoints, or of all ($1 is NULL): the sums
# over them, which only rise or are what is there now, and beside them the $2 endpoints
# that are owed most with their lanes, each with the time of the event that it owes first.
LOOK = f"""
WITH lanes AS MATERIALIZED (
    {_LANES}
      JOIN endpoint e ON e.id = l.endpoint_id
     WHERE e.state <> 'removed' AND ($1::text IS NULL OR e.tenant = $1)),
totals AS (
    SELECT clock_timestamp() AS at,
           (SELECT max(batch) FROM batch) AS batch,
           coalesce(sum(last_seq), 0)::bigint AS numbered,
           coalesce(sum(owed), 0)::bigint AS owed_by_all,
           count(*) FILTER (WHERE failing) AS failing_lanes,
           (SELECT count(*) FROM lane_block b JOIN lanes USING (lane_id)) AS blocked_lanes,
           count(*) AS lanes_of_all
      FROM lanes),
shown AS (
    SELECT l.endpoint_id, sum(l.owed)::bigint AS owed, count(*) AS lanes
      FROM lanes l JOIN endpoint e ON e.id = l.endpoint_id
     GROUP BY l.endpoint_id, e.name
     ORDER BY owed DESC, e.name COLLATE "C" LIMIT $2),
near AS (
    SELECT e.id, e.name, e.state, h.state AS health, h.since, h.held_until, s.owed, s.lanes,
           {BLOCKED} AS held_up, {SUBSCRIBED} AS subscribed,
           n.generation, n.slot, n.owed AS lane_owed, n.failing, n.blocked, n.oldest_s
      FROM shown s
      JOIN endpoint e ON e.id = s.endpoint_id
      JOIN endpoint_health h ON h.endpoint_id = e.id
     CROSS JOIN LATERAL (
           SELECT l.generation, l.slot, l.owed, l.failing,
                  EXISTS (SELECT FROM lane_block b WHERE b.lane_id = l.lane_id) AS blocked,
                  CASE WHEN l.owed > 0 THEN (
                      SELECT extract(epoch FROM clock_timestamp() - o.created_at)::float8
                        FROM delivery d JOIN outbox o ON o.id = d.outbox_id
                       WHERE d.lane_id = l.lane_id AND d.batch >= l.floor_batch
                         AND d.seq > l.acked_seq
                       ORDER BY d.batch, d.seq LIMIT 1) END AS oldest_s
             FROM ({_LANES}) l WHERE l.endpoint_id = s.endpoint_id
            ORDER BY l.generation DESC, l.slot LIMIT {LANES_MAX}) n)
SELECT * FROM totals LEFT JOIN near ON true
 ORDER BY owed DESC, name COLLATE "C", generation DESC, slot
"""  # noqa: S608 (constants only)

# How the endpoints are: everything that goes into their condition.
STATES = """
WITH blocked AS (
    SELECT DISTINCT l.endpoint_id FROM lane_block b JOIN lane l ON l.id = b.lane_id),
subscribed AS (
    SELECT DISTINCT endpoint_id FROM subscription WHERE to_batch IS NULL)
SELECT e.state, h.state AS health, b.endpoint_id IS NOT NULL AS blocked,
       s.endpoint_id IS NOT NULL AS subscribed, count(*) AS endpoints
  FROM endpoint e
  JOIN endpoint_health h ON h.endpoint_id = e.id
  LEFT JOIN blocked b ON b.endpoint_id = e.id
  LEFT JOIN subscribed s ON s.endpoint_id = e.id
 WHERE e.state <> 'removed' AND ($1::text IS NULL OR e.tenant = $1)
 GROUP BY 1, 2, 3, 4
"""

DEAD_LETTERS = f"""
SELECT count(*) FROM (
    SELECT FROM dead_letter d
     WHERE d.state = 'dead'
       AND ($1::text IS NULL OR d.endpoint_id IN (SELECT id FROM endpoint WHERE tenant = $1))
     LIMIT {DEAD_LETTERS_MAX} + 1) found
"""  # noqa: S608 (a constant only)


@dataclass(frozen=True, slots=True)
class LaneView:
    """A lane."""

    owed: int
    failing: bool
    """Its head was tried, and is owed still."""
    blocked: bool
    """An operator has to let it go on."""


@dataclass(frozen=True, slots=True)
class EndpointView:
    """An endpoint, and its lanes."""

    name: str
    state: str
    """Its operator's word: active, paused, disabling, disabled or removing."""
    condition: str
    """In a word, what its operator said, what waits for one, or how its receiver answers."""
    health: str
    since: datetime
    """When its health became that."""
    held_until: datetime | None
    owed: int
    oldest_s: float | None
    """Age of the oldest event that one of its lanes owes first."""
    lanes_total: int
    lanes: tuple[LaneView, ...]
    """The newest of them."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over everything that is looked at."""

    at: datetime
    batch: int
    events: int
    """Sequenced since an earlier batch; of a tenant that is not known, and 0."""
    numbered: int
    """Deliveries made ever."""
    owed: int
    lanes: int
    failing_lanes: int
    blocked_lanes: int
    dead_letters: int
    """At most `DEAD_LETTERS_MAX`, and one more stands for all that are above."""
    states: dict[str, int]
    """Endpoints by their condition."""


@dataclass(frozen=True, slots=True)
class Look:
    """What there is to see."""

    totals: Totals
    endpoints: list[EndpointView]
    """Those that are owed most."""


async def look(
    connection: Connection[Any],
    schema: str,
    *,
    tenant: str | None,
    since_batch: int | None,
    limit: int,
) -> Look:
    """Everything as it is.

    Args:
        tenant: of this one's endpoints alone.
        since_batch: count events from here on; None: none of them.
        limit: show so many endpoints, at most.
    """
    with map_errors(schema):
        rows = await connection.fetch(LOOK, tenant, limit)
        states = await connection.fetch(STATES, tenant)
        dead: int = await connection.fetchval(DEAD_LETTERS, tenant)
        events = 0
        if since_batch is not None and tenant is None:
            # Up to where the next look goes on, and no further.
            events = await connection.fetchval(COUNT_EVENTS, since_batch, rows[0]["batch"])
    conditions: Counter[str] = Counter()
    for each in states:
        word = condition(
            each["state"], each["health"], blocked=each["blocked"], subscribed=each["subscribed"]
        )
        conditions[word] += each["endpoints"]
    first = rows[0]
    totals = Totals(
        at=first["at"],
        batch=first["batch"],
        events=events,
        numbered=first["numbered"],
        owed=first["owed_by_all"],
        lanes=first["lanes_of_all"],
        failing_lanes=first["failing_lanes"],
        blocked_lanes=first["blocked_lanes"],
        dead_letters=dead,
        states=dict(conditions),
    )
    return Look(totals, _endpoints([row for row in rows if row["id"] is not None]))


def _endpoints(rows: list[Record]) -> list[EndpointView]:
    """Each endpoint with its lanes; there is a row for each lane."""
    lanes: defaultdict[UUID, list[LaneView]] = defaultdict(list)
    ages: defaultdict[UUID, list[float]] = defaultdict(list)
    for row in rows:
        lanes[row["id"]].append(LaneView(row["lane_owed"], row["failing"], row["blocked"]))
        if row["oldest_s"] is not None:
            ages[row["id"]].append(row["oldest_s"])
    return [
        EndpointView(
            row["name"],
            row["state"],
            condition(
                row["state"], row["health"], blocked=row["held_up"], subscribed=row["subscribed"]
            ),
            row["health"],
            row["since"],
            row["held_until"],
            row["owed"],
            max(ages[row["id"]], default=None),
            row["lanes"],
            tuple(lanes[row["id"]]),
        )
        for row in {row["id"]: row for row in rows}.values()
    ]

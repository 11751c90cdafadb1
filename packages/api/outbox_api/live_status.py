"""Live status: inexpensive totals for a page that polls every few seconds.

`status` is exact; this module reads the lane checkpoints, which are at most a second old, details
only for the endpoints shown, and rates from the history that the leader writes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.operations import lanes
from outbox.operations.rows import from_row
from outbox.store.connection.connect import map_errors
from outbox.store.sql.type_match import SUBSCRIBERS

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection, Record

LIVE_DEAD_LETTERS_MAX = 1000
"""Counting stops here, because each dead letter is one row to read."""
LIVE_LANES_MAX = 64
"""Lanes shown per endpoint."""

# Totals of a tenant's endpoints, or of all ($1 is NULL), and the first $2 endpoints: failing ones
# before those with the most pending deliveries, with their newest lanes and the age of the first
# pending event of each.
#   counters: the lanes of each endpoint, in one pass over their counters.
READ_LIVE_STATUS = f"""
{lanes.rank_endpoints(lanes.LANE_CHECKPOINT, "$1", "$2")},
counters AS MATERIALIZED (
    SELECT p.endpoint_id, count(*) AS lanes_total, sum(c.last_seq) AS sequenced
      FROM lane_progress p JOIN lane_counter c ON c.lane_id = p.lane_id
      JOIN endpoint e ON e.id = p.endpoint_id
     WHERE e.state <> 'removed' AND ($1::text IS NULL OR e.tenant = $1) GROUP BY p.endpoint_id),
sums AS (
    SELECT clock_timestamp() AS at,
           (SELECT coalesce(sum(sequenced), 0)::bigint FROM counters) AS sequenced,
           coalesce(sum(pending), 0)::bigint AS pending_total,
           coalesce(sum(failing_lanes), 0)::bigint AS failing_total,
           (SELECT count(*) FROM lane_block b JOIN lane l ON l.id = b.lane_id
             WHERE l.endpoint_id IN (SELECT endpoint_id FROM totals)) AS blocked_lanes,
           (SELECT coalesce(sum(lanes_total), 0)::bigint FROM counters) AS lanes_of_all
      FROM totals),
near AS (
    SELECT e.id, e.name, e.state, h.state AS health, h.since, h.held_until,
           t.pending, k.lanes_total, t.failing_lanes, t.fails, {lanes.BLOCKED} AS blocked,
           {lanes.SUBSCRIBED} AS subscribed, n.*
      FROM shown t
      JOIN endpoint e ON e.id = t.endpoint_id
      JOIN endpoint_health h ON h.endpoint_id = e.id
      JOIN counters k ON k.endpoint_id = e.id
     CROSS JOIN LATERAL (
           SELECT l.generation, l.slot, l.last_seq - l.acked_seq AS lane_pending,
                  {lanes.FAILING} AS lane_failing,
                  EXISTS (SELECT FROM lane_block b WHERE b.lane_id = l.lane_id) AS lane_blocked,
                  CASE WHEN l.last_seq > l.acked_seq THEN {lanes.OLDEST_S} END AS lane_oldest_s
             FROM (SELECT id FROM lane WHERE endpoint_id = t.endpoint_id
                    ORDER BY generation DESC, slot LIMIT {LIVE_LANES_MAX}) newest,
                  LATERAL ({lanes.LANE_CHECKPOINT} WHERE l.id = newest.id) l) n)
SELECT * FROM sums LEFT JOIN near ON true
 ORDER BY fails DESC, pending DESC, name COLLATE "C", generation DESC, slot
"""  # noqa: S608 (constants only)

# Endpoints counted by the inputs of their condition.
COUNT_STATES = f"""
WITH blocked AS (
    SELECT DISTINCT l.endpoint_id FROM lane_block b JOIN lane l ON l.id = b.lane_id),
subscribed AS (
    SELECT DISTINCT endpoint_id FROM {SUBSCRIBERS} s),
failing AS (
    SELECT DISTINCT l.endpoint_id FROM lane_progress l JOIN endpoint e ON e.id = l.endpoint_id
     WHERE {lanes.FAILING} AND ($1::text IS NULL OR e.tenant = $1))
SELECT e.state, h.state AS health, b.endpoint_id IS NOT NULL AS blocked,
       s.endpoint_id IS NOT NULL AS subscribed, (f.endpoint_id IS NOT NULL)::int AS failing_lanes,
       count(*) AS endpoints
  FROM endpoint e
  JOIN endpoint_health h ON h.endpoint_id = e.id
  LEFT JOIN blocked b ON b.endpoint_id = e.id
  LEFT JOIN subscribed s ON s.endpoint_id = e.id
  LEFT JOIN failing f ON f.endpoint_id = e.id
 WHERE e.state <> 'removed' AND ($1::text IS NULL OR e.tenant = $1)
 GROUP BY 1, 2, 3, 4, 5
"""  # noqa: S608 (constants only)

COUNT_DEAD_LETTERS = f"""
SELECT count(*) FROM (
    SELECT FROM dead_letter d
     WHERE d.state = 'dead'
       AND ($1::text IS NULL OR d.endpoint_id IN (SELECT id FROM endpoint WHERE tenant = $1))
     LIMIT {LIVE_DEAD_LETTERS_MAX} + 1) found
"""  # noqa: S608 (a constant only)

# The samples of the last hour, in their order.
#   later_at: the earliest time of the rows that were written later.  A row that is not earlier was
#     written before the clock was set back, and another one is of the same time.
READ_SAMPLES = """
SELECT at, seconds, events / seconds AS events, deliveries / seconds AS deliveries,
       completed / seconds AS completed, pending
  FROM (SELECT *, min(at) OVER (ORDER BY n DESC ROWS BETWEEN UNBOUNDED PRECEDING
                                                         AND 1 PRECEDING) AS later_at
          FROM installation_history) h
 WHERE at BETWEEN clock_timestamp() - interval '1 hour' AND clock_timestamp()
   AND (at >= later_at) IS NOT TRUE
 ORDER BY n
"""


@dataclass(frozen=True, slots=True)
class LaneView:
    """State of a lane."""

    pending: int
    failing: bool
    """The first pending delivery has failed at least once."""
    blocked: bool
    """The lane waits for an operator's decision."""


@dataclass(frozen=True, slots=True)
class EndpointView:
    """An endpoint with its lanes."""

    name: str
    state: str
    """Operational state: active, paused, disabling, disabled or removing."""
    condition: str
    """One word from operational state, lanes and circuit breaker."""
    health: str
    since: datetime
    """When `health` last changed."""
    held_until: datetime | None
    pending: int
    oldest_s: float | None
    """Age of the oldest pending event, in seconds."""
    lanes_total: int
    failing_lanes: int
    """Lanes whose first pending delivery has failed at least once."""
    lanes: tuple[LaneView, ...]
    """The newest lanes, at most `LIVE_LANES_MAX`."""


@dataclass(frozen=True, slots=True)
class LiveTotals:
    """Totals over the selected endpoints."""

    at: datetime
    sequenced: int
    """Deliveries sequenced in all, since installation."""
    pending: int
    lanes: int
    failing_lanes: int
    blocked_lanes: int
    dead_letters: int
    """Dead letters; `LIVE_DEAD_LETTERS_MAX` + 1 means more than `LIVE_DEAD_LETTERS_MAX`."""
    states: dict[str, int]
    """Endpoints by their condition."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Rates per second of the installation, in an interval that ends at `at`."""

    at: datetime
    seconds: float | None
    """Length of the interval; None: it is not known, and neither are the rates.  So it is after a
    time in which no relay led, and when the clock was set."""
    events: float | None
    """Events sequenced."""
    deliveries: float | None
    """Deliveries created."""
    completed: float | None
    """Deliveries acknowledged or dead-lettered."""
    pending: int
    """Pending deliveries at the end of the interval."""


@dataclass(frozen=True, slots=True)
class LiveStatus:
    """Current totals, rates and lanes."""

    totals: LiveTotals
    """Totals; for a tenant token of the tenant's endpoints."""
    samples: list[Sample]
    """The last hour, in intervals of ten seconds; none for a tenant token, because they are of all
    endpoints: it has the intervals of `GET /v1/history`."""
    endpoints: list[EndpointView]
    """The endpoints that fail, and then those with the most pending deliveries."""


async def read_live_status(
    connection: Connection[Any],
    schema: str,
    *,
    tenant: str | None,
    limit: int,
) -> LiveStatus:
    """Read the live status.

    Args:
        tenant: only the endpoints of this tenant; None: all.
        limit: maximum number of endpoints.
    """
    with map_errors(schema):
        rows = await connection.fetch(READ_LIVE_STATUS, tenant, limit)
        states = await connection.fetch(COUNT_STATES, tenant)
        dead: int = await connection.fetchval(COUNT_DEAD_LETTERS, tenant)
        samples = await connection.fetch(READ_SAMPLES) if tenant is None else []
    conditions: Counter[str] = Counter()
    for each in states:
        conditions[lanes.condition_of(each)] += each["endpoints"]
    first = rows[0]
    totals = LiveTotals(
        at=first["at"],
        sequenced=first["sequenced"],
        pending=first["pending_total"],
        lanes=first["lanes_of_all"],
        failing_lanes=first["failing_total"],
        blocked_lanes=first["blocked_lanes"],
        dead_letters=dead,
        states=dict(conditions),
    )
    return LiveStatus(
        totals,
        [Sample(**row) for row in samples],
        _endpoints([row for row in rows if row["id"] is not None]),
    )


def _endpoints(rows: list[Record]) -> list[EndpointView]:
    """Group rows, one per lane, by endpoint."""
    found: defaultdict[UUID, list[Record]] = defaultdict(list)
    for row in rows:
        found[row["id"]].append(row)
    return [
        from_row(
            EndpointView,
            each[0],
            condition=lanes.condition_of(each[0]),
            oldest_s=max(
                (s for row in each if (s := row["lane_oldest_s"]) is not None), default=None
            ),
            lanes=tuple(
                LaneView(row["lane_pending"], row["lane_failing"], row["lane_blocked"])
                for row in each
            ),
        )
        for each in found.values()
    ]

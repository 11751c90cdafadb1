"""Live status: inexpensive totals for a page that polls every few seconds.

`status` is exact; this module reads the lane checkpoints, which are at most a second old, and
reads details only for the endpoints shown.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model.endpoint_condition import endpoint_condition
from outbox.operations.endpoints import BLOCKED, SUBSCRIBED
from outbox.operations.status import COUNT_EVENTS
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection, Record

DEAD_LETTERS_MAX = 1000
"""Counting stops here, because each dead letter is one row to read."""
LANES_MAX = 64
"""Lanes shown per endpoint."""

# Lanes with the checkpoints that their owners last wrote.
_LANES = """
SELECT l.endpoint_id, l.id AS lane_id, l.generation, l.slot, c.last_seq, p.acked_seq,
       greatest(c.last_seq - p.acked_seq, 0) AS pending, p.floor_batch,
       p.attempts > 0 AND p.retry_seq = p.acked_seq + 1 AS failing
  FROM lane l
  JOIN lane_counter c ON c.lane_id = l.id
  JOIN lane_progress p ON p.lane_id = l.id
"""

# One scan of the lanes of a tenant's endpoints, or of all ($1 is NULL): totals, and the $2
# endpoints with the most pending deliveries, with their lanes and the age of the first pending
# event of each lane.
READ_LIVE_STATUS = f"""
WITH lanes AS MATERIALIZED (
    {_LANES}
      JOIN endpoint e ON e.id = l.endpoint_id
     WHERE e.state <> 'removed' AND ($1::text IS NULL OR e.tenant = $1)),
totals AS (
    SELECT clock_timestamp() AS at,
           (SELECT max(batch) FROM batch) AS batch,
           coalesce(sum(last_seq), 0)::bigint AS sequenced,
           coalesce(sum(pending), 0)::bigint AS pending_total,
           count(*) FILTER (WHERE failing) AS failing_lanes,
           (SELECT count(*) FROM lane_block b JOIN lanes USING (lane_id)) AS blocked_lanes,
           count(*) AS lanes_of_all
      FROM lanes),
shown AS (
    SELECT l.endpoint_id, sum(l.pending)::bigint AS pending, count(*) AS lanes
      FROM lanes l JOIN endpoint e ON e.id = l.endpoint_id
     GROUP BY l.endpoint_id, e.name
     ORDER BY pending DESC, e.name COLLATE "C" LIMIT $2),
near AS (
    SELECT e.id, e.name, e.state, h.state AS health, h.since, h.held_until, s.pending, s.lanes,
           {BLOCKED} AS has_blocked_lane, {SUBSCRIBED} AS subscribed,
           n.generation, n.slot, n.pending AS lane_pending, n.failing, n.blocked, n.oldest_s
      FROM shown s
      JOIN endpoint e ON e.id = s.endpoint_id
      JOIN endpoint_health h ON h.endpoint_id = e.id
     CROSS JOIN LATERAL (
           SELECT l.generation, l.slot, l.pending, l.failing,
                  EXISTS (SELECT FROM lane_block b WHERE b.lane_id = l.lane_id) AS blocked,
                  CASE WHEN l.pending > 0 THEN (
                      SELECT extract(epoch FROM clock_timestamp() - o.created_at)::float8
                        FROM delivery d JOIN outbox o ON o.id = d.outbox_id
                       WHERE d.lane_id = l.lane_id AND d.batch >= l.floor_batch
                         AND d.seq > l.acked_seq
                       ORDER BY d.batch, d.seq LIMIT 1) END AS oldest_s
             FROM ({_LANES}) l WHERE l.endpoint_id = s.endpoint_id
            ORDER BY l.generation DESC, l.slot LIMIT {LANES_MAX}) n)
SELECT * FROM totals LEFT JOIN near ON true
 ORDER BY pending DESC, name COLLATE "C", generation DESC, slot
"""  # noqa: S608 (constants only)

# Endpoints counted by the inputs of their condition.
COUNT_STATES = """
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

COUNT_DEAD_LETTERS = f"""
SELECT count(*) FROM (
    SELECT FROM dead_letter d
     WHERE d.state = 'dead'
       AND ($1::text IS NULL OR d.endpoint_id IN (SELECT id FROM endpoint WHERE tenant = $1))
     LIMIT {DEAD_LETTERS_MAX} + 1) found
"""  # noqa: S608 (a constant only)


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
    """One word from operational state, blocked lanes and circuit breaker."""
    health: str
    since: datetime
    """When `health` last changed."""
    held_until: datetime | None
    pending: int
    oldest_s: float | None
    """Age of the oldest pending event, in seconds."""
    lanes_total: int
    lanes: tuple[LaneView, ...]
    """The newest lanes, at most `LANES_MAX`."""


@dataclass(frozen=True, slots=True)
class LiveTotals:
    """Totals over the selected endpoints."""

    at: datetime
    batch: int | None
    """None: not shown to a tenant's token."""
    events: int
    """Events sequenced since an earlier batch; always 0 for a tenant, where it is not known."""
    sequenced: int
    """Deliveries sequenced in all, since installation."""
    pending: int
    lanes: int
    failing_lanes: int
    blocked_lanes: int
    dead_letters: int
    """Dead letters; `DEAD_LETTERS_MAX` + 1 means more than `DEAD_LETTERS_MAX`."""
    states: dict[str, int]
    """Endpoints by their condition."""


@dataclass(frozen=True, slots=True)
class LiveStatus:
    """A sample of the live status."""

    totals: LiveTotals
    endpoints: list[EndpointView]
    """The endpoints with the most pending deliveries."""


async def read_live_status(
    connection: Connection[Any],
    schema: str,
    *,
    tenant: str | None,
    since_batch: int | None,
    limit: int,
) -> LiveStatus:
    """Read a sample of the live status.

    Args:
        tenant: only the endpoints of this tenant; None: all.
        since_batch: count the events sequenced after this batch; None: do not count.
        limit: maximum number of endpoints.
    """
    with map_errors(schema):
        rows = await connection.fetch(READ_LIVE_STATUS, tenant, limit)
        states = await connection.fetch(COUNT_STATES, tenant)
        dead: int = await connection.fetchval(COUNT_DEAD_LETTERS, tenant)
        events = 0
        if since_batch is not None and tenant is None:
            # Up to the batch that the next sample starts from.
            events = await connection.fetchval(COUNT_EVENTS, since_batch, rows[0]["batch"])
    conditions: Counter[str] = Counter()
    for each in states:
        condition = endpoint_condition(
            each["state"], each["health"], blocked=each["blocked"], subscribed=each["subscribed"]
        )
        conditions[condition] += each["endpoints"]
    first = rows[0]
    totals = LiveTotals(
        at=first["at"],
        batch=first["batch"],
        events=events,
        sequenced=first["sequenced"],
        pending=first["pending_total"],
        lanes=first["lanes_of_all"],
        failing_lanes=first["failing_lanes"],
        blocked_lanes=first["blocked_lanes"],
        dead_letters=dead,
        states=dict(conditions),
    )
    return LiveStatus(totals, _endpoints([row for row in rows if row["id"] is not None]))


def _endpoints(rows: list[Record]) -> list[EndpointView]:
    """Group rows, one per lane, by endpoint."""
    lanes: defaultdict[UUID, list[LaneView]] = defaultdict(list)
    ages: defaultdict[UUID, list[float]] = defaultdict(list)
    for row in rows:
        lanes[row["id"]].append(LaneView(row["lane_pending"], row["failing"], row["blocked"]))
        if row["oldest_s"] is not None:
            ages[row["id"]].append(row["oldest_s"])
    return [
        EndpointView(
            row["name"],
            row["state"],
            endpoint_condition(
                row["state"],
                row["health"],
                blocked=row["has_blocked_lane"],
                subscribed=row["subscribed"],
            ),
            row["health"],
            row["since"],
            row["held_until"],
            row["pending"],
            max(ages[row["id"]], default=None),
            row["lanes"],
            tuple(lanes[row["id"]]),
        )
        for row in {row["id"]: row for row in rows}.values()
    ]

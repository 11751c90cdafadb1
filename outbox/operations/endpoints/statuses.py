"""The status of endpoints: pending, failing and blocked deliveries, and their owners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model.ids import lane_name
from outbox.operations import lanes
from outbox.operations.events.future import HeldEvents, read_held
from outbox.operations.pages import convert, page_of, shorten_responses
from outbox.operations.rows import from_row
from outbox.store.connection.connect import map_errors
from outbox.store.routing_change import READ_NOW

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

# Endpoints of a tenant ($2; NULL: all), those that fail first, then those with the most pending
# deliveries.  Retry state and age are of the lane that has been failing or pending longest.
# Details are read only for the endpoints shown.
READ_STATUSES = f"""
{lanes.rank_endpoints(lanes.LANE_STATE, "$2", "$1")},
near AS MATERIALIZED (
    SELECT l.* FROM lanes l WHERE l.endpoint_id IN (SELECT endpoint_id FROM shown)),
blocks AS MATERIALIZED (
    SELECT l.endpoint_id, l.generation, l.slot, b.seq, b.at, {lanes.BLOCKED_BY} AS dead_id,
           count(*) OVER endpoints AS lanes, row_number() OVER (endpoints ORDER BY b.at) AS nth
      FROM lane_block b JOIN lane l ON l.id = b.lane_id
     WHERE l.endpoint_id IN (SELECT endpoint_id FROM shown)
    WINDOW endpoints AS (PARTITION BY l.endpoint_id)),
worst AS MATERIALIZED (
    SELECT DISTINCT ON (endpoint_id) * FROM near WHERE failing
     ORDER BY endpoint_id, attempts DESC, lane_id),
earliest AS MATERIALIZED (
    SELECT endpoint_id, {lanes.FIRST_ATTEMPT_AT} AS first_attempt_at
      FROM (SELECT DISTINCT ON (endpoint_id) * FROM near WHERE failing
             ORDER BY endpoint_id, first_attempt_at, lane_id) l),
oldest AS MATERIALIZED (
    SELECT l.endpoint_id, max({lanes.OLDEST_S}) AS oldest_s FROM near l
     WHERE l.last_seq > l.acked_seq GROUP BY l.endpoint_id)
SELECT t.*, e.id, e.name, e.url, e.state, e.state_at, e.state_by, e.state_comment, e.lanes,
       e.probes, (SELECT sum(pending) FROM totals)::bigint AS pending_total,
       (SELECT count(*) FROM totals) AS endpoints_total, r.name AS replica,
       {lanes.DEAD_LETTERS} AS dead_letters,
       h.state AS health, h.since AS health_since, h.held_until,
       {lanes.failing_since("g.first_attempt_at")} AS failing_since,
       {lanes.SUBSCRIBED} AS subscribed, k.lanes IS NOT NULL AS blocked,
       coalesce(k.lanes, 0) AS blocked_lanes, k.generation AS block_generation,
       k.slot AS block_slot, k.seq AS block_seq, k.at AS block_at, k.dead_id,
       f.generation, f.slot, f.retry_seq, f.attempts, f.spent, f.next_attempt_at, n.event_id,
       s.skip_seq,
       {shorten_responses("p.last_response", f"t.{lanes.RANK}")} AS last_response, o.oldest_s
  FROM shown t
  JOIN endpoint e ON e.id = t.endpoint_id
  LEFT JOIN ownership w ON w.endpoint_id = e.id
  LEFT JOIN replica r ON r.id = w.replica_id
  LEFT JOIN endpoint_health h ON h.endpoint_id = e.id
  LEFT JOIN blocks k ON k.endpoint_id = e.id AND k.nth = 1
  LEFT JOIN worst f ON f.endpoint_id = e.id
  LEFT JOIN earliest g ON g.endpoint_id = e.id
  LEFT JOIN oldest o ON o.endpoint_id = e.id
  LEFT JOIN lane_progress p ON p.lane_id = f.lane_id
  LEFT JOIN lane s ON s.id = f.lane_id
  LEFT JOIN LATERAL (
       SELECT o.event_id
         FROM (SELECT d.outbox_id FROM delivery d
                WHERE d.lane_id = f.lane_id AND d.batch >= f.floor_batch AND d.seq > f.acked_seq
                ORDER BY d.batch, d.seq LIMIT 1) head
         JOIN outbox o ON o.id = head.outbox_id) n ON true
 ORDER BY t.{lanes.RANK}
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class FailingDelivery:
    """The first pending delivery of a failing lane."""

    lane: str
    sequence: int
    event: UUID | None
    """The event; None: it was erased, or it is a copy of a dead letter."""
    attempts: int
    """Requests that were made for it, probes included."""
    probes: int
    """Attempts that only probed the receiver; they do not count against the retry limit."""
    next_attempt_at: datetime | None
    """The time of the next attempt by the retry policy; while the circuit breaker is open, its
    probes decide instead."""
    last_response: dict[str, Any] | None
    skip_requested: bool
    """An operator has skipped it, and no relay has applied that yet."""


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """State of an endpoint's circuit breaker, as its owner stored it."""

    state: str
    since: datetime
    """When the circuit breaker entered this state."""
    held_until: datetime | None
    """Hold-off from the receiver's Retry-After."""


@dataclass(frozen=True, slots=True)
class LaneBlock:
    """A blocked lane, which waits for an operator's decision."""

    lane: str
    sequence: int
    """Sequence number of the dead letter that blocks the lane."""
    since: datetime
    dead_letter: int | None


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """Status of an endpoint."""

    name: str
    url: str
    state: str
    """Operational state: active, paused, disabling, disabled or removing."""
    state_at: datetime
    state_by: str | None
    state_comment: str | None
    condition: str
    """One word from operational state, lanes and circuit breaker."""
    health: HealthStatus | None
    probes: bool
    """Whether its deliveries are probed while it fails."""
    lanes: int
    pending: int
    oldest_s: float | None
    """Age of the oldest pending event, in seconds; None: none is pending."""
    failing_lanes: int
    failing_since: datetime | None
    """The first attempt of the failing delivery whose retries began first, or when the circuit
    breaker opened, if that was earlier; None: nothing fails."""
    failing: FailingDelivery | None
    """The failing delivery with the most attempts."""
    blocked_lanes: int
    block: LaneBlock | None
    """The lane that has been blocked longest."""
    old_lanes: int
    """Lanes of older generations with pending deliveries; newer lanes wait for them."""
    old_pending: int
    dead_letters: int
    replica: str | None
    """The relay that owns the endpoint; None: no relay owns it."""


@dataclass(frozen=True, slots=True)
class EndpointStatuses:
    """The status of endpoints, without that of the relays."""

    at: datetime
    """The time by the server's clock."""
    held: HeldEvents
    """What is held for the share of the tenant; for other tokens, of all tenants."""
    endpoints_total: int
    endpoints: tuple[EndpointStatus, ...]
    """Those that fail first, then those with the most pending deliveries."""


async def read_endpoint_statuses(
    connection: Connection[Any], schema: str, *, tenant: str | None = None, limit: int = 100
) -> EndpointStatuses:
    """Read the status of at most `limit` endpoints, or those of a page.

    Args:
        tenant: only endpoints of this tenant alone; None: all.
    """
    with map_errors(schema):
        at: datetime = await connection.fetchval(READ_NOW)
        rows = await connection.fetch(READ_STATUSES, limit, tenant)
    held = await read_held(connection, schema, tenant=tenant)
    total = rows[0]["endpoints_total"] if rows else 0
    return EndpointStatuses(at, held, total, await endpoint_statuses(rows))


async def endpoint_statuses(rows: Sequence[Any]) -> tuple[EndpointStatus, ...]:
    """The status of endpoints, from rows of `READ_STATUSES`."""
    return tuple(await convert(page_of(rows, len(rows)), _endpoint))


def _endpoint(row: Any) -> EndpointStatus:
    failing = health = block = None
    if row["retry_seq"] is not None:
        failing = FailingDelivery(
            lane_name(row["id"], row["generation"], row["slot"]),
            row["retry_seq"],
            row["event_id"],
            **lanes.retry_state(row, failing=True),
            skip_requested=row["skip_seq"] == row["retry_seq"],
        )
    if row["health"] is not None:
        health = HealthStatus(row["health"], row["health_since"], row["held_until"])
    if row["block_seq"] is not None:
        block = LaneBlock(
            lane=lane_name(row["id"], row["block_generation"], row["block_slot"]),
            sequence=row["block_seq"],
            since=row["block_at"],
            dead_letter=row["dead_id"],
        )
    return from_row(
        EndpointStatus,
        row,
        condition=lanes.condition_of(row),
        health=health,
        failing=failing,
        block=block,
    )

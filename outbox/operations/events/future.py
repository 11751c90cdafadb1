"""Future events: published, and not in the outbox yet.

They are delayed, by their `deliver_at`; or held for their tenant's share, by the API (see
`schema/0022_shares.sql`).  What is ahead of a held event is the difference of two sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.tenant_pace import PER_S
from outbox.errors import NotFound
from outbox.operations.rows import from_row
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

COUNT_MAX = 10_000
"""Counted up to this limit: there may be a million."""

# The oldest held event of the tenant with the share `s`.  Tenant and id are compared as a row: it
# is one entry of the index also while there are no statistics of a table that has grown.
OLDEST_HELD = """
SELECT id, held_before, created_at FROM (
    SELECT id, tenant, held_before, created_at FROM future_event
     WHERE held_before IS NOT NULL AND (tenant COLLATE "C", id) >= (s.tenant, s.first_id)
     ORDER BY tenant COLLATE "C", id LIMIT 1) next_held
 WHERE next_held.tenant = s.tenant
"""

COLUMNS = f"""
       f.id AS future_id, f.event_id AS id, f.type, f.tenant, f.key, f.created_at AS accepted_at,
       f.expires_at, f.held_before IS NOT NULL AS held,
       CASE WHEN f.held_before IS NULL THEN f.deliver_at END AS deliver_at,
       f.held_before - coalesce(oldest.held_before, f.held_before) AS deliveries_ahead,
       CASE WHEN f.held_before IS NULL THEN f.deliver_at
            ELSE clock_timestamp() + make_interval(
                secs => (f.held_before - coalesce(oldest.held_before, f.held_before)) / {PER_S}) END
           AS expected_at
"""
"""Columns of the future event `f`, if `oldest` is the oldest held event of its tenant."""

FIND_FUTURE = f"""
SELECT {COLUMNS}
  FROM future_event f
  LEFT JOIN tenant_share s ON s.tenant = f.tenant COLLATE "C" AND f.held_before IS NOT NULL
  LEFT JOIN LATERAL ({OLDEST_HELD}) oldest ON true
 WHERE f.event_id = $1 AND ($2::text IS NULL OR f.tenant = $2)
"""  # noqa: S608 (constants only)

# What is held of a tenant ($1; NULL: of all).  The order is that of an index.
READ_HELD = f"""
SELECT count(*) AS tenants, coalesce(sum(s.total - oldest.held_before), 0)::bigint AS deliveries,
       min(oldest.created_at) AS oldest_at, clock_timestamp() AS now,
       (SELECT count(*) FROM (
               SELECT FROM future_event
                WHERE held_before IS NOT NULL AND ($1::text IS NULL OR tenant COLLATE "C" = $1)
                ORDER BY tenant COLLATE "C", id LIMIT {COUNT_MAX} + 1) counted) AS events
  FROM tenant_share s CROSS JOIN LATERAL ({OLDEST_HELD}) oldest
 WHERE $1::text IS NULL OR s.tenant = $1
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class FutureEvent:
    """An event that is accepted, and not published in the outbox yet."""

    future_id: int
    """Increases in the order of acceptance."""
    id: UUID
    type: str
    tenant: str | None
    key: str | None
    accepted_at: datetime
    expires_at: datetime | None
    held: bool
    """Held for its tenant's share of deliveries; otherwise delayed by its `deliver_at`."""
    deliver_at: datetime | None
    """The time before which it is not published; null for a held event."""
    deliveries_ahead: int | None
    """Held deliveries of the tenant that are published before it; null: it is not held."""
    expected_at: datetime
    """About when it is published: its `deliver_at`, or the end of what is ahead of it at the rate
    of a tenant."""


@dataclass(frozen=True, slots=True)
class HeldEvents:
    """What is held for the shares of tenants."""

    events: int
    """Their number; 10,001 means more than 10,000."""
    deliveries: int
    tenants: int
    oldest_at: datetime | None
    """When the first of them was accepted; null: nothing is held."""
    now: datetime


class NotPublishedYet(NotFound):
    """The event that was looked for is a future event.

    Args:
        by: what it was found by.
    """

    def __init__(self, event: FutureEvent, by: str) -> None:
        self.event = event
        self.by = by
        super().__init__(f"event {event.id} {describe(event)}; it has no deliveries yet")


def describe(event: FutureEvent) -> str:
    """The end of a sentence that begins with the event."""
    if event.deliver_at is not None:
        return f"is scheduled for {event.deliver_at.isoformat(sep=' ')}"
    ahead = event.deliveries_ahead or 0
    return (
        f"is held for the share of the tenant {event.tenant} since "
        f"{event.accepted_at.isoformat(sep=' ', timespec='seconds')}: {ahead} deliveries of the "
        f"tenant are before it, at most {PER_S:.0f} a second"
    )


async def find_future_event(
    connection: Connection[Any], event_id: UUID, tenant: str | None
) -> FutureEvent | None:
    """Find a future event by its id, also in the caller's transaction.

    Args:
        tenant: only an event of this tenant; None: of all.
    """
    row = await connection.fetchrow(FIND_FUTURE, event_id, tenant)
    return None if row is None else from_row(FutureEvent, row)


async def read_held(
    connection: Connection[Any], schema: str, *, tenant: str | None = None
) -> HeldEvents:
    """Read how much is held, also in the caller's transaction.

    Args:
        tenant: only what is held of this tenant; None: of all.
    """
    with map_errors(schema):
        return from_row(HeldEvents, await connection.fetchrow(READ_HELD, tenant))

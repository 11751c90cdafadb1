"""Event search, newest first, in pages.

Types, tenants and times have no index, because each would slow down every producer.  Keys have
a bloom-filter index.  Other searches scan a limited number of events, from the newest down, and
return how far they scanned, so a client can continue from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model import pattern
from outbox.operations.dead_letter_filter import require_time_order
from outbox.operations.find_event import PLAN_BY_ID
from outbox.store.connection.connect import map_errors
from outbox.store.erasure import PLAN_BY_INDEX
from outbox.store.type_match import TYPE_MATCHES

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

ID_MAX = 2**63 - 1
SCANNED_MAX = 20_000
"""Maximum of events that one search scans."""

_MATCHES = f"""
       (s.types IS NULL OR {TYPE_MATCHES})
   AND (s.tenant IS NULL OR o.tenant = s.tenant)
   AND (s.since IS NULL OR o.created_at >= s.since)
   AND (s.until IS NULL OR o.created_at < s.until)
"""
_GIVEN = """
SELECT $3::text[] AS types, $4::text AS tenant, $5::timestamptz AS since,
       $6::timestamptz AS until
"""

# OFFSET 0: use the index of keys, not a walk from the newest id down.
FIND_BY_KEY = f"""
SELECT o.id, o.event_id, o.type, o.tenant, o.key, o.created_at, o.expires_at, o.erased_at
  FROM (SELECT * FROM outbox WHERE key = $7 OFFSET 0) o, ({_GIVEN}) s
 WHERE o.id < $1 AND {_MATCHES}
 ORDER BY o.id DESC LIMIT $2
"""  # noqa: S608 (constants only)

# Ids that a batch passed before `since` are older, so the scan ends there.  `scanned` has the
# number of scanned events and the lowest id: it tells the end of the events from the limit.
FIND = f"""
WITH scanned AS MATERIALIZED (
    SELECT id, type, tenant, created_at FROM outbox
     WHERE id < $1
       AND id > coalesce((SELECT high FROM batch WHERE at < $5::timestamptz
                           ORDER BY at DESC LIMIT 1), 0)
     ORDER BY id DESC LIMIT $7),
found AS MATERIALIZED (
    SELECT o.id FROM scanned o, ({_GIVEN}) s WHERE {_MATCHES} ORDER BY o.id DESC LIMIT $2)
SELECT l.events, l.lowest, l.oldest_at, o.id, o.event_id, o.type, o.tenant, o.key, o.created_at,
       o.expires_at, o.erased_at
  FROM (SELECT count(*) AS events, min(id) AS lowest, min(created_at) AS oldest_at FROM scanned) l
  LEFT JOIN (found f JOIN outbox o ON o.id = f.id) ON true
 ORDER BY o.id DESC
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Conditions of an event search, combined with AND.

    Raises:
        UsageError: a type is not a valid pattern, or until <= since.
    """

    key: str | None = None
    types: tuple[str, ...] = ()
    """Type patterns, combined with OR."""
    tenant: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    """Published at or after `since`, and before `until`."""

    def __post_init__(self) -> None:
        for text in self.types:
            pattern.parse(text)
        require_time_order(self.since, self.until)


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event in a listing, without its payload; see its trace."""

    outbox_id: int
    id: UUID
    type: str
    tenant: str | None
    key: str | None
    published_at: datetime
    expires_at: datetime | None
    erased_at: datetime | None


@dataclass(frozen=True, slots=True)
class EventPage:
    """A page of events, and the extent of the search."""

    events: list[EventRow]
    next: int | None
    """Continue below this id; None: the search is complete."""
    scanned: int | None
    """Number of scanned events; None: the search used the index of keys."""
    scanned_back_to: datetime | None
    """Publish time of the oldest scanned event."""


async def find_events(
    connection: Connection[Any],
    schema: str,
    criteria: EventFilter,
    *,
    limit: int = 100,
    below: int = ID_MAX,
    scanned_max: int = SCANNED_MAX,
) -> EventPage:
    """Search for events, newest first, with ids below `below`.

    A page can have fewer than `limit` events, or none, although the search continues.
    """
    conditions = (list(criteria.types) or None, criteria.tenant, criteria.since, criteria.until)
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            if criteria.key is not None:
                await connection.execute(PLAN_BY_INDEX)
                rows = await connection.fetch(
                    FIND_BY_KEY, below, limit + 1, *conditions, criteria.key
                )
                events = [_event(row) for row in rows[:limit]]
                after = events[-1].outbox_id if len(rows) > limit else None
                return EventPage(events, after, None, None)
            await connection.execute(PLAN_BY_ID)
            rows = await connection.fetch(FIND, below, limit + 1, *conditions, scanned_max)
    events = [_event(row) for row in rows[:limit] if row["id"] is not None]
    extent = rows[0]
    if len(rows) > limit:
        return EventPage(events, events[-1].outbox_id, extent["events"], extent["oldest_at"])
    after = extent["lowest"] if extent["events"] == scanned_max else None
    return EventPage(events, after, extent["events"], extent["oldest_at"])


def _event(row: Any) -> EventRow:
    return EventRow(
        outbox_id=row["id"],
        id=row["event_id"],
        type=row["type"],
        tenant=row["tenant"],
        key=row["key"],
        published_at=row["created_at"],
        expires_at=row["expires_at"],
        erased_at=row["erased_at"],
    )

"""Events as a person looks for them: the newest first, and never all of them at once.

There is no index of types, tenants or times: each would cost every producer.  A key has
one (of bloom filters); anything else is looked for among so many events from the newest
down, and how far that was is told, so that whoever asks can go on from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model import pattern
from outbox.operations.dead_letter_filter import require_order
from outbox.operations.find_event import PLAN_BY_ID
from outbox.store.connection.connect import map_errors
from outbox.store.erasure import PLAN_BY_INDEX
from outbox.store.type_match import TYPE_MATCHES

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

ID_MAX = 2**63 - 1
LOOKED_AT_MAX = 20_000
"""Events that one question looks at."""

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

# OFFSET 0: the newest are not looked for from the newest id down.
FIND_BY_KEY = f"""
SELECT o.id, o.event_id, o.type, o.tenant, o.key, o.created_at, o.expires_at, o.erased_at
  FROM (SELECT * FROM outbox WHERE key = $7 OFFSET 0) o, ({_GIVEN}) s
 WHERE o.id < $1 AND {_MATCHES}
 ORDER BY o.id DESC LIMIT $2
"""  # noqa: S608 (constants only)

# What a batch had passed before `since` was there before it, so nothing below is wanted.
# `looked` counts how many were looked at, and how far down they go: whether the events
# ended there, or only the question.
FIND = f"""
WITH looked AS MATERIALIZED (
    SELECT id, type, tenant, created_at FROM outbox
     WHERE id < $1
       AND id > coalesce((SELECT high FROM batch WHERE at < $5::timestamptz
                           ORDER BY at DESC LIMIT 1), 0)
     ORDER BY id DESC LIMIT $7),
found AS MATERIALIZED (
    SELECT o.id FROM looked o, ({_GIVEN}) s WHERE {_MATCHES} ORDER BY o.id DESC LIMIT $2)
SELECT l.events, l.lowest, l.oldest_at, o.id, o.event_id, o.type, o.tenant, o.key, o.created_at,
       o.expires_at, o.erased_at
  FROM (SELECT count(*) AS events, min(id) AS lowest, min(created_at) AS oldest_at FROM looked) l
  LEFT JOIN (found f JOIN outbox o ON o.id = f.id) ON true
 ORDER BY o.id DESC
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events are looked for: those of which all of this is true.

    Raises:
        UsageError: a type is no pattern, or it ends before it begins.
    """

    key: str | None = None
    types: tuple[str, ...] = ()
    """Patterns, any of which the type matches."""
    tenant: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    """Published at or after `since`, and before `until`."""

    def __post_init__(self) -> None:
        for text in self.types:
            pattern.parse(text)
        require_order(self.since, self.until)


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event as listings show it; its trace has its payload."""

    outbox_id: int
    id: UUID
    type: str
    tenant: str | None
    key: str | None
    published_at: datetime
    expires_at: datetime | None
    erased_at: datetime | None


@dataclass(frozen=True, slots=True)
class Found:
    """What was found, and how far was looked for it."""

    events: list[EventRow]
    next: int | None
    """Go on below this id; None: there is nothing more."""
    looked_at: int | None
    """So many events; None: they were found by their key."""
    looked_back_to: datetime | None
    """The oldest of those was published then."""


async def find(
    connection: Connection[Any],
    schema: str,
    wanted: Wanted,
    *,
    limit: int = 100,
    below: int = ID_MAX,
    looked_at_max: int = LOOKED_AT_MAX,
) -> Found:
    """Look for events, from the newest with an id below `below`.

    A page can have fewer than `limit` events, or none, and go on nevertheless.
    """
    given = (list(wanted.types) or None, wanted.tenant, wanted.since, wanted.until)
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            if wanted.key is not None:
                await connection.execute(PLAN_BY_INDEX)
                rows = await connection.fetch(FIND_BY_KEY, below, limit + 1, *given, wanted.key)
                found = [_event(row) for row in rows[:limit]]
                after = found[-1].outbox_id if len(rows) > limit else None
                return Found(found, after, None, None)
            await connection.execute(PLAN_BY_ID)
            rows = await connection.fetch(FIND, below, limit + 1, *given, looked_at_max)
    found = [_event(row) for row in rows[:limit] if row["id"] is not None]
    looked = rows[0]
    if len(rows) > limit:
        return Found(found, found[-1].outbox_id, looked["events"], looked["oldest_at"])
    after = looked["lowest"] if looked["events"] == looked_at_max else None
    return Found(found, after, looked["events"], looked["oldest_at"])


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

"""Journal queries, newest entry first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from outbox.operations.find_event import PLAN_BY_ID
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

ID_MAX = 2**63 - 1

_COLUMNS = """
SELECT j.id, j.at, j.kind, j.actor, j.session_role, j.endpoint_id, j.data::text AS data,
       e.name AS endpoint
"""

LIST_ALL = f"""
{_COLUMNS} FROM journal j LEFT JOIN endpoint e ON e.id = j.endpoint_id
 WHERE j.id < $1 ORDER BY j.id DESC LIMIT $2
"""

# The newest entries of each endpoint by index, merged: one combined query would scan the
# entries of all other endpoints.
LIST_OF_ENDPOINTS = f"""
{_COLUMNS} FROM unnest($3::uuid[]) AS wanted(id)
  JOIN endpoint e ON e.id = wanted.id
 CROSS JOIN LATERAL (
       SELECT * FROM journal
        WHERE endpoint_id = wanted.id AND id < $1
          AND ($4 OR kind NOT IN ('endpoint_claimed', 'endpoint_released'))
        ORDER BY id DESC LIMIT $2) j
 ORDER BY j.id DESC LIMIT $2
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class JournalRow:
    """A journal entry."""

    id: int
    at: datetime
    kind: str
    actor: str
    """The actor as it names itself: a user, a token or a relay."""
    session_role: str | None
    """Database role that wrote the entry; None for a tenant's token."""
    endpoint_id: UUID | None
    endpoint: str | None
    """Current name of the endpoint."""
    data: dict[str, Any]


async def list_journal(
    connection: Connection[Any],
    schema: str,
    *,
    endpoint_ids: Sequence[UUID] | None = None,
    ownership_changes: bool = True,
    limit: int = 100,
    before: int = ID_MAX,
) -> list[JournalRow]:
    """List journal entries, newest first, at most `limit` with ids below `before`.

    Args:
        endpoint_ids: only entries of these endpoints; None: all.
        ownership_changes: include acquisitions and releases of the endpoints.
    """
    with map_errors(schema):
        async with connection.transaction(isolation="read_committed", readonly=True):
            await connection.execute(PLAN_BY_ID)
            if endpoint_ids is None:
                rows = await connection.fetch(LIST_ALL, before, limit)
            else:
                rows = await connection.fetch(
                    LIST_OF_ENDPOINTS, before, limit, endpoint_ids, ownership_changes
                )
    return [
        JournalRow(
            **{name: row[name] for name in JournalRow.__slots__ if name != "data"},
            data=orjson.loads(row["data"]),
        )
        for row in rows
    ]

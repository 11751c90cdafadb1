"""Journal queries, newest entry first."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from outbox.errors import UsageError
from outbox.operations.criteria import absolute_time, read_now
from outbox.operations.events.queries import PLAN_BY_ID
from outbox.operations.pages import convert, read_page
from outbox.operations.rows import ID_MAX, RowPage, from_row
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.criteria import When

_COLUMNS = """j.id, j.at, j.kind, j.actor, j.session_role, j.endpoint_id, j.data::text AS data,
       e.name AS endpoint"""

# The conditions of `JournalFilter`.
_MATCHES = """($3::text IS NULL OR kind = $3) AND ($4::text IS NULL OR actor = $4)
          AND ($5::timestamptz IS NULL OR at >= $5) AND ($6::timestamptz IS NULL OR at < $6)"""

LIST_ALL = f"""
SELECT {_COLUMNS} FROM journal j LEFT JOIN endpoint e ON e.id = j.endpoint_id
 WHERE j.id < $1 AND {_MATCHES} ORDER BY j.id DESC LIMIT $2
"""  # noqa: S608 (constants only)

# The newest entries of each endpoint by index, merged: one combined query would scan the
# entries of all other endpoints.
LIST_OF_ENDPOINTS = f"""
SELECT {_COLUMNS} FROM unnest($7::uuid[]) AS wanted(id)
  JOIN endpoint e ON e.id = wanted.id
 CROSS JOIN LATERAL (
       SELECT * FROM journal
        WHERE endpoint_id = wanted.id AND id < $1
          AND {_MATCHES}
          AND ($8 OR kind NOT IN ('endpoint_claimed', 'endpoint_released'))
        ORDER BY id DESC LIMIT $2) j
 ORDER BY j.id DESC LIMIT $2
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class JournalFilter:
    """Conditions on journal entries, combined with AND.

    Raises:
        UsageError: a text is empty, or until <= since.
    """

    kind: str | None = None
    """What changed, such as endpoint_paused."""
    actor: str | None = None
    """The actor as it names itself: a user, a token or a relay."""
    since: When | None = None
    until: When | None = None
    """Written at or after `since`, and before `until`."""

    def __post_init__(self) -> None:
        for name in ("kind", "actor"):
            if getattr(self, name) == "":
                raise UsageError(f"{name} is empty")
        since, until = self.since, self.until
        if isinstance(since, datetime) and isinstance(until, datetime) and until <= since:
            raise UsageError("until must be later than since")

    async def arguments(self, connection: Connection[Any]) -> tuple[object, ...]:
        """Read the arguments of `_MATCHES`, with absolute times by the database's clock."""
        since, until = self.since, self.until
        if isinstance(since, timedelta) or isinstance(until, timedelta):
            now = await read_now(connection)
            since, until = absolute_time(since, now), absolute_time(until, now)
        return self.kind, self.actor, since, until


NO_FILTER = JournalFilter()


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
    only: JournalFilter = NO_FILTER,
    limit: int = 100,
    before: int = ID_MAX,
) -> RowPage[JournalRow]:
    """List journal entries, newest first, at most `limit` with ids below `before`.

    There are fewer if they are large, as in `outbox.operations.pages`.

    Args:
        endpoint_ids: only entries of these endpoints; None: all.
        ownership_changes: include acquisitions and releases of the endpoints.
        only: further conditions.
    """
    with map_errors(schema):
        async with connection.transaction(isolation="read_committed", readonly=True):
            await connection.execute(PLAN_BY_ID)
            select = LIST_ALL
            arguments = await only.arguments(connection)
            if endpoint_ids is not None:
                select = LIST_OF_ENDPOINTS
                arguments = (*arguments, endpoint_ids, ownership_changes)
            page = await read_page(connection, select, "id", before, limit, *arguments)
    return await convert(page, lambda row: from_row(JournalRow, row, parse=("data",)))

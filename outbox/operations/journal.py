"""Journal queries, newest entry first."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from outbox.errors import UsageError
from outbox.operations.criteria import absolute_time, read_now
from outbox.operations.events.queries import PLAN_BY_ID
from outbox.operations.pages import convert, read_page
from outbox.operations.rows import ID_MAX, RowPage, from_row
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection, Record

    from outbox.operations.criteria import When

_COLUMNS = """j.id, j.at, j.kind, j.actor, j.session_role, j.endpoint_id, j.data::text AS data,
       e.name AS endpoint"""

By = Literal["people", "relays", "all"]
"""Whose entries: `relays`: what relays do by themselves; `people`: everything else."""

SCANNED_MAX = 20_000
"""Entries that a page scans for those of people or relays: relays may write a million between two
changes by people."""
SCANNED_OF_EACH_MIN = 100
"""Entries that such a page scans of each endpoint, however many endpoints there are."""
OUT_OF_ORDER = timedelta(hours=1)
"""An entry has the time at which its transaction began, and its id from later."""

# Whether a relay made an entry by itself.  The first entry of a change that was requested has the
# request's id, whatever its actor is; the role of relays cannot write that column.
_BY_RELAY = "(request IS NULL AND actor ~ '^replica [0-9]+$')"

# The conditions of `JournalFilter`.
_MATCHES = f"""($3::text IS NULL OR kind = $3) AND ($4::text IS NULL OR actor = $4)
          AND ($5::timestamptz IS NULL OR at >= $5) AND ($6::timestamptz IS NULL OR at < $6)
          AND ($7::boolean IS NULL OR $7 = {_BY_RELAY})"""

LIST_ALL = f"""
SELECT {_COLUMNS} FROM journal j LEFT JOIN endpoint e ON e.id = j.endpoint_id
 WHERE j.id < $1 AND j.id >= $8 AND {_MATCHES} ORDER BY j.id DESC LIMIT $2
"""  # noqa: S608 (constants only)

# The newest entries of each endpoint by index, merged: one combined query would scan the
# entries of all other endpoints.
LIST_OF_ENDPOINTS = f"""
SELECT {_COLUMNS} FROM unnest($9::uuid[]) AS wanted(id)
  JOIN endpoint e ON e.id = wanted.id
 CROSS JOIN LATERAL (
       SELECT * FROM journal
        WHERE endpoint_id = wanted.id AND id < $1 AND id >= $8
          AND {_MATCHES}
          AND ($10 OR kind NOT IN ('endpoint_claimed', 'endpoint_released'))
        ORDER BY id DESC LIMIT $2) j
 ORDER BY j.id DESC LIMIT $2
"""  # noqa: S608 (constants only)

# The last of $2 entries before $1, up to which a page scans; nothing, if there are fewer.
FIND_FLOOR = "SELECT id, at FROM journal WHERE id < $1 ORDER BY id DESC OFFSET $2 - 1 LIMIT 1"

# The same of some endpoints: where the first of them has that many entries.
FIND_FLOOR_OF_ENDPOINTS = """
SELECT floor.id, floor.at FROM unnest($3::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT id, at FROM journal
        WHERE endpoint_id = wanted.id AND id < $1
        ORDER BY id DESC OFFSET $2 - 1 LIMIT 1) floor
 ORDER BY floor.id DESC LIMIT 1
"""


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
    by: By = "all"
    """`people`: without what relays do by themselves; `relays`: only that."""

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
        by_relay = None if self.by == "all" else self.by == "relays"
        return self.kind, self.actor, since, until, by_relay


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

    There are fewer if they are large, as in `outbox.operations.pages`, or if `only.by` matches
    few: such a page scans at most `SCANNED_MAX`, and its cursor is the last entry it has scanned.

    Args:
        endpoint_ids: only entries of these endpoints; None: all.
        ownership_changes: include acquisitions and releases of the endpoints.
        only: further conditions.
    """
    with map_errors(schema):
        async with connection.transaction(isolation="read_committed", readonly=True):
            await connection.execute(PLAN_BY_ID)
            select = LIST_ALL
            floor = await _find_floor(connection, only, endpoint_ids, before)
            conditions = await only.arguments(connection)
            arguments = (*conditions, 0 if floor is None else floor["id"])
            if endpoint_ids is not None:
                select = LIST_OF_ENDPOINTS
                arguments = (*arguments, endpoint_ids, ownership_changes)
            page = await read_page(connection, select, "id", before, limit, *arguments)
    if floor is not None and not page.more:
        since = conditions[2]
        if not (isinstance(since, datetime) and floor["at"] < since - OUT_OF_ORDER):
            page = RowPage(page, more=True, cursor=floor["id"])
    return await convert(page, lambda row: from_row(JournalRow, row, parse=("data",)))


async def _find_floor(
    connection: Connection[Any],
    only: JournalFilter,
    endpoint_ids: Sequence[UUID] | None,
    before: int,
) -> Record | None:
    """The last entry that a page scans; None: it may scan all."""
    if only.by == "all":
        return None
    if endpoint_ids is None:
        return await connection.fetchrow(FIND_FLOOR, before, SCANNED_MAX)
    of_each = max(SCANNED_MAX // max(len(endpoint_ids), 1), SCANNED_OF_EACH_MIN)
    return await connection.fetchrow(FIND_FLOOR_OF_ENDPOINTS, before, of_each, endpoint_ids)

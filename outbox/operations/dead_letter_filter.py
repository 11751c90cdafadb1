"""Selection of dead letters: by id, by filter, or all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args

from outbox.core.model import pattern
from outbox.core.model.dead_letter_reason import DeadLetterReason
from outbox.errors import UsageError
from outbox.store.endpoints import endpoint_not_found
from outbox.store.routing_change import READ_NOW

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

REASONS: tuple[str, ...] = get_args(DeadLetterReason)

# Several endpoints may have had the name, one after the other.  Dead letters outlive their
# endpoint, so all of them match.
FIND_ENDPOINTS = "SELECT id FROM endpoint WHERE name = $1"

# All current endpoints of a tenant, or those with this name.
FIND_OWN_ENDPOINTS = """
SELECT id FROM endpoint WHERE tenant = $2 AND ($1::text IS NULL OR name = $1)
"""


def filter_parameters(first: int) -> str:
    """SQL select list for a filter `s` from five parameters: `Filter.arguments`."""
    columns = ("types text[]", "tenant text", "reason text", "since timestamptz",
               "until timestamptz")  # fmt: skip
    return ", ".join(
        f"${first + n}::{kind} AS {name}"
        for n, (name, kind) in enumerate(column.split() for column in columns)
    )


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Conditions on dead letters, combined with AND.

    Raises:
        UsageError: a type is not a valid pattern, the reason is unknown, or until <= since.
    """

    endpoint: str | None = None
    types: tuple[str, ...] = ()
    """Type patterns, combined with OR."""
    tenant: str | None = None
    reason: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    """Dead-lettered at or after `since`, and before `until`."""
    owner: str | None = None
    """Only endpoints of this tenant alone: the tenant of the caller's token."""

    def __post_init__(self) -> None:
        for text in self.types:
            pattern.parse(text)
        if self.reason is not None and self.reason not in REASONS:
            raise UsageError(
                f'"{self.reason}" is not a reason; choose one of: {", ".join(REASONS)}'
            )
        require_time_order(self.since, self.until)

    def __bool__(self) -> bool:
        return replace(self, owner=None) != DeadLetterFilter()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """For `given`."""
        types = list(self.types) or None
        return types, self.tenant, self.reason, self.since, self.until

    @property
    def criteria(self) -> dict[str, Any]:
        """The conditions that are set, for the journal."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "owner"}
        return {name: value for name, value in values.items() if value}


@dataclass(frozen=True, slots=True)
class DeadLetterSelection:
    """Dead letters by ids, by filter, or all of them, which must be requested explicitly.

    Raises:
        UsageError: no selection, or more than one kind of selection.
    """

    ids: tuple[int, ...] = ()
    filter: DeadLetterFilter = field(default_factory=DeadLetterFilter)
    everything: bool = False

    def __post_init__(self) -> None:
        if not (self.ids or self.filter or self.everything):
            raise UsageError(
                "select dead letters: by ids, all, or by endpoint, type, tenant, reason, since, "
                "until"
            )
        if bool(self.ids) + bool(self.filter) + self.everything > 1:
            raise UsageError("combine neither ids nor all with a filter")
        if len(self.ids) > IDS_MAX:
            raise UsageError(f"at most {IDS_MAX} ids; use a filter for more")


IDS_MAX = 1000


def require_time_order(since: datetime | None, until: datetime | None) -> None:
    """Require until > since.

    Raises:
        UsageError: until is not later than since.
    """
    if since is not None and until is not None and until <= since:
        raise UsageError("until must be later than since")


async def find_endpoint_ids(
    connection: Connection[Any], name: str | None, owner: str | None = None
) -> list[UUID] | None:
    """Find the ids of all endpoints that ever had this name; None without a name.

    Args:
        owner: only current endpoints of this tenant alone.

    Raises:
        NotFound: no endpoint ever had this name.
    """
    if owner is not None:
        rows = await connection.fetch(FIND_OWN_ENDPOINTS, name, owner)
    elif name is not None:
        rows = await connection.fetch(FIND_ENDPOINTS, name)
    else:
        return None
    if name is not None and not rows:
        raise await endpoint_not_found(connection, name)
    return [row["id"] for row in rows]


async def read_now(connection: Connection[Any]) -> datetime:
    """Read the database's clock, which timestamps events and dead letters."""
    at: datetime = await connection.fetchval(READ_NOW)
    return at

"""Which dead letters a command is about."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args

from outbox.core.delivery.commands import DeadLetterReason
from outbox.core.model import pattern
from outbox.errors import UsageError
from outbox.store.endpoints import endpoint_not_found
from outbox.store.routing_change import READ_NOW

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

REASONS: tuple[str, ...] = get_args(DeadLetterReason)

# A name may have been used by several endpoints, one after the other; dead
# letters outlive them, so all of them are meant.
FIND_ENDPOINTS = "SELECT id FROM endpoint WHERE name = $1"

# All that are a tenant's now, or those of them that had this name.
FIND_OWN_ENDPOINTS = """
SELECT id FROM endpoint WHERE tenant = $2 AND ($1::text IS NULL OR name = $1)
"""


def given(first: int) -> str:
    """The selection `s` from five arguments of a statement, `Filter.arguments`."""
    columns = ("types text[]", "tenant text", "reason text", "since timestamptz",
               "until timestamptz")  # fmt: skip
    return ", ".join(
        f"${first + n}::{kind} AS {name}"
        for n, (name, kind) in enumerate(column.split() for column in columns)
    )


@dataclass(frozen=True, slots=True)
class Filter:
    """Only those of which all of this is true.

    Raises:
        UsageError: something in it is no pattern or reason, or it ends before it begins.
    """

    endpoint: str | None = None
    types: tuple[str, ...] = ()
    """Patterns, any of which the type matches."""
    tenant: str | None = None
    reason: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    """Given up at or after `since`, and before `until`."""
    owner: str | None = None
    """Only of endpoints that are for this tenant alone: who asks is kept to those."""

    def __post_init__(self) -> None:
        for text in self.types:
            pattern.parse(text)
        if self.reason is not None and self.reason not in REASONS:
            raise UsageError(f'"{self.reason}" is not a reason; there are: {", ".join(REASONS)}')
        require_order(self.since, self.until)

    def __bool__(self) -> bool:
        return replace(self, owner=None) != Filter()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """For `given`."""
        types = list(self.types) or None
        return types, self.tenant, self.reason, self.since, self.until

    @property
    def told(self) -> dict[str, Any]:
        """What was said, for the journal."""
        said = {name: getattr(self, name) for name in self.__slots__ if name != "owner"}
        return {name: value for name, value in said.items() if value}


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters a command is about; sweeping needs a word for it.

    Raises:
        UsageError: nothing was selected, or two things at once.
    """

    ids: tuple[int, ...] = ()
    filter: Filter = field(default_factory=Filter)
    everything: bool = False

    def __post_init__(self) -> None:
        if not (self.ids or self.filter or self.everything):
            raise UsageError(
                "say which dead letters: some by their ids, all, or some by "
                "endpoint, type, tenant, reason, since, until"
            )
        if bool(self.ids) + bool(self.filter) + self.everything > 1:
            raise UsageError("say ids, all, or what they have in common, not several")
        if len(self.ids) > IDS_MAX:
            raise UsageError(f"at most {IDS_MAX} by number; say what they have in common")


IDS_MAX = 1000


def require_order(since: datetime | None, until: datetime | None) -> None:
    """Refuse a time that ends before it begins.

    Raises:
        UsageError: it does.
    """
    if since is not None and until is not None and until <= since:
        raise UsageError("until must be later than since")


async def endpoint_ids(
    connection: Connection[Any], name: str | None, owner: str | None = None
) -> list[UUID] | None:
    """All endpoints that ever had this name; None without one.

    Args:
        owner: of those, or of all, the ones that are for this tenant alone.

    Raises:
        NotFound: there was none of that name.
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


async def now(connection: Connection[Any]) -> datetime:
    """The database's time, which is what events and dead letters carry."""
    at: datetime = await connection.fetchval(READ_NOW)
    return at

"""Selection of events and dead letters: by criteria, by id, or all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from outbox.core.messages.envelope import datetime_rfc3339
from outbox.core.model import pattern
from outbox.core.model.dead_letter_reason import DeadLetterReason
from outbox.errors import UsageError
from outbox.store.delivery.endpoints import endpoint_not_found
from outbox.store.routing_change import READ_NOW

if TYPE_CHECKING:
    from uuid import UUID

    from asyncpg import Connection

REASONS: tuple[str, ...] = get_args(DeadLetterReason)
SELECTED_IDS_MAX = 1000

When: TypeAlias = datetime | timedelta
"""An absolute time, or an age relative to the database's clock."""

# Several endpoints may have had the name, one after the other.  Dead letters outlive their
# endpoint, so all of them match.
FIND_ENDPOINTS = "SELECT id FROM endpoint WHERE name = $1"

# All current endpoints of a tenant, or those with this name.
FIND_OWN_ENDPOINTS = """
SELECT id FROM endpoint WHERE tenant = $2 AND ($1::text IS NULL OR name = $1)
"""

_COLUMNS = {
    "types": "text[]",
    "tenant": "text",
    "reason": "text",
    "since": "timestamptz",
    "until": "timestamptz",
}


def criteria_parameters(first: int) -> str:
    """SQL select list for the criteria `s` from five parameters: `Criteria.arguments`."""
    return ", ".join(
        f"${n}::{kind} AS {name}" for n, (name, kind) in enumerate(_COLUMNS.items(), first)
    )


@dataclass(frozen=True, slots=True)
class Criteria:
    """Conditions on events or dead letters, combined with AND; false if it has none.

    An age of zero is no condition: every row is older.

    Raises:
        UsageError: a type is not a valid pattern, the reason is unknown, a name is empty, or
            until <= since.
    """

    endpoint: str | None = None
    types: tuple[str, ...] = ()
    """Type patterns, combined with OR."""
    tenant: str | None = None
    reason: str | None = None
    """The reason of dead letters."""
    since: When | None = None
    until: When | None = None
    """Published or dead-lettered at or after `since`, and before `until`."""
    owner: str | None = None
    """The tenant of the caller's token: only endpoints of this tenant alone are selected."""

    def __post_init__(self) -> None:
        for name in ("endpoint", "tenant"):
            if getattr(self, name) == "":
                # Probably an unset shell variable.
                raise UsageError(f"{name} is empty")
        for text in self.types:
            pattern.parse(text)
        if self.reason is not None and self.reason not in REASONS:
            raise UsageError(
                f'"{self.reason}" is not a reason; choose one of: {", ".join(REASONS)}'
            )
        since, until = self.since, self.until
        if isinstance(since, datetime) and isinstance(until, datetime) and until <= since:
            raise UsageError("until must be later than since")

    def __bool__(self) -> bool:
        return any((self.endpoint, self.types, self.tenant, self.reason, self.since, self.until))

    async def resolve(self, connection: Connection[Any]) -> Criteria:
        """These criteria with absolute times, by the clock that timestamps the rows."""
        if not (isinstance(self.since, timedelta) or isinstance(self.until, timedelta)):
            return self
        now = await read_now(connection)
        since, until = absolute_time(self.since, now), absolute_time(self.until, now)
        return replace(self, since=since, until=until)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `criteria_parameters`."""
        return self.types or None, self.tenant, self.reason, self.since, self.until

    @property
    def journal_data(self) -> dict[str, Any]:
        """The conditions that are set."""
        values = {name: getattr(self, name) for name in ("endpoint", *_COLUMNS)}
        return {
            name: datetime_rfc3339(value) if isinstance(value, datetime) else value
            for name, value in values.items()
            if value
        }


@dataclass(frozen=True, slots=True)
class DeadLetterSelection:
    """Dead letters by ids, by criteria, or all of them, which must be requested explicitly.

    Raises:
        UsageError: no selection, or more than one kind of selection.
    """

    ids: tuple[int, ...] = ()
    criteria: Criteria = field(default_factory=Criteria)
    everything: bool = False

    def __post_init__(self) -> None:
        if not (self.ids or self.criteria or self.everything):
            raise UsageError(
                "select dead letters: by ids, all, or by endpoint, type, tenant, reason, since, "
                "until"
            )
        if bool(self.ids) + bool(self.criteria) + self.everything > 1:
            raise UsageError("combine neither ids nor all with criteria")
        if len(self.ids) > SELECTED_IDS_MAX:
            raise UsageError(f"at most {SELECTED_IDS_MAX} ids; use criteria for more")

    async def resolve(self, connection: Connection[Any]) -> DeadLetterSelection:
        """This selection with absolute times."""
        return replace(self, criteria=await self.criteria.resolve(connection))

    @property
    def until(self) -> datetime | None:
        """The end of a selection with absolute times."""
        until = self.criteria.until
        assert not isinstance(until, timedelta)
        return until

    async def resolve_until_now(self, connection: Connection[Any]) -> DeadLetterSelection:
        """This selection with absolute times, without what is dead-lettered later.

        A selection by ids is complete already.
        """
        if self.ids:
            return self
        now = await read_now(connection)
        since, until = (
            absolute_time(each, now) for each in (self.criteria.since, self.criteria.until)
        )
        # Before a `since` in the future there is nothing to leave out.
        if (since is None or since < now) and (until is None or until > now):
            until = now
        criteria = replace(self.criteria, since=since, until=until)
        return replace(self, criteria=criteria, everything=self.everything and not criteria)


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


def absolute_time(when: When | None, now: datetime) -> datetime | None:
    """Convert an age to a time."""
    return now - when if isinstance(when, timedelta) else when

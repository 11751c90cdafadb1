"""Endpoints as the plan of a change has read them, see `outbox.store.change`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from outbox.operations.endpoints.queries import settings_of
from outbox.operations.endpoints.writes import REQUIRE_STATES
from outbox.operations.lanes import FED, SUBSCRIBED
from outbox.store.connection.secrets import CLEAR
from outbox.store.delivery.endpoints import endpoint_not_found, setting_columns

if TYPE_CHECKING:
    from collections.abc import Collection
    from uuid import UUID

    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox.store.change import Change
    from outbox.store.connection.secrets import Vault

READ_ENDPOINTS = f"""
SELECT e.id, e.state, {setting_columns()},
       {SUBSCRIBED} AS subscribed, {FED} AS fed
  FROM endpoint e WHERE e.state <> 'removed'
"""  # noqa: S608 (constants only)
FIND_ENDPOINTS = f"{READ_ENDPOINTS} AND e.name = ANY ($1)"


@dataclass(frozen=True)
class FoundEndpoint:
    """An endpoint as a plan has read it."""

    id: UUID
    name: str
    state: str
    subscribed: bool
    """Whether it has a subscription, or is fed before it has one."""
    fed: bool
    row: Any
    vault: Vault

    @classmethod
    def from_row(cls, row: Any, vault: Vault) -> FoundEndpoint:
        """Build from a row with these columns and those of `setting_columns`."""
        return cls(row["id"], row["name"], row["state"], row["subscribed"], row["fed"], row, vault)

    @cached_property
    def settings(self) -> EndpointSettings:
        """Parsed on access: an endpoint with unreadable settings can still be removed."""
        return settings_of(self.row, self.vault)


async def find_endpoint(
    change: Change, name: str, owner: str | None = None, vault: Vault = CLEAR
) -> FoundEndpoint:
    """Find an endpoint by name; see `find_endpoints`."""
    return (await find_endpoints(change, [name], owner, vault))[0]


async def find_endpoints(
    change: Change, names: Collection[str], owner: str | None = None, vault: Vault = CLEAR
) -> list[FoundEndpoint]:
    """Find endpoints by name, each once, and require that they still have their states.

    Args:
        owner: the tenant whose endpoints are found; None: all are.

    Raises:
        NotFound: no such endpoint has one of these names.
    """
    rows = {
        row["name"]: row
        for row in await change.db.fetch(FIND_ENDPOINTS, list(names))
        if owner is None or row["tenant"] == owner
    }
    for name in names:
        if name not in rows:
            raise await endpoint_not_found(change.db, name)
    endpoints = [FoundEndpoint.from_row(rows[name], vault) for name in dict.fromkeys(names)]
    require_states(change, endpoints)
    return endpoints


def require_states(change: Change, endpoints: Collection[FoundEndpoint]) -> None:
    """Require that endpoints still have their states when this is written."""
    if endpoints:
        change.write(
            REQUIRE_STATES, [each.id for each in endpoints], [each.state for each in endpoints]
        )

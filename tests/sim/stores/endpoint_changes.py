"""Changes of the settings of endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.model import endpoint_config
from outbox.errors import Conflict, NotFound
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints.changes import Updated
from outbox.store.connection.secrets import CLEAR
from tests.sim.stores import endpoint_writes
from tests.sim.stores.change import make_change
from tests.sim.stores.replay_feed import is_subscribed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox.store.connection.secrets import Vault
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database
    from tests.sim.stores.change import Change


class FoundEndpoint(endpoint_changes.FoundEndpoint):
    """An endpoint as a plan has read it; `row` is its settings."""

    __slots__ = ()

    @property
    def settings(self) -> EndpointSettings:
        settings: EndpointSettings = self.row
        return settings


async def update_endpoint(
    connection: Connection,
    schema: str,
    name: str,
    edit: Callable[[EndpointSettings], EndpointSettings],
    *,
    actor: str,
    vault: Vault = CLEAR,
    owner: str | None = None,
) -> Updated:
    async def plan(change: Change) -> Updated:
        found = await find_endpoint(change, name, owner, vault)
        old, new = found.settings, edit(found.settings)
        if (new.name, new.filter) != (old.name, None):
            raise NotImplementedError("no endpoint of the simulation has a new name or a filter")
        if found.state == "removing":
            raise Conflict(f"endpoint {name} is being removed")
        changed = endpoint_config.differences(old, new)
        if changed:
            data = {"name": name, "changed": changed}
            change.journal("endpoint_updated", found.id, data, batch_as="from_batch")
            change.write(endpoint_writes.update_endpoints, {found.id: new})
            if new.lanes != old.lanes:
                change.write(endpoint_writes.begin_generation, [found.id])
                change.write(endpoint_writes.add_lanes, [found.id])
            if found.subscribed and new.subscription != old.subscription:
                endpoint_writes.replace_subscriptions(change, [found.id])
        return Updated(found.id, name, changed, (), None)

    return await make_change(connection, schema, actor, plan)


async def find_endpoint(
    change: Change, name: str, owner: str | None = None, vault: Vault = CLEAR
) -> FoundEndpoint:
    return (await find_endpoints(change, [name], owner, vault))[0]


async def find_endpoints(
    change: Change, names: Collection[str], owner: str | None = None, vault: Vault = CLEAR
) -> list[FoundEndpoint]:
    rows = await change.db.call(read_endpoints, names, owner, vault)
    for name in names:
        if name not in rows:
            await change.db.call(read_names)
            raise NotFound(f"there is no endpoint {name}")
    found = [rows[name] for name in dict.fromkeys(names)]
    ids, states = [each.id for each in found], [each.state for each in found]
    change.write(endpoint_writes.require_states, ids, states)
    return found


# ------------------------------------------------------------------------ steps


def read_endpoints(
    db: Database, tx: Transaction, names: Collection[str], owner: str | None, vault: Vault
) -> dict[str, FoundEndpoint]:
    return {
        row["name"]: FoundEndpoint(
            row["id"],
            row["name"],
            row["state"],
            is_subscribed(db, tx, row["id"]),
            row["settings"],
            vault,
        )
        for row in tx.rows(db.endpoint)
        if row["name"] in names and row["state"] != "removed" and owner in (None, row["tenant"])
    }


def read_names(db: Database, tx: Transaction) -> None:
    """Only the text of an error depends on them."""

"""Changes of the settings of endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from outbox.core.model import endpoint_config
from outbox.core.sequencing.partition_window import unsequenced_ids
from outbox.errors import Conflict, NotFound
from outbox.operations.endpoints import found as found_endpoints
from outbox.operations.endpoints.changes import NewEndpoint, Updated
from outbox.store.connection.secrets import CLEAR
from tests.sim.database.endpoints import SECRET
from tests.sim.stores import endpoint_writes
from tests.sim.stores.change import make_change
from tests.sim.stores.feeds import running_feed
from tests.sim.stores.replay_feed import is_subscribed
from tests.sim.stores.starts import begin_feed, count_after, resolve_start

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox.core.model.secret_text import GivenSecret
    from outbox.core.model.start import Start
    from outbox.store.connection.secrets import Vault
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database
    from tests.sim.stores.change import Change


class FoundEndpoint(found_endpoints.FoundEndpoint):
    """An endpoint as a plan has read it; `row` is its settings."""

    __slots__ = ()

    @property
    def settings(self) -> EndpointSettings:
        settings: EndpointSettings = self.row
        return settings


async def add_endpoint(
    connection: Connection,
    schema: str,
    settings: EndpointSettings,
    *,
    actor: str,
    vault: Vault = CLEAR,
    ed25519: bool = False,
    secret: GivenSecret | None = None,
    start: Start | None = None,
) -> NewEndpoint:
    assert not ed25519
    assert secret is None
    name = settings.name

    async def plan(change: Change) -> NewEndpoint:
        if await change.db.call(is_name_taken, name):
            raise Conflict(f"endpoint {name} exists already")
        new, high, last = await change.db.call(read_new_id)
        change.journal("endpoint_added", new, {"name": name}, batch_as="from_batch")
        change.write_early(endpoint_writes.add_endpoint, new, settings)
        before = None
        if start is None:
            endpoint_writes.replace_subscriptions(change, [new])
        else:
            begins = await resolve_start(change.db, start)
            before = await count_after(change.db, begins)
            begin_feed(change, new, begins)
        waiting = unsequenced_ids(high, last)
        return NewEndpoint(
            new, name, settings.url, SECRET, settings.lanes, settings.types, waiting, before, ()
        )

    return await make_change(connection, schema, actor, plan)


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
                if found.fed:
                    endpoint_writes.change_feeds(change, [found.id])
                else:
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
            is_subscribed(db, tx, row["id"]) or is_fed(db, tx, row["id"]),
            is_fed(db, tx, row["id"]),
            row["settings"],
            vault,
        )
        for row in tx.rows(db.endpoint)
        if row["name"] in names and row["state"] != "removed" and owner in (None, row["tenant"])
    }


def is_fed(db: Database, tx: Transaction, endpoint_id: UUID) -> bool:
    return running_feed(db, tx, endpoint_id) is not None


def is_name_taken(db: Database, tx: Transaction, name: str) -> bool:
    return any(e["name"] == name and e["state"] != "removed" for e in tx.rows(db.endpoint))


def new_endpoint_id(db: Database) -> UUID:
    """The id of the next endpoint."""
    return UUID(int=db.rng.getrandbits(128))


def read_new_id(db: Database, tx: Transaction) -> tuple[UUID, int, int]:
    """An id for a new endpoint, the highest sequenced event id, and the last assigned one."""
    return new_endpoint_id(db), db.batches[-1].high, db.last_id


def read_names(db: Database, tx: Transaction) -> None:
    """Only the text of an error depends on them."""

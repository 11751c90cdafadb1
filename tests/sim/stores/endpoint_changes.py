"""Changes of the settings of endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model import endpoint_config
from outbox.errors import Conflict, NotFound
from outbox.operations import endpoint_changes
from outbox.operations.endpoint_changes import Updated
from outbox.store.connection.secrets import CLEAR
from tests.sim.database.endpoints import add_lane, settings_columns
from tests.sim.database.engine import UPDATE, Wait
from tests.sim.stores.replay_feed import is_subscribed
from tests.sim.stores.routing_change import routing_transaction, write_journal

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from outbox.core.model.endpoint import EndpointSettings
    from outbox.store.connection.secrets import Vault
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database


class LockedEndpoint(endpoint_changes.LockedEndpoint):
    """An endpoint under its lock; `row` is its settings."""

    __slots__ = ()

    @property
    def settings(self) -> EndpointSettings:
        settings: EndpointSettings = self.row
        return settings


async def update(
    connection: Connection,
    schema: str,
    name: str,
    edit: Callable[[EndpointSettings], EndpointSettings],
    *,
    actor: str,
    vault: Vault = CLEAR,
) -> Updated:
    async with routing_transaction(connection, schema) as from_batch:
        found = await lock_endpoint(connection, name)
        old, new = found.settings, edit(found.settings)
        if (new.name, new.filter) != (old.name, None):
            raise NotImplementedError("no endpoint of the simulation has a new name or a filter")
        if found.state == "removing":
            raise Conflict(f"endpoint {name} is being removed")
        differences = tuple(endpoint_config.differences(old, new))
        if not differences:
            return Updated(found.id, name, ())
        generation = found.generation
        if new.lanes != old.lanes:
            generation = await connection.call(next_generation, generation)
            epoch = await connection.call(lock_epoch, found.id)
            await connection.call(add_lanes, found.id, generation, new.lanes, from_batch, epoch)
        if found.subscribed and new.subscription != old.subscription:
            await begin_subscription(connection, from_batch, found.id, new)
        await connection.call(update_endpoint, found.id, generation, new)
        await write_journal(connection, "endpoint_updated", actor, found.id, {"name": name})
    return Updated(found.id, name, differences)


async def lock_endpoint(connection: Connection, name: str, vault: Vault = CLEAR) -> LockedEndpoint:
    found = await connection.call(lock_endpoint_row, name)
    if found is None:
        raise NotFound(f"there is no endpoint {name}")
    return found


async def begin_subscription(
    connection: Connection, from_batch: int, endpoint_id: UUID, settings: EndpointSettings
) -> None:
    await connection.call(drop_unused_subscription, endpoint_id, from_batch)
    await connection.call(end_subscription, endpoint_id, from_batch)
    await connection.call(add_subscription, endpoint_id, from_batch, settings)


# ------------------------------------------------------------------------ steps


def lock_endpoint_row(db: Database, tx: Transaction, name: str) -> Steps[LockedEndpoint | None]:
    for row in list(tx.rows(db.endpoint)):
        if row["name"] == name and row["state"] != "removed":
            yield Wait(db.endpoint, row["id"], UPDATE)
            new = tx.get(db.endpoint, row["id"])
            assert new is not None
            subscribed = is_subscribed(db, tx, new["id"])
            known = (new["id"], name, new["state"], new["generation"], subscribed)
            return LockedEndpoint(*known, new["settings"], CLEAR)
    return None


def next_generation(db: Database, tx: Transaction, generation: int) -> int:
    return generation + 1


def lock_epoch(db: Database, tx: Transaction, endpoint_id: UUID) -> Steps[int]:
    yield Wait(db.ownership, endpoint_id, UPDATE)
    row = tx.get(db.ownership, endpoint_id)
    assert row is not None
    return int(row["epoch"])


def add_lanes(
    db: Database,
    tx: Transaction,
    endpoint_id: UUID,
    generation: int,
    lanes: int,
    from_batch: int,
    epoch: int,
) -> None:
    def put(table: Any, key: Any, row: Any) -> None:
        tx.put(table, key, row)

    for slot in range(lanes):
        add_lane(db, put, endpoint_id, generation, slot, from_batch, epoch)


def update_endpoint(
    db: Database, tx: Transaction, endpoint_id: UUID, generation: int, settings: EndpointSettings
) -> Steps[None]:
    yield Wait(db.endpoint, endpoint_id, UPDATE)
    columns = settings_columns(settings)
    tx.change(db.endpoint, endpoint_id, **columns, generation=generation)


def drop_unused_subscription(
    db: Database, tx: Transaction, endpoint_id: UUID, from_batch: int
) -> None:
    tx.put(db.subscription, (endpoint_id, from_batch), None)


def end_subscription(db: Database, tx: Transaction, endpoint_id: UUID, batch: int) -> None:
    for row in list(tx.rows(db.subscription)):
        if row["endpoint_id"] == endpoint_id and row["to_batch"] is None:
            tx.change(db.subscription, (endpoint_id, row["from_batch"]), to_batch=batch)


def add_subscription(
    db: Database, tx: Transaction, endpoint_id: UUID, from_batch: int, settings: EndpointSettings
) -> None:
    columns = ("types", "tenant", "all_tenants", "filter")
    row = {name: getattr(settings, name) for name in columns}
    row |= {"endpoint_id": endpoint_id, "from_batch": from_batch, "to_batch": None}
    tx.put(db.subscription, (endpoint_id, from_batch), row)

"""Endpoints that operators pause, resume and enable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.errors import Conflict
from outbox.operations.endpoint_states import StateChange, require_state
from tests.sim.database.engine import EXCLUSIVE, UPDATE, Wait
from tests.sim.stores.endpoint_changes import begin_subscription, lock_endpoint
from tests.sim.stores.routing_change import routing_transaction, write_journal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.stores.endpoint_changes import LockedEndpoint


async def pause(
    connection: Connection,
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    comment: str | None = None,
) -> list[StateChange]:
    changes = []
    async with routing_transaction(connection, schema):
        for name in dict.fromkeys(names):
            found = await lock_endpoint(connection, name)
            changed = found.state != "paused"
            if changed:
                require_state(found, ("active",), "paused")
                await _set_state(connection, found, "paused", actor, comment)
            changes.append(StateChange(found.id, name, "paused", changed))
    return changes


async def resume(
    connection: Connection,
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    comment: str | None = None,
) -> list[StateChange]:
    changes = []
    async with routing_transaction(connection, schema):
        for name in dict.fromkeys(names):
            found = await lock_endpoint(connection, name)
            require_state(found, ("active", "paused"), "resumed")
            await connection.call(request_retry, found.id)
            unblocked = await connection.call(unblock_lanes, found.id)
            if found.state == "paused":
                await _set_state(connection, found, "active", actor, comment, "resumed")
            else:
                await write_journal(connection, "endpoint_resumed", actor, found.id, {})
            changes.append(
                StateChange(found.id, name, "active", found.state == "paused", unblocked)
            )
    return changes


async def enable(
    connection: Connection, schema: str, name: str, *, actor: str, comment: str | None = None
) -> StateChange:
    async with routing_transaction(connection, schema) as from_batch:
        found = await lock_endpoint(connection, name)
        if found.subscribed or found.state in ("disabling", "removing"):
            raise Conflict(f"endpoint {name} is {found.state}")
        state = "active" if found.state == "disabled" else found.state
        await begin_subscription(connection, from_batch, found.id, found.settings)
        await connection.call(request_retry, found.id)
        await _set_state(connection, found, state, actor, comment, "enabled")
    return StateChange(found.id, name, state, changed=True)


async def _set_state(
    connection: Connection,
    found: LockedEndpoint,
    state: str,
    actor: str,
    comment: str | None,
    verb: str = "paused",
) -> None:
    await connection.call(set_state, found.id, state, actor, comment)
    await write_journal(connection, f"endpoint_{verb}", actor, found.id, {"name": found.name})


# ------------------------------------------------------------------------ steps


def set_state(
    db: Database, tx: Transaction, endpoint_id: UUID, state: str, by: str, comment: str | None
) -> Steps[None]:
    yield Wait(db.endpoint, endpoint_id, UPDATE)
    tx.change(db.endpoint, endpoint_id, state=state, state_by=by, state_comment=comment)


def request_retry(db: Database, tx: Transaction, endpoint_id: UUID) -> Steps[None]:
    """Request an attempt at once."""
    yield Wait(db.endpoint, endpoint_id, UPDATE)
    e = tx.get(db.endpoint, endpoint_id)
    assert e is not None
    tx.change(db.endpoint, endpoint_id, resumes=e["resumes"] + 1)


def unblock_lanes(db: Database, tx: Transaction, endpoint_id: UUID) -> Steps[int]:
    unblocked = 0
    for block in list(tx.rows(db.lane_block)):
        lane = tx.get(db.lane, block["lane_id"])
        assert lane is not None
        if lane["endpoint_id"] == endpoint_id:
            yield Wait(db.lane_block, block["lane_id"], EXCLUSIVE)
            tx.put(db.lane_block, block["lane_id"], None)
            unblocked += 1
    return unblocked

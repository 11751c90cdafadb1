"""Endpoints that operators pause, resume and enable."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.errors import Conflict
from outbox.operations.endpoints.states import StateChange, require_state
from outbox.operations.feeds.catch_up import CatchUp
from tests.sim.database.engine import EXCLUSIVE, UPDATE, Wait
from tests.sim.stores.catch_up import plan_catch_up
from tests.sim.stores.change import make_change
from tests.sim.stores.endpoint_changes import find_endpoint, find_endpoints
from tests.sim.stores.endpoint_writes import replace_subscriptions, set_states

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from uuid import UUID

    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.stores.change import Change


async def pause_endpoints(
    connection: Connection,
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    comment: str | None = None,
    owner: str | None = None,
) -> list[StateChange]:
    async def plan(change: Change) -> list[StateChange]:
        found = await find_endpoints(change, names, owner)
        paused = [each for each in found if each.state != "paused"]
        for each in paused:
            require_state(each, ("active",), "paused")
            change.journal("endpoint_paused", each.id, {"name": each.name})
        if paused:
            change.write(set_states, [each.id for each in paused], "paused", actor, comment)
        return [StateChange(e.id, e.name, "paused", e.state != "paused") for e in found]

    return await make_change(connection, schema, actor, plan)


async def resume_endpoints(
    connection: Connection,
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    comment: str | None = None,
    owner: str | None = None,
) -> list[StateChange]:
    async def plan(change: Change) -> list[StateChange]:
        found = await find_endpoints(change, names, owner)
        for each in found:
            require_state(each, ("active", "paused"), "resumed")
        ids = [each.id for each in found]
        unblocked = await change.db.call(count_blocked_lanes, ids)
        change.write(request_retry, ids)
        change.write(unblock_lanes, ids)
        resumed = [each.id for each in found if each.state == "paused"]
        if resumed:
            change.write(set_states, resumed, "active", actor, comment)
        for each in found:
            is_resumed = each.state == "paused" or unblocked[each.id]
            kind = "endpoint_resumed" if is_resumed else "endpoint_retried"
            change.journal(kind, each.id, {"name": each.name})
        return [
            StateChange(e.id, e.name, "active", e.id in resumed, unblocked[e.id]) for e in found
        ]

    return await make_change(connection, schema, actor, plan)


async def enable_endpoint(
    connection: Connection,
    schema: str,
    name: str,
    *,
    actor: str,
    comment: str | None = None,
    owner: str | None = None,
    catch_up: bool = False,
) -> StateChange:
    async def plan(change: Change) -> StateChange:
        found = await find_endpoint(change, name, owner)
        if found.subscribed or found.state in ("disabling", "removing"):
            raise Conflict(f"endpoint {name} is {found.state}")
        state = "active" if found.state == "disabled" else found.state
        caught = await plan_catch_up(change, found.id, name) if catch_up else None
        if caught is None:
            replace_subscriptions(change, [found.id])
        data: dict[str, Any] = {"name": name}
        changed = StateChange(found.id, name, state, changed=True)
        if catch_up:
            caught = caught or CatchUp(0, 0)
            data["catches_up"] = caught._asdict()
            changed = replace(
                changed, catches_up_pending=caught.pending, catches_up_events=caught.events
            )
        change.write(request_retry, [found.id])
        change.write(set_states, [found.id], state, actor, comment)
        change.journal("endpoint_enabled", found.id, data, batch_as="from_batch")
        return changed

    return await make_change(connection, schema, actor, plan)


# ------------------------------------------------------------------------ steps


def request_retry(db: Database, tx: Transaction, ids: Collection[UUID]) -> Steps[None]:
    """Request an attempt at once."""
    for endpoint_id in ids:
        yield Wait(db.endpoint, endpoint_id, UPDATE)
        e = tx.get(db.endpoint, endpoint_id)
        assert e is not None
        tx.change(db.endpoint, endpoint_id, resumes=e["resumes"] + 1)


def count_blocked_lanes(db: Database, tx: Transaction, ids: Collection[UUID]) -> dict[UUID, int]:
    blocked = [tx.get(db.lane, block["lane_id"]) for block in tx.rows(db.lane_block)]
    of = [lane["endpoint_id"] for lane in blocked if lane is not None]
    return {endpoint_id: of.count(endpoint_id) for endpoint_id in ids}


def unblock_lanes(db: Database, tx: Transaction, ids: Collection[UUID]) -> Steps[None]:
    for block in list(tx.rows(db.lane_block)):
        lane = tx.get(db.lane, block["lane_id"])
        assert lane is not None
        if lane["endpoint_id"] in ids:
            yield Wait(db.lane_block, block["lane_id"], EXCLUSIVE)
            tx.put(db.lane_block, block["lane_id"], None)

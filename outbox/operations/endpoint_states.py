"""Endpoint states: pause, resume and enable.

    active ──▶ paused ──▶ active           pause, resume
    active, paused ──▶ disabling ──▶ disabled      by the owner
    disabled ──▶ active                    enable
    any ──▶ removing ──▶ removed           see endpoint_removal

All changes run in a routing transaction, which locks the cursor row (see `routing_change`), and
write a journal entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.errors import Conflict
from outbox.operations.endpoint_changes import begin_subscription, lock_endpoint
from outbox.store.routing_change import routing_transaction, write_journal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.endpoint_changes import LockedEndpoint

SET_STATE = """
UPDATE endpoint SET state = $2, state_at = clock_timestamp(), state_by = $3, state_comment = $4
 WHERE id = $1
"""

UNBLOCK_LANES = """
WITH taken AS (
    DELETE FROM lane_block b USING lane l
     WHERE l.id = b.lane_id AND l.endpoint_id = $1 RETURNING 1)
SELECT count(*) FROM taken
"""

# Signals the owner to retry at once; only the owner writes endpoint_health.
REQUEST_RETRY = "UPDATE endpoint SET resumes = resumes + 1 WHERE id = $1"


@dataclass(frozen=True, slots=True)
class StateChange:
    """State of an endpoint after an operation, and whether the operation changed it."""

    id: UUID
    name: str
    state: str
    changed: bool
    unblocked: int = 0
    """Number of lanes that were unblocked."""


async def pause(
    connection: Connection[Any],
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    comment: str | None = None,
) -> list[StateChange]:
    """Pause endpoints: deliveries are sequenced, but not sent.

    Raises:
        NotFound: no endpoint has this name; nothing was changed.
        Conflict: an endpoint is disabled or being removed.
    """
    changes: list[StateChange] = []
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
    connection: Connection[Any],
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    comment: str | None = None,
) -> list[StateChange]:
    """Resume paused endpoints, and retry failing endpoints at once.

    Blocked lanes continue after the dead letter that blocks them.

    Raises:
        NotFound: no endpoint has this name; nothing was changed.
        Conflict: an endpoint is disabled or being removed.
    """
    changes: list[StateChange] = []
    async with routing_transaction(connection, schema):
        for name in dict.fromkeys(names):
            found = await lock_endpoint(connection, name)
            require_state(found, ("active", "paused"), "resumed")
            await connection.execute(REQUEST_RETRY, found.id)
            unblocked: int = await connection.fetchval(UNBLOCK_LANES, found.id)
            details: dict[str, Any] = {"unblocked": unblocked} if unblocked else {}
            if found.state == "paused":
                await _set_state(connection, found, "active", actor, comment, "resumed", **details)
            else:
                details = {"name": name, "comment": comment, **details}
                await write_journal(connection, "endpoint_resumed", actor, found.id, details)
            changes.append(
                StateChange(found.id, name, "active", found.state == "paused", unblocked)
            )
    return changes


async def enable(
    connection: Connection[Any], schema: str, name: str, *, actor: str, comment: str | None = None
) -> StateChange:
    """Enable a disabled endpoint: it receives events from the next batch on.

    This also cancels the draining of an endpoint that is to be removed.

    Raises:
        NotFound: no endpoint has this name.
        Conflict: the endpoint is neither disabled nor draining.
    """
    async with routing_transaction(connection, schema) as from_batch:
        found = await lock_endpoint(connection, name)
        if found.subscribed:
            if found.state == "paused":
                raise Conflict(f'endpoint "{name}" is paused; resume it: outbox endpoint resume')
            raise Conflict(
                f'endpoint "{name}" is {found.state}; only a disabled endpoint can be enabled'
            )
        if found.state in ("disabling", "removing"):
            raise Conflict(f'endpoint "{name}" is {found.state}; wait until that is complete')
        state = "active" if found.state == "disabled" else found.state
        await begin_subscription(connection, from_batch, found.id, found.settings)
        await connection.execute(REQUEST_RETRY, found.id)
        await _set_state(connection, found, state, actor, comment, "enabled", from_batch=from_batch)
    return StateChange(found.id, name, state, changed=True)


async def _set_state(
    connection: Connection[Any],
    found: LockedEndpoint,
    state: str,
    actor: str,
    comment: str | None,
    verb: str | None = None,
    **details: Any,
) -> None:
    await connection.execute(SET_STATE, found.id, state, actor, comment)
    data = {"name": found.name, "comment": comment, **details}
    await write_journal(connection, f"endpoint_{verb or state}", actor, found.id, data)


def require_state(found: LockedEndpoint, states: Sequence[str], done: str) -> None:
    """Require one of these states.

    Raises:
        Conflict: the endpoint has another state.
    """
    if found.state in states:
        return
    name = found.name
    hint = {
        "disabled": "enable it first: outbox endpoint enable",
        "disabling": "wait until that is complete, then enable it",
    }.get(found.state, "it accepts no more changes")
    is_being = "is" if found.state == "disabled" else "is being"
    state = {"disabling": "disabled", "removing": "removed"}.get(found.state, found.state)
    raise Conflict(f'endpoint "{name}" {is_being} {state} and cannot be {done}; {hint}')

"""Endpoints: pausing, resuming and enabling them.

    active ──▶ paused ──▶ active           pause, resume
    active, paused ──▶ disabling ──▶ disabled      by the owner
    disabled ──▶ active                    enable
    any ──▶ removing ──▶ removed           see endpoint_removal

Everything here happens under the cursor row (see `changes`) and is journalled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.errors import Conflict
from outbox.operations.endpoint_changes import begin_subscription, lock
from outbox.store.routing_change import change, write_journal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.endpoint_changes import Found

SET_STATE = """
UPDATE endpoint SET state = $2, state_at = clock_timestamp(), state_by = $3, state_why = $4
 WHERE id = $1
"""

UNBLOCK_LANES = """
WITH taken AS (
    DELETE FROM lane_block b USING lane l
     WHERE l.id = b.lane_id AND l.endpoint_id = $1 RETURNING 1)
SELECT count(*) FROM taken
"""

# A word for the owner, who alone writes the endpoint's health.
TRY_NOW = "UPDATE endpoint SET resumes = resumes + 1 WHERE id = $1"


@dataclass(frozen=True, slots=True)
class Change:
    """What an endpoint's state is now, and whether it was another one before."""

    id: UUID
    name: str
    state: str
    changed: bool
    unblocked: int = 0
    """Lanes that waited for an operator."""


async def pause(
    connection: Connection[Any],
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    why: str | None = None,
) -> list[Change]:
    """Send nothing to these endpoints; their deliveries go on being numbered.

    Raises:
        NotFound: there is none of that name; nothing was changed.
        Conflict: one of them is disabled or being removed.
    """
    changes: list[Change] = []
    async with change(connection, schema):
        for name in dict.fromkeys(names):
            found = await lock(connection, name)
            changed = found.state != "paused"
            if changed:
                must_be(found, ("active",), "paused")
                await _set_state(connection, found, "paused", actor, why)
            changes.append(Change(found.id, name, "paused", changed))
    return changes


async def resume(
    connection: Connection[Any],
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    why: str | None = None,
) -> list[Change]:
    """Send again to paused endpoints, and try those that are not paused at once.

    Lanes that wait for an operator go on behind the dead letter that they
    waited for.

    Raises:
        NotFound: there is none of that name; nothing was changed.
        Conflict: one of them is disabled or being removed.
    """
    changes: list[Change] = []
    async with change(connection, schema):
        for name in dict.fromkeys(names):
            found = await lock(connection, name)
            must_be(found, ("active", "paused"), "resumed")
            await connection.execute(TRY_NOW, found.id)
            unblocked: int = await connection.fetchval(UNBLOCK_LANES, found.id)
            told: dict[str, Any] = {"unblocked": unblocked} if unblocked else {}
            if found.state == "paused":
                await _set_state(connection, found, "active", actor, why, "resumed", **told)
            else:
                told = {"name": name, "why": why, **told}
                await write_journal(connection, "endpoint_resumed", actor, found.id, told)
            changes.append(Change(found.id, name, "active", found.state == "paused", unblocked))
    return changes


async def enable(
    connection: Connection[Any], schema: str, name: str, *, actor: str, why: str | None = None
) -> Change:
    """Let a disabled endpoint receive again, from the next batch on.

    One that waits for its removal gets new events again, too.

    Raises:
        NotFound: there is none of that name.
        Conflict: it is neither.
    """
    async with change(connection, schema) as from_batch:
        found = await lock(connection, name)
        if found.subscribed:
            if found.state == "paused":
                raise Conflict(f'endpoint "{name}" is paused; resume it: outbox endpoint resume')
            raise Conflict(f'endpoint "{name}" is {found.state}; only a disabled one is enabled')
        if found.state in ("disabling", "removing"):
            raise Conflict(f'endpoint "{name}" is just {found.state}; wait until that is done')
        state = "active" if found.state == "disabled" else found.state
        await begin_subscription(connection, from_batch, found.id, found.settings)
        await connection.execute(TRY_NOW, found.id)
        await _set_state(connection, found, state, actor, why, "enabled", from_batch=from_batch)
    return Change(found.id, name, state, changed=True)


async def _set_state(
    connection: Connection[Any],
    found: Found,
    state: str,
    actor: str,
    why: str | None,
    verb: str | None = None,
    **told: Any,
) -> None:
    await connection.execute(SET_STATE, found.id, state, actor, why)
    data = {"name": found.name, "why": why, **told}
    await write_journal(connection, f"endpoint_{verb or state}", actor, found.id, data)


def must_be(found: Found, states: Sequence[str], done: str) -> None:
    """Refuse what cannot be done in this state.

    Raises:
        Conflict: it is in another one.
    """
    if found.state in states:
        return
    name = found.name
    hint = {
        "disabled": "enable it first: outbox endpoint enable",
        "disabling": "wait until that is done, then enable it",
    }.get(found.state, "nothing more can be done with it")
    is_being = "is" if found.state == "disabled" else "is being"
    state = {"disabling": "disabled", "removing": "removed"}.get(found.state, found.state)
    raise Conflict(f'endpoint "{name}" {is_being} {state} and cannot be {done}; {hint}')

"""Endpoints: removing them, and what becomes of what they are owed.

Either it is given up, or the endpoint is drained first: it gets nothing new,
and is removed when nothing is owed any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.errors import Conflict
from outbox.operations.endpoint_changes import lock
from outbox.operations.endpoint_states import SET_STATE, UNBLOCK_LANES
from outbox.operations.endpoints import LANE_STATE
from outbox.store.connection.connect import map_errors
from outbox.store.replay_feed import CANCEL_REPLAYS
from outbox.store.routing_change import END_SUBSCRIPTION, change, write_journal

if TYPE_CHECKING:
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.endpoint_changes import Found

COUNT_OWED = f"""
SELECT coalesce(sum(s.last_seq - s.acked_seq), 0)::bigint FROM ({LANE_STATE}) s
 WHERE s.endpoint_id = $1
"""  # noqa: S608 (constants only)

FORGET_SECRETS = "DELETE FROM endpoint_secret WHERE endpoint_id = $1"

WAITING = f"""
SELECT e.state, ({COUNT_OWED.replace("$1", "e.id")}) AS owed,
       (SELECT coalesce(sum(r.to_seq - r.next_seq + 1), 0)::bigint
          FROM replay r
         WHERE r.endpoint_id = e.id AND r.next_seq <= r.to_seq) AS replays,
       (SELECT count(*) FROM lane_block b JOIN lane l ON l.id = b.lane_id
         WHERE l.endpoint_id = e.id) AS blocked,
       EXISTS (SELECT FROM replica r WHERE r.expires_at > clock_timestamp()) AS relay,
       EXISTS (SELECT FROM subscription s
                WHERE s.endpoint_id = e.id AND s.to_batch IS NULL) AS subscribed
  FROM endpoint e WHERE e.id = $1
"""  # noqa: S608


class StillOwed(Conflict):
    """An endpoint is owed deliveries, and nobody said what is to become of them."""

    def __init__(self, name: str, owed: int) -> None:
        deliveries = "1 delivery" if owed == 1 else f"{owed} deliveries"
        super().__init__(
            f'endpoint "{name}" is owed {deliveries}: have them delivered first, or give them up '
            "for good"
        )
        self.owed = owed


@dataclass(frozen=True, slots=True)
class Removal:
    """What became of an endpoint: `removed`, or `removing` until its owner gave up the rest."""

    id: UUID
    name: str
    state: str
    owed: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """What an endpoint that is to be removed still waits for."""

    state: str
    owed: int
    """Deliveries, and replays that will become some."""
    blocked: int
    """Lanes that wait for an operator."""
    relay: bool
    """Whether any relay is alive."""
    subscribed: bool
    """Whether somebody enabled it again."""


async def remove(
    connection: Connection[Any], schema: str, name: str, *, actor: str, give_up: bool = False
) -> Removal:
    """Remove an endpoint: it gets nothing from the next batch on.

    When it is still owed deliveries, its owner gives them up as one
    dead-letter range per lane; without an owner that happens when a relay
    starts.  The name is free again when that is done.

    Raises:
        NotFound: there is none of that name.
        StillOwed: it is owed deliveries, and `give_up` was not said.
    """
    async with change(connection, schema) as from_batch:
        found = await lock(connection, name)
        return await remove_in(connection, from_batch, found, actor, give_up=give_up)


async def remove_in(
    connection: Connection[Any], from_batch: int, found: Found, actor: str, *, give_up: bool
) -> Removal:
    """`remove` in a change that is under way."""
    name = found.name
    owed: int = await connection.fetchval(COUNT_OWED, found.id)
    if found.state == "removing":
        return Removal(found.id, name, "removing", owed)
    if owed and not give_up:
        raise StillOwed(name, owed)
    state = "removing" if owed else "removed"
    await connection.execute(END_SUBSCRIPTION, found.id, from_batch)
    await connection.execute(CANCEL_REPLAYS, found.id, None)
    await connection.execute(UNBLOCK_LANES, found.id)
    await connection.execute(SET_STATE, found.id, state, actor, None)
    told = {"name": name, "owed": owed, "to_batch": from_batch}
    await write_journal(connection, "endpoint_removing", actor, found.id, told)
    if state == "removed":
        await connection.execute(FORGET_SECRETS, found.id)
        await write_journal(connection, "endpoint_removed", actor, found.id, {"given_up": 0})
    return Removal(found.id, name, state, owed)


async def drain(connection: Connection[Any], schema: str, name: str, *, actor: str) -> UUID:
    """Give an endpoint nothing new, so that it can be removed when nothing is owed any more.

    It stays what it is otherwise; `enable` takes this back.

    Returns:
        Its id, for `waiting`.

    Raises:
        NotFound: there is none of that name.
        Conflict: it is paused, and so would be owed forever.
    """
    async with change(connection, schema) as from_batch:
        found = await lock(connection, name)
        if found.state == "paused":
            raise Conflict(
                f'endpoint "{name}" is paused and delivers nothing; resume it first, '
                "or give up what it is owed"
            )
        if found.subscribed:
            await connection.execute(END_SUBSCRIPTION, found.id, from_batch)
            why = "to be removed when nothing is owed any more"
            await connection.execute(SET_STATE, found.id, found.state, actor, why)
            told = {"name": name, "why": why, "to_batch": from_batch}
            await write_journal(connection, "endpoint_updated", actor, found.id, told)
    return found.id


async def waiting(connection: Connection[Any], schema: str, endpoint_id: UUID) -> Waiting:
    """What an endpoint that was drained still waits for."""
    with map_errors(schema):
        row = await connection.fetchrow(WAITING, endpoint_id)
    return Waiting(
        row["state"],
        row["owed"] + row["replays"],
        row["blocked"],
        row["relay"],
        row["subscribed"],
    )

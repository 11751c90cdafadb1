"""Endpoint removal.

Pending deliveries are either dead-lettered, or the endpoint is drained first: it receives no new
events, and is removed when no delivery is pending.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.errors import Conflict
from outbox.operations.endpoint_changes import lock_endpoint
from outbox.operations.endpoint_states import SET_STATE, UNBLOCK_LANES
from outbox.operations.endpoints import LANE_STATE
from outbox.store.connection.connect import map_errors
from outbox.store.replay_feed import CANCEL_REPLAYS
from outbox.store.routing_change import END_SUBSCRIPTION, routing_transaction, write_journal

if TYPE_CHECKING:
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.endpoint_changes import LockedEndpoint

COUNT_PENDING = f"""
SELECT coalesce(sum(s.last_seq - s.acked_seq), 0)::bigint FROM ({LANE_STATE}) s
 WHERE s.endpoint_id = $1
"""  # noqa: S608 (constants only)

DELETE_SECRETS = "DELETE FROM endpoint_secret WHERE endpoint_id = $1"

WAITING = f"""
SELECT e.state, ({COUNT_PENDING.replace("$1", "e.id")}) AS pending,
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


class StillPending(Conflict):
    """The endpoint has pending deliveries, and dead-lettering them was not requested."""

    def __init__(self, name: str, pending: int) -> None:
        deliveries = "1 delivery" if pending == 1 else f"{pending} deliveries"
        super().__init__(
            f'endpoint "{name}" has {deliveries} pending: wait until they are delivered, or '
            "dead-letter them"
        )
        self.pending = pending


@dataclass(frozen=True, slots=True)
class Removal:
    """Result: `removed`, or `removing` until the owner has dead-lettered pending deliveries."""

    id: UUID
    name: str
    state: str
    pending: int


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """Progress of draining an endpoint."""

    state: str
    pending: int
    """Pending deliveries, including replays that are not sequenced yet."""
    blocked: int
    """Number of blocked lanes."""
    relay: bool
    """Whether a relay is running."""
    subscribed: bool
    """Whether the endpoint was enabled again."""


async def remove(
    connection: Connection[Any], schema: str, name: str, *, actor: str, dead_letter: bool = False
) -> Removal:
    """Remove an endpoint: it receives no events from the next batch on.

    The owner dead-letters pending deliveries as one range per lane; without an owner, this
    happens when a relay starts.  Then the name is available again.

    Raises:
        NotFound: no endpoint has this name.
        StillPending: deliveries are pending, and `dead_letter` is false.
    """
    async with routing_transaction(connection, schema) as from_batch:
        found = await lock_endpoint(connection, name)
        return await remove_in(connection, from_batch, found, actor, dead_letter=dead_letter)


async def remove_in(
    connection: Connection[Any],
    from_batch: int,
    found: LockedEndpoint,
    actor: str,
    *,
    dead_letter: bool,
) -> Removal:
    """Remove an endpoint in the caller's routing transaction; see `remove`."""
    name = found.name
    pending: int = await connection.fetchval(COUNT_PENDING, found.id)
    if found.state == "removing":
        return Removal(found.id, name, "removing", pending)
    if pending and not dead_letter:
        raise StillPending(name, pending)
    state = "removing" if pending else "removed"
    await connection.execute(END_SUBSCRIPTION, found.id, from_batch)
    await connection.execute(CANCEL_REPLAYS, found.id, None)
    await connection.execute(UNBLOCK_LANES, found.id)
    await connection.execute(SET_STATE, found.id, state, actor, None)
    data = {"name": name, "pending": pending, "to_batch": from_batch}
    await write_journal(connection, "endpoint_removing", actor, found.id, data)
    if state == "removed":
        await connection.execute(DELETE_SECRETS, found.id)
        await write_journal(connection, "endpoint_removed", actor, found.id, {"dead_lettered": 0})
    return Removal(found.id, name, state, pending)


async def drain(connection: Connection[Any], schema: str, name: str, *, actor: str) -> UUID:
    """Drain an endpoint before its removal: end its subscription, and keep its state.

    `enable` cancels this.

    Returns:
        The endpoint's id, for `read_drain_status`.

    Raises:
        NotFound: no endpoint has this name.
        Conflict: the endpoint is paused, so it would never be drained.
    """
    async with routing_transaction(connection, schema) as from_batch:
        found = await lock_endpoint(connection, name)
        if found.state == "paused":
            raise Conflict(
                f'endpoint "{name}" is paused; resume it first, or dead-letter its pending '
                "deliveries"
            )
        if found.subscribed:
            await connection.execute(END_SUBSCRIPTION, found.id, from_batch)
            comment = "draining before removal"
            await connection.execute(SET_STATE, found.id, found.state, actor, comment)
            data = {"name": name, "why": comment, "to_batch": from_batch}
            await write_journal(connection, "endpoint_updated", actor, found.id, data)
    return found.id


async def read_drain_status(
    connection: Connection[Any], schema: str, endpoint_id: UUID
) -> DrainStatus:
    """Read the progress of draining an endpoint."""
    with map_errors(schema):
        row = await connection.fetchrow(WAITING, endpoint_id)
    return DrainStatus(
        row["state"],
        row["pending"] + row["replays"],
        row["blocked"],
        row["relay"],
        row["subscribed"],
    )

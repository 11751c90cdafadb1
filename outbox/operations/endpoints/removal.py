"""Endpoint removal.

Pending deliveries are either dead-lettered, or the endpoint is drained first: it receives no new
events, and is removed when no delivery is pending.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model.text import count
from outbox.errors import Conflict
from outbox.operations.endpoints.found import find_endpoint
from outbox.operations.endpoints.states import UNBLOCK_LANES
from outbox.operations.endpoints.writes import SET_STATES, stop_subscriptions
from outbox.operations.lanes import PENDING, SUBSCRIBED
from outbox.operations.rows import from_row
from outbox.store.change import make_change
from outbox.store.connection.connect import map_errors
from outbox.store.replays.replay_feed import CANCEL_REPLAYS
from outbox.store.sql.expressions import lease_runs
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Collection
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.endpoints.found import FoundEndpoint
    from outbox.store.change import Change

# Pending deliveries of endpoints, and the number of all their deliveries, by which
# REQUIRE_NO_DELIVERY recognizes new ones.
COUNT_PENDING = f"""
SELECT e.id, {PENDING} AS pending, (
           SELECT coalesce(sum(c.last_seq), 0)::bigint
             FROM lane l JOIN lane_counter c ON c.lane_id = l.id
            WHERE l.endpoint_id = e.id) AS deliveries
  FROM endpoint e WHERE e.id = ANY ($1)
"""  # noqa: S608

# Aborts if endpoints got a delivery since they had $2 in all.  Unlike counting what is pending,
# this is quick for thousands of endpoints.
REQUIRE_NO_DELIVERY = WriteStatement(
    "require_no_delivery",
    """
SELECT abort_unless($2 = (
    SELECT coalesce(sum(c.last_seq), 0) FROM lane l JOIN lane_counter c ON c.lane_id = l.id
     WHERE l.endpoint_id = ANY ($1)))
""",
)

DELETE_SECRETS = WriteStatement(
    "delete_secrets", "DELETE FROM endpoint_secret WHERE endpoint_id = ANY ($1)"
)


WAITING = f"""
SELECT e.id, e.name, e.state, {PENDING} +
       (SELECT coalesce(sum(r.to_seq - r.next_seq + 1), 0)::bigint
          FROM replay r
         WHERE r.endpoint_id = e.id AND r.next_seq <= r.to_seq) AS pending,
       (SELECT count(*) FROM lane_block b JOIN lane l ON l.id = b.lane_id
         WHERE l.endpoint_id = e.id) AS blocked,
       EXISTS (SELECT FROM replica r WHERE {lease_runs("r")}) AS relay,
       {SUBSCRIBED} AS subscribed
  FROM endpoint e WHERE e.id = $1
"""  # noqa: S608


class StillPending(Conflict):
    """The endpoint has pending deliveries, and dead-lettering them was not requested."""

    def __init__(self, name: str, pending: int) -> None:
        super().__init__(
            f'endpoint "{name}" has {count(pending, "delivery")} pending: wait until they are '
            "delivered, or dead-letter them"
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
    """Progress of draining an endpoint before its removal."""

    id: UUID
    name: str
    state: str
    pending: int
    """Pending deliveries, including replays that are not sequenced yet."""
    blocked: int
    """Number of blocked lanes."""
    relay: bool
    """Whether a relay is running."""
    subscribed: bool
    """Whether the endpoint was enabled again."""

    @property
    def drains(self) -> bool:
        """Whether deliveries are pending that will be sent."""
        return self.pending > 0 and self.state not in ("removing", "removed")


async def remove_endpoint(
    connection: Connection[Any],
    schema: str,
    name: str,
    *,
    actor: str,
    dead_letter: bool = False,
    owner: str | None = None,
) -> Removal:
    """Remove an endpoint: it receives no events from the next batch on.

    The owner dead-letters pending deliveries as one range per lane; without an owner, this
    happens when a relay starts.  Then the name is available again.

    Args:
        owner: the tenant that the endpoint must belong to; None: any.

    Raises:
        NotFound: no endpoint has this name.
        StillPending: deliveries are pending, and `dead_letter` is false.
    """

    async def plan(change: Change) -> Removal:
        endpoint = await find_endpoint(change, name, owner)
        (removal,) = await plan_removals(change, [endpoint], dead_letter=dead_letter)
        return removal

    return await make_change(connection, schema, actor, plan)


async def plan_removals(
    change: Change, endpoints: Collection[FoundEndpoint], *, dead_letter: bool
) -> list[Removal]:
    """Plan the removal of endpoints, whose states are required already.

    Raises:
        StillPending: deliveries are pending, and `dead_letter` is false.
    """
    rows = await change.db.fetch(COUNT_PENDING, [each.id for each in endpoints])
    pending = {row["id"]: row["pending"] for row in rows}
    deliveries = {row["id"]: row["deliveries"] for row in rows}
    removals = []
    for each in endpoints:
        if each.state != "removing" and pending[each.id] and not dead_letter:
            raise StillPending(each.name, pending[each.id])
        state = "removing" if pending[each.id] or each.state == "removing" else "removed"
        removals.append(Removal(each.id, each.name, state, pending[each.id]))
    new = [r for r, each in zip(removals, endpoints, strict=True) if each.state != "removing"]
    if not new:
        return removals
    ids = [each.id for each in new]
    removed = [each.id for each in new if each.state == "removed"]
    change.additions.endpoints.update(dict.fromkeys(removed))
    change.write(REQUIRE_NO_DELIVERY, removed, sum(deliveries[each] for each in removed))
    stop_subscriptions(change, ids)
    change.write(CANCEL_REPLAYS, ids, None)
    change.write(UNBLOCK_LANES, ids, None)
    removing = [each.id for each in new if each.state == "removing"]
    change.write(SET_STATES, removing, "removing", change.actor, None)
    change.write(SET_STATES, removed, "removed", change.actor, None)
    change.write(DELETE_SECRETS, removed)
    for removal in new:
        data = {"name": removal.name, "pending": removal.pending}
        change.journal("endpoint_removing", removal.id, data, batch_as="to_batch")
        if removal.state == "removed":
            change.journal("endpoint_removed", removal.id, {"dead_lettered": 0})
    return removals


async def drain_endpoint(
    connection: Connection[Any], schema: str, name: str, *, actor: str, owner: str | None = None
) -> DrainStatus:
    """Drain an endpoint before its removal: end its subscription, and keep its state.

    `enable` cancels this.

    Args:
        owner: the tenant that the endpoint must belong to; None: any.

    Raises:
        NotFound: no endpoint has this name.
        Conflict: the endpoint is paused, so it would never be drained.
    """

    async def plan(change: Change) -> UUID:
        endpoint = await find_endpoint(change, name, owner)
        if endpoint.state == "paused":
            raise Conflict(
                f'endpoint "{name}" is paused; resume it first, or dead-letter its pending '
                "deliveries"
            )
        if endpoint.subscribed:
            comment = "draining before removal"
            stop_subscriptions(change, [endpoint.id])
            change.write(SET_STATES, [endpoint.id], endpoint.state, change.actor, comment)
            data = {"name": name, "comment": comment}
            change.journal("endpoint_updated", endpoint.id, data, batch_as="to_batch")
        return endpoint.id

    endpoint_id = await make_change(connection, schema, actor, plan)
    return await read_drain_status(connection, schema, endpoint_id)


async def read_drain_status(
    connection: Connection[Any], schema: str, endpoint_id: UUID
) -> DrainStatus:
    """Read the progress of draining an endpoint."""
    with map_errors(schema):
        return from_row(DrainStatus, await connection.fetchrow(WAITING, endpoint_id))

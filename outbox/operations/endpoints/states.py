"""Endpoint states: pause, resume and enable.

    active ──▶ paused ──▶ active           pause, resume
    active, paused ──▶ disabling ──▶ disabled      by the owner
    disabled ──▶ active                    enable
    any ──▶ removing ──▶ removed           see endpoint_removal

All changes are planned by reading and written in one message (see `outbox.store.change`), with
a journal entry.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from outbox.errors import Conflict
from outbox.operations.endpoints.found import find_endpoint, find_endpoints
from outbox.operations.endpoints.missed import READ_MISSED_SINCE, read_missed
from outbox.operations.endpoints.writes import SET_STATES, replace_subscriptions
from outbox.operations.feeds.catch_up import CatchUp, plan_catch_up
from outbox.store.change import make_change, make_change_and_read
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.endpoints.found import FoundEndpoint
    from outbox.store.change import Change

COUNT_BLOCKED_LANES = """
SELECT l.endpoint_id, count(*) AS lanes FROM lane_block b JOIN lane l ON l.id = b.lane_id
 WHERE l.endpoint_id = ANY ($1) GROUP BY l.endpoint_id
"""

# Unblocks the lanes of some endpoints, and aborts if their number is not the planned one for each
# ($2; NULL: any): owners block lanes meanwhile, without a new routing version.
UNBLOCK_LANES = WriteStatement(
    "unblock_lanes",
    """
WITH unblocked AS (
    DELETE FROM lane_block b USING lane l
     WHERE l.id = b.lane_id AND l.endpoint_id = ANY ($1::uuid[])
    RETURNING l.endpoint_id)
SELECT abort_unless(NOT EXISTS (
       SELECT FROM unnest($1::uuid[], $2::bigint[]) AS planned(endpoint_id, lanes)
        WHERE lanes <> (SELECT count(*) FROM unblocked u
                         WHERE u.endpoint_id = planned.endpoint_id)))
""",
)

# Signals the owner to retry at once; only the owner writes endpoint_health.
REQUEST_RETRY = WriteStatement(
    "request_retry", "UPDATE endpoint SET resumes = resumes + 1 WHERE id = ANY ($1)"
)


@dataclass(frozen=True, slots=True)
class StateChange:
    """State of an endpoint after an operation, and whether the operation changed it."""

    id: UUID
    name: str
    state: str
    changed: bool
    unblocked: int = 0
    """Number of lanes that were unblocked."""
    missed_since: datetime | None = None
    """Events that were published from this time on, and before `missed_until`, were not sent to it,
    because it was disabled; null: it was not.  Those of a transaction that had been open for more
    than a second when it was disabled may be older."""
    missed_until: datetime | None = None
    missed: int | None = None
    """How many of them match its subscription."""
    missed_more: bool = False
    """There are so many events in that time that only the first 50,000 were looked at."""
    sent_again: int | None = None
    """Events that a replay of that time would send again, because it has got them already."""
    catches_up_pending: int | None = None
    """Deliveries that were pending when it was disabled, and that it gets first."""
    catches_up_events: int | None = None
    """Events of all types that were sequenced since, and that it gets before newer ones if they
    match; null: it does not catch up, and for tenant tokens."""


async def pause_endpoints(
    connection: Connection[Any],
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    comment: str | None = None,
    owner: str | None = None,
) -> list[StateChange]:
    """Pause endpoints: deliveries are sequenced, but not sent.

    Args:
        owner: the tenant that the endpoints must belong to; None: any.

    Raises:
        NotFound: no endpoint has this name; nothing was changed.
        Conflict: an endpoint is disabled or being removed.
    """

    async def plan(change: Change) -> list[StateChange]:
        endpoints = await find_endpoints(change, names, owner)
        for each in endpoints:
            require_pausable(each)
        return await plan_pauses(change, endpoints, comment)

    return await make_change(connection, schema, actor, plan)


async def resume_endpoints(
    connection: Connection[Any],
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    comment: str | None = None,
    owner: str | None = None,
) -> list[StateChange]:
    """Resume paused endpoints, and retry failing endpoints at once.

    Blocked lanes continue after the dead letter that blocks them.  If the endpoint is neither
    paused nor has a blocked lane, the journal entry is `endpoint_retried`.

    Args:
        owner: the tenant that the endpoints must belong to; None: any.

    Raises:
        NotFound: no endpoint has this name; nothing was changed.
        Conflict: an endpoint is disabled or being removed.
    """

    async def plan(change: Change) -> list[StateChange]:
        endpoints = await find_endpoints(change, names, owner)
        for each in endpoints:
            require_resumable(each)
        return await plan_resumptions(change, endpoints, comment)

    return await make_change(connection, schema, actor, plan)


async def enable_endpoint(
    connection: Connection[Any],
    schema: str,
    name: str,
    *,
    actor: str,
    comment: str | None = None,
    owner: str | None = None,
    catch_up: bool = False,
) -> StateChange:
    """Enable a disabled endpoint: it receives events from the next batch on.

    This also cancels the draining of an endpoint that is to be removed.

    Args:
        owner: the tenant that the endpoint must belong to; None: any.
        catch_up: first what it has missed, in order.

    Raises:
        NotFound: no endpoint has this name.
        Conflict: the endpoint is neither disabled nor draining, or some of what it has missed is
            gone.
    """

    async def plan(change: Change) -> StateChange:
        endpoint = await find_endpoint(change, name, owner)
        require_enableable(endpoint)
        if catch_up:
            return await _plan_enabling_with_missed(change, endpoint, comment)
        since = None
        if endpoint.state == "disabled":
            since = await change.db.fetchval(READ_MISSED_SINCE, endpoint.id)
        (enabled,) = await plan_enablings(change, [endpoint], comment)
        return replace(enabled, missed_since=since)

    async def add_missed(db: Any, _: UUID, enabled: StateChange) -> StateChange:
        if enabled.missed_since is None:
            return enabled
        missed = await read_missed(db, enabled.id, enabled.missed_since)
        return replace(
            enabled, missed_until=missed.until, missed=missed.events, missed_more=missed.more,
            sent_again=missed.again,
        )  # fmt: skip

    return await make_change_and_read(connection, schema, actor, plan, add_missed)


async def plan_pauses(
    change: Change, endpoints: Sequence[FoundEndpoint], comment: str | None
) -> list[StateChange]:
    """Pause endpoints that may be paused."""
    paused = [each for each in endpoints if each.state != "paused"]
    _set_states(change, paused, "paused", comment)
    changed = {each.id for each in paused}
    return [StateChange(e.id, e.name, "paused", e.id in changed) for e in endpoints]


async def plan_resumptions(
    change: Change, endpoints: Sequence[FoundEndpoint], comment: str | None
) -> list[StateChange]:
    """Resume endpoints that may be resumed."""
    ids = [each.id for each in endpoints]
    rows = await change.db.fetch(COUNT_BLOCKED_LANES, ids)
    unblocked = {row["endpoint_id"]: row["lanes"] for row in rows}
    change.write(REQUEST_RETRY, ids)
    change.write(UNBLOCK_LANES, ids, [unblocked.get(each, 0) for each in ids])
    resumed = [each.id for each in endpoints if each.state == "paused"]
    if resumed:
        change.write(SET_STATES, resumed, "active", change.actor, comment)
    for each in endpoints:
        data = {"name": each.name, "comment": comment}
        if each.id in unblocked:
            data["unblocked"] = unblocked[each.id]
        is_resumed = each.state == "paused" or each.id in unblocked
        change.journal("endpoint_resumed" if is_resumed else "endpoint_retried", each.id, data)
    return [
        StateChange(e.id, e.name, "active", e.id in resumed, unblocked.get(e.id, 0))
        for e in endpoints
    ]


async def plan_enablings(
    change: Change, endpoints: Sequence[FoundEndpoint], comment: str | None
) -> list[StateChange]:
    """Enable endpoints that may be enabled."""
    replace_subscriptions(change, [each.id for each in endpoints])
    return _enable(change, endpoints, comment, {})


async def _plan_enabling_with_missed(
    change: Change, endpoint: FoundEndpoint, comment: str | None
) -> StateChange:
    caught = await plan_catch_up(change, endpoint.id, endpoint.name)
    if caught is None:
        replace_subscriptions(change, [endpoint.id])
        caught = CatchUp(0, 0)
    (enabled,) = _enable(
        change,
        [endpoint],
        comment,
        {"catches_up": {"pending": caught.pending, "events": caught.events}},
    )
    return replace(enabled, catches_up_pending=caught.pending, catches_up_events=caught.events)


def _enable(
    change: Change,
    endpoints: Sequence[FoundEndpoint],
    comment: str | None,
    further: Mapping[str, object],
) -> list[StateChange]:
    change.write(REQUEST_RETRY, [each.id for each in endpoints])
    # One that is draining keeps its state.
    states = {e.id: "active" if e.state == "disabled" else e.state for e in endpoints}
    for state in sorted(set(states.values())):
        some = [each for each in endpoints if states[each.id] == state]
        _set_states(change, some, state, comment, "enabled", "from_batch", further)
    return [StateChange(e.id, e.name, states[e.id], changed=True) for e in endpoints]


def require_pausable(endpoint: FoundEndpoint) -> None:
    """Require that an endpoint may be paused.

    Raises:
        Conflict: it is disabled or being removed.
    """
    require_state(endpoint, ("active", "paused"), "paused")


def require_resumable(endpoint: FoundEndpoint) -> None:
    """Require that an endpoint may be resumed.

    Raises:
        Conflict: it is disabled or being removed.
    """
    require_state(endpoint, ("active", "paused"), "resumed")


def require_enableable(endpoint: FoundEndpoint) -> None:
    """Require that an endpoint may be enabled.

    Raises:
        Conflict: it is neither disabled nor draining.
    """
    name = endpoint.name
    if endpoint.subscribed:
        if endpoint.state == "paused":
            raise Conflict(f'endpoint "{name}" is paused; resume it: outbox endpoint resume')
        raise Conflict(
            f'endpoint "{name}" is {endpoint.state}; only a disabled endpoint can be enabled'
        )
    if endpoint.state in ("disabling", "removing"):
        raise Conflict(f'endpoint "{name}" is {endpoint.state}; wait until that is complete')


def _set_states(
    change: Change,
    endpoints: Sequence[FoundEndpoint],
    state: str,
    comment: str | None,
    verb: str | None = None,
    batch_as: str | None = None,
    further: Mapping[str, object] = MappingProxyType({}),
) -> None:
    if endpoints:
        change.write(SET_STATES, [each.id for each in endpoints], state, change.actor, comment)
    for each in endpoints:
        data = {"name": each.name, "comment": comment, **further}
        change.journal(f"endpoint_{verb or state}", each.id, data, batch_as=batch_as)


def require_state(endpoint: FoundEndpoint, states: Sequence[str], done: str) -> None:
    """Require one of these states.

    Raises:
        Conflict: the endpoint has another state.
    """
    if endpoint.state in states:
        return
    name = endpoint.name
    hint = {
        "disabled": "enable it first: outbox endpoint enable",
        "disabling": "wait until that is complete, then enable it",
    }.get(endpoint.state, "it accepts no more changes")
    is_being = "is" if endpoint.state == "disabled" else "is being"
    state = {"disabling": "disabled", "removing": "removed"}.get(endpoint.state, endpoint.state)
    raise Conflict(f'endpoint "{name}" {is_being} {state} and cannot be {done}; {hint}')

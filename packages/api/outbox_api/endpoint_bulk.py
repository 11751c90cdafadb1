"""Pause, resume or enable many endpoints in one change.

Those whose state does not permit it are left as they are and reported, while a change of single
endpoints by name fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from outbox.errors import Conflict
from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.endpoints.found import find_endpoints
from outbox.store.change import make_change

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from asyncpg import Connection

    from outbox.operations.endpoints.found import FoundEndpoint
    from outbox.operations.endpoints.states import StateChange
    from outbox.store.change import Change

CHANGED_ENDPOINTS_MAX = 200
"""Endpoints in one change: the cursor row is locked while its message is executed."""

EndpointVerb = Literal["pause", "resume", "enable"]


class _Verb(NamedTuple):
    require: Callable[[FoundEndpoint], None]
    plan: Callable[[Change, Sequence[FoundEndpoint], str | None], Awaitable[list[StateChange]]]


_VERBS: dict[EndpointVerb, _Verb] = {
    "pause": _Verb(endpoint_states.require_pausable, endpoint_states.plan_pauses),
    "resume": _Verb(endpoint_states.require_resumable, endpoint_states.plan_resumptions),
    "enable": _Verb(endpoint_states.require_enableable, endpoint_states.plan_enablings),
}


@dataclass(frozen=True, slots=True)
class BulkChange:
    """Result of a change of many endpoints, or of its dry run; endpoints are in the given order."""

    dry_run: bool
    changed: list[str]
    """Names of the endpoints whose state changes."""
    unchanged: list[str]
    """Names of those that have the state already; a resumption retries them at once."""
    rejected: dict[str, str]
    """Reason by name, of those that are left as they are."""
    unblocked: int
    """Number of lanes that are unblocked."""


async def change_endpoints(
    connection: Connection[Any],
    schema: str,
    verb: EndpointVerb,
    names: Sequence[str],
    *,
    actor: str,
    comment: str | None = None,
    owner: str | None = None,
    dry_run: bool = False,
) -> BulkChange:
    """Pause, resume or enable endpoints, as far as their states permit.

    Args:
        comment: recorded in the journal.
        owner: the tenant that the endpoints must belong to; None: any.
        dry_run: only report what would happen.

    Raises:
        NotFound: no endpoint has one of these names; nothing was changed.
    """
    chosen = _VERBS[verb]

    async def plan(change: Change) -> BulkChange:
        permitted: list[FoundEndpoint] = []
        rejected: dict[str, str] = {}
        for each in await find_endpoints(change, names, owner):
            try:
                chosen.require(each)
                permitted.append(each)
            except Conflict as conflict:
                rejected[each.name] = str(conflict)
        planned = await chosen.plan(change, permitted, comment) if permitted else []
        if dry_run:
            change.discard()
        return BulkChange(
            dry_run,
            [each.name for each in planned if each.changed],
            [each.name for each in planned if not each.changed],
            rejected,
            sum(each.unblocked for each in planned),
        )

    return await make_change(connection, schema, actor, plan)

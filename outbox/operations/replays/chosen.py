"""Events that are chosen for a backfill, by their ids or by their key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model.text import count
from outbox.errors import NotFound, UsageError
from outbox.operations.events.queries import FIND_BY_KEY, find_events
from outbox.operations.rows import ID_MAX
from outbox.store.connection.connect import map_errors
from outbox.store.retention.erasure import PLAN_BY_INDEX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncpg import Connection

    from outbox.operations.criteria import Criteria

CHOSEN_EVENTS_MAX = 1000


async def find_chosen(
    connection: Connection[Any],
    schema: str,
    criteria: Criteria,
    *,
    events: Sequence[str] = (),
    key: str | None = None,
    once_key: Callable[[str], str] = str,
) -> list[int] | None:
    """Find the outbox ids of chosen events; None: none are chosen, so the criteria select.

    Args:
        criteria: their tenant restricts both; the rest of them restricts a key.
        events: an event id, X-Delivery, idempotency key or outbox id each.
        key: all events with this ordering key.
        once_key: the stored form of an idempotency key.

    Raises:
        NotFound: there is no such event, or the key has none.
        UsageError: there are more than `CHOSEN_EVENTS_MAX`; or one is named by an ordering key.
    """
    if events and key is not None:
        raise UsageError("give events or a key, not both")
    if len(events) > CHOSEN_EVENTS_MAX:
        raise UsageError(f"at most {CHOSEN_EVENTS_MAX} events; use since for more")
    if key is not None:
        return await _find_by_key(connection, schema, criteria, key)
    if not events:
        return None
    found: set[int] = set()
    for text in events:
        match = await find_events(
            connection, schema, text, tenant=criteria.tenant, once_key=once_key(text)
        )
        if match.by == "key":
            raise UsageError(
                f'"{text[:60]}" is an ordering key: give it as key, for all its events'
            )
        found.update(match.outbox_ids)
    return sorted(found)


async def _find_by_key(
    connection: Connection[Any], schema: str, criteria: Criteria, key: str
) -> list[int]:
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(PLAN_BY_INDEX)
            only = await criteria.resolve(connection)
            rows = await connection.fetch(
                FIND_BY_KEY, ID_MAX, CHOSEN_EVENTS_MAX + 1, *only.arguments, key
            )
    if len(rows) > CHOSEN_EVENTS_MAX:
        raise UsageError(
            f"the key has more than {count(CHOSEN_EVENTS_MAX, 'event')}; select some by since and "
            "until"
        )
    if not rows:
        raise NotFound(f'no event has the key "{key[:60]}"')
    return sorted(row["outbox_id"] for row in rows)

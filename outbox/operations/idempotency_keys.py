"""Once keys as a person looks at them: what is claimed, since when, and until when.

A key that was never reset and has expired keeps its row, so that it can be told what
it stood for; whoever claims it next takes the row over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from outbox.errors import NotFound
from outbox.store.connection.connect import map_errors
from outbox.store.erasure import PLAN_BY_INDEX
from outbox.store.routing_change import write_journal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

State = Literal["held", "expired", "claimed-without-event"]
"""`claimed-without-event`: held by whoever never published what the key was claimed for."""
STATES: tuple[State, ...] = get_args(State)

# now(), which is the same all the while, so that the rest can be planned around it.
_COLUMNS = """
SELECT key, event_id, claimed_at, expires_at, resets,
       CASE WHEN expires_at <= now() THEN 'expired'
            WHEN event_id IS NULL THEN 'claimed-without-event'
            ELSE 'held' END AS state
  FROM once
"""

# By key, in the order of its characters.  A prefix is a range of keys, too ($2 to $3).
# What is left of the CASE, when $6 is known, the planner has statistics of.
LIST_ONCE = f"""
SELECT * FROM ({_COLUMNS}) o
 WHERE key > $1 AND key >= $2 AND ($3::text IS NULL OR key < $3)
   AND ($4::timestamptz IS NULL OR claimed_at >= $4)
   AND ($5::timestamptz IS NULL OR claimed_at < $5)
   AND CASE $6::text WHEN 'held' THEN event_id IS NOT NULL AND expires_at > now()
                     WHEN 'expired' THEN expires_at <= now()
                     WHEN 'claimed-without-event' THEN event_id IS NULL AND expires_at > now()
                     ELSE true END
 ORDER BY key LIMIT $7
"""  # noqa: S608 (constants only)

GET_ONCE = f"{_COLUMNS} WHERE key = $1"

FIND_EVENTS = "SELECT key, event_id FROM once WHERE key = ANY ($1) AND event_id IS NOT NULL"

RESET_ONCE = """
UPDATE once SET expires_at = clock_timestamp(), resets = resets + 1
 WHERE key = $1 AND expires_at > clock_timestamp()
RETURNING event_id::text AS event, claimed_at
"""

# Through the index of bloom filters; or what a dead letter kept of it.
READ_TYPE = """
SELECT type FROM outbox WHERE event_id = $1
 UNION ALL
(SELECT type FROM dead_letter WHERE event_id = $1 AND type IS NOT NULL LIMIT 1)
 LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class OnceRow:
    """A once key."""

    key: str
    state: State
    event_id: UUID | None
    """None: claimed, and its event was never published."""
    claimed_at: datetime
    expires_at: datetime
    """From then on it can be claimed anew."""
    resets: int
    """How often it was freed before that."""


@dataclass(frozen=True, slots=True)
class OnceDetail:
    """A once key, and of what type its event is."""

    row: OnceRow
    type: str | None
    """None: there is no event, or it is gone with its retention."""


async def page(
    connection: Connection[Any],
    schema: str,
    *,
    prefix: str = "",
    since: datetime | None = None,
    until: datetime | None = None,
    state: State | None = None,
    limit: int = 100,
    after: str = "",
) -> list[OnceRow]:
    """Once keys by key, at most `limit`, the ones behind `after`.

    Args:
        prefix: what the key begins with.
        since, until: when it was claimed, the first included.
    """
    with map_errors(schema):
        async with connection.transaction(isolation="read_committed", readonly=True):
            # A plan of its own each time: which index is the better one depends on
            # what is asked for.
            await connection.execute("SET LOCAL plan_cache_mode = force_custom_plan")
            rows = await connection.fetch(
                LIST_ONCE, after, prefix, _behind(prefix), since, until, state, limit
            )
    return [_row(row) for row in rows]


async def get(connection: Connection[Any], schema: str, key: str) -> OnceDetail:
    """One once key.

    Raises:
        NotFound: it was never claimed.
    """
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(PLAN_BY_INDEX)
            row = await connection.fetchrow(GET_ONCE, _known(key))
            if row is None:
                raise _unknown(key)
            event_id = row["event_id"]
            of_type = event_id and await connection.fetchval(READ_TYPE, event_id)
    return OnceDetail(_row(row), of_type)


async def reset(connection: Connection[Any], schema: str, key: str, *, actor: str) -> bool:
    """Free a once key, so that its next event is published again.

    Returns:
        False: it was free already.

    Raises:
        NotFound: it was never claimed.
    """
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="read_committed"):
            row = await connection.fetchrow(RESET_ONCE, _known(key))
            if row is None:
                if await connection.fetchrow(GET_ONCE, key) is None:
                    raise _unknown(key)
                return False
            about = {"key": key, **row}
            await write_journal(connection, "once_reset", actor, None, about)
    return True


async def events_of(
    connection: Connection[Any], schema: str, keys: Sequence[str]
) -> dict[str, UUID]:
    """The events that were published for once keys; a key without one is left out."""
    if not keys:
        return {}
    with map_errors(schema):
        rows = await connection.fetch(FIND_EVENTS, keys)
    return {row["key"]: row["event_id"] for row in rows}


def _behind(prefix: str) -> str | None:
    """What all keys with this prefix lie below; None: nothing does."""
    # The last character's successor, which is what its bytes' successor is in UTF-8.
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return None
    following = ord(kept[-1]) + 1
    # Half of a surrogate pair is no character.
    return kept[:-1] + chr(0xE000 if following == 0xD800 else following)


def _known(key: str) -> str:
    if "\0" in key:  # Which no text of PostgreSQL's holds.
        raise _unknown(key)
    return key


def _unknown(key: str) -> NotFound:
    return NotFound(f'the once key "{key}" was never claimed; see: outbox once list')


def _row(row: Any) -> OnceRow:
    return OnceRow(
        key=row["key"],
        state=row["state"],
        event_id=row["event_id"],
        claimed_at=row["claimed_at"],
        expires_at=row["expires_at"],
        resets=row["resets"],
    )

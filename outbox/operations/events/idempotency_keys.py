"""Idempotency keys (`once=`): listing, details and reset.

An expired key keeps its row, so its event can still be shown, until the key is claimed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from outbox.errors import NotFound
from outbox.operations.criteria import absolute_time, read_now
from outbox.operations.pages import convert, page_of
from outbox.operations.rows import RowPage, from_row
from outbox.store.change import make_change
from outbox.store.connection.connect import map_errors
from outbox.store.retention.erasure import PLAN_BY_INDEX
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.criteria import When
    from outbox.store.change import Change

IdempotencyKeyState = Literal["held", "expired", "claimed-without-event"]
"""`claimed-without-event`: the key was claimed, but its event was never published."""
STATES: tuple[IdempotencyKeyState, ...] = get_args(IdempotencyKeyState)

# now() is stable within a transaction, so the planner can use it as a constant.
_COLUMNS = """
SELECT key, event_id, claimed_at, expires_at, resets,
       CASE WHEN expires_at <= now() THEN 'expired'
            WHEN event_id IS NULL THEN 'claimed-without-event'
            ELSE 'held' END AS state
  FROM idempotency_key
"""

# By key, in the order of code points.  A prefix is a range of keys ($2 to $3).  With a known $6
# the planner simplifies the CASE to a condition that it has statistics for.
LIST_KEYS = f"""
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

GET_KEY = f"{_COLUMNS} WHERE key = $1"

FIND_EVENTS = (
    "SELECT key, event_id FROM idempotency_key WHERE key = ANY ($1) AND event_id IS NOT NULL"
)

READ_DIGEST = "SELECT request_digest FROM idempotency_key WHERE key = $1"

# Aborts if the key has another claim than the planned one.
RESET_KEY = WriteStatement(
    "reset_key",
    """
WITH reset AS (
    UPDATE idempotency_key SET expires_at = clock_timestamp(), resets = resets + 1
     WHERE key = $1 AND claimed_at = $2 AND expires_at > clock_timestamp() RETURNING 1)
SELECT abort_unless(EXISTS (SELECT FROM reset))
""",
)

# By the bloom-filter index, or from the copy in a dead letter.
READ_TYPE = """
SELECT type FROM outbox WHERE event_id = $1
 UNION ALL
(SELECT type FROM dead_letter WHERE event_id = $1 AND type IS NOT NULL LIMIT 1)
 LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class IdempotencyKeyRow:
    """An idempotency key in a listing."""

    key: str
    state: IdempotencyKeyState
    event_id: UUID | None
    """The event's id; None: the key was claimed, but its event was never published."""
    claimed_at: datetime
    expires_at: datetime
    """The time from which on the key can be claimed again."""
    resets: int
    """Number of resets before expiry."""


@dataclass(frozen=True, slots=True)
class IdempotencyKey(IdempotencyKeyRow):
    """An idempotency key with the type of its event."""

    type: str | None
    """The event's type; None: there is no event, or retention dropped it."""


@dataclass(frozen=True, slots=True)
class ResetKey:
    """Result of resetting an idempotency key."""

    key: str
    reset: bool
    """Whether the key was reset; False: it was free already."""


async def list_keys(
    connection: Connection[Any],
    schema: str,
    *,
    prefix: str = "",
    since: When | None = None,
    until: When | None = None,
    state: IdempotencyKeyState | None = None,
    limit: int = 100,
    after: str = "",
) -> RowPage[IdempotencyKeyRow]:
    """List idempotency keys by key, at most `limit`, starting after the key `after`.

    Args:
        prefix: only keys with this prefix.
        since: only keys claimed at or after this time.
        until: only keys claimed before this time.
    """
    with map_errors(schema):
        async with connection.transaction(isolation="read_committed", readonly=True):
            # A custom plan per query: the best index depends on the parameters.
            await connection.execute("SET LOCAL plan_cache_mode = force_custom_plan")
            now = await read_now(connection)
            claimed = absolute_time(since, now), absolute_time(until, now)
            rows = await connection.fetch(
                LIST_KEYS, after, prefix, _prefix_end(prefix), *claimed, state, limit + 1
            )
    return await convert(page_of(rows, limit), lambda row: from_row(IdempotencyKeyRow, row))


async def get_key(connection: Connection[Any], schema: str, key: str) -> IdempotencyKey:
    """Read one idempotency key.

    Raises:
        NotFound: the key was never claimed.
    """
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(PLAN_BY_INDEX)
            row = await connection.fetchrow(GET_KEY, _validate_key(key))
            if row is None:
                raise _key_not_found(key)
            event_id = row["event_id"]
            of_type = event_id and await connection.fetchval(READ_TYPE, event_id)
    return from_row(IdempotencyKey, row, type=of_type)


async def reset_key(connection: Connection[Any], schema: str, key: str, *, actor: str) -> ResetKey:
    """Reset an idempotency key, so that the next publish with it succeeds.

    Raises:
        NotFound: the key was never claimed.
    """

    async def plan(change: Change) -> ResetKey:
        row = await change.db.fetchrow(GET_KEY, _validate_key(key))
        if row is None:
            raise _key_not_found(key)
        if row["state"] == "expired":
            return ResetKey(key, reset=False)
        change.write(RESET_KEY, key, row["claimed_at"])
        event = row["event_id"] and str(row["event_id"])
        change.journal(
            "once_reset", None, {"key": key, "event": event, "claimed_at": row["claimed_at"]}
        )
        return ResetKey(key, reset=True)

    return await make_change(connection, schema, actor, plan, routing=False)


async def find_events(
    connection: Connection[Any], schema: str, keys: Sequence[str]
) -> dict[str, UUID]:
    """Find the events of idempotency keys; keys without an event are omitted."""
    if not keys:
        return {}
    with map_errors(schema):
        rows = await connection.fetch(FIND_EVENTS, keys)
    return {row["key"]: row["event_id"] for row in rows}


async def read_request_digest(connection: Connection[Any], schema: str, key: str) -> bytes | None:
    """The digest of the request whose Idempotency-Key claimed a key; None: claimed otherwise."""
    with map_errors(schema):
        digest: bytes | None = await connection.fetchval(READ_DIGEST, key)
    return digest


def _prefix_end(prefix: str) -> str | None:
    """The exclusive upper bound of keys with this prefix; None: there is none."""
    # The successor of the last code point; UTF-8 preserves the order of code points.
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return None
    following = ord(kept[-1]) + 1
    # Surrogates are not valid code points.
    return kept[:-1] + chr(0xE000 if following == 0xD800 else following)


def _validate_key(key: str) -> str:
    if "\0" in key:  # Not allowed in a PostgreSQL text.
        raise _key_not_found(key)
    return key


def _key_not_found(key: str) -> NotFound:
    return NotFound(f'the once key "{key}" was never claimed; see: outbox once list')

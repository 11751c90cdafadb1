"""Tokens of receivers: one endpoint's, to fetch what its lanes delivered."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model.api_token import SECRET_BYTES, digest, format_fetch_token, is_of
from outbox.operations.endpoint_changes import lock
from outbox.store.connection.connect import map_errors
from outbox.store.routing_change import write_journal

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

OVERLAP_S = 86400.0

ADD_TOKEN = """
INSERT INTO fetch_token (endpoint_id, hash, created_by) VALUES ($1, $2, $3) RETURNING id
"""  # noqa: S105 (no password)

# Those before the new one: they expire, and those that have are not kept.
END_TOKENS = """
WITH gone AS (
    DELETE FROM fetch_token
     WHERE endpoint_id = $1 AND id < $2 AND ($3 = 0 OR expires_at <= clock_timestamp()))
UPDATE fetch_token
   SET expires_at = least(expires_at, clock_timestamp() + make_interval(secs => $3))
 WHERE endpoint_id = $1 AND id < $2 AND $3 > 0
   AND (expires_at IS NULL OR expires_at > clock_timestamp())
RETURNING expires_at
"""

REVOKE_TOKENS = "DELETE FROM fetch_token WHERE endpoint_id = $1 RETURNING id"

# Whose it is, as long as that is not removed.  `stale`: that it is used was not written
# lately.
FIND_TOKEN = """
SELECT t.id, t.endpoint_id, e.name, t.hash,
       t.last_used_at IS NULL OR t.last_used_at < clock_timestamp() - interval '1 minute' AS stale
  FROM fetch_token t JOIN endpoint e ON e.id = t.endpoint_id AND e.state <> 'removed'
 WHERE t.hash = $1 AND (t.expires_at IS NULL OR t.expires_at > clock_timestamp())
"""  # noqa: S105

NOTE_USE = """
UPDATE fetch_token SET last_used_at = clock_timestamp()
 WHERE id = $1
   AND (last_used_at IS NULL OR last_used_at < clock_timestamp() - interval '1 minute')
"""


@dataclass(frozen=True, slots=True)
class FetchToken:
    """A new token, shown this once."""

    id: UUID
    """Of the endpoint."""
    name: str
    token: str
    old_until: datetime | None
    """The last of the old ones is good until then; None: none is."""


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Whose token it is."""

    endpoint_id: UUID
    name: str


async def add(
    connection: Connection[Any],
    schema: str,
    name: str,
    *,
    actor: str,
    overlap_s: float = OVERLAP_S,
) -> FetchToken:
    """A new token for an endpoint's receiver; the old ones are good for `overlap_s` more.

    Raises:
        NotFound: there is no endpoint of that name.
    """
    token = format_fetch_token(secrets.token_bytes(SECRET_BYTES))
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="read_committed"):
            found = await lock(connection, name)
            made = await connection.fetchval(ADD_TOKEN, found.id, digest(token), actor)
            rows = await connection.fetch(END_TOKENS, found.id, made, float(overlap_s))
            told = {"name": name, "overlap_s": overlap_s}
            await write_journal(connection, "fetch_token_added", actor, found.id, told)
    old = [row["expires_at"] for row in rows]
    return FetchToken(found.id, name, token, max(old, default=None))


async def revoke(connection: Connection[Any], schema: str, name: str, *, actor: str) -> int:
    """End all tokens of an endpoint's receiver; returns how many there were.

    Raises:
        NotFound: there is no endpoint of that name.
    """
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="read_committed"):
            found = await lock(connection, name)
            gone = await connection.fetch(REVOKE_TOKENS, found.id)
            if gone:
                told = {"name": name, "tokens": len(gone)}
                await write_journal(connection, "fetch_tokens_revoked", actor, found.id, told)
    return len(gone)


async def find(connection: Connection[Any], schema: str, token: str) -> Fetcher | None:
    """Whose token this is, if it is good; that it is used is written."""
    with map_errors(schema):
        row = await connection.fetchrow(FIND_TOKEN, digest(token))
        if row is None or not is_of(token, row["hash"]):
            return None
        if row["stale"]:
            await connection.execute(NOTE_USE, row["id"])
    return Fetcher(row["endpoint_id"], row["name"])

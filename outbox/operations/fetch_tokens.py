"""Fetch tokens: a receiver's access to the delivered events of its endpoint."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model.api_token import SECRET_BYTES, digest, format_fetch_token, matches_digest
from outbox.operations.endpoint_changes import lock_endpoint
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

# Sets the expiry of older tokens, and deletes expired ones.
END_TOKENS = """
WITH deleted AS (
    DELETE FROM fetch_token
     WHERE endpoint_id = $1 AND id < $2 AND ($3 = 0 OR expires_at <= clock_timestamp()))
UPDATE fetch_token
   SET expires_at = least(expires_at, clock_timestamp() + make_interval(secs => $3))
 WHERE endpoint_id = $1 AND id < $2 AND $3 > 0
   AND (expires_at IS NULL OR expires_at > clock_timestamp())
RETURNING expires_at
"""

REVOKE_TOKENS = "DELETE FROM fetch_token WHERE endpoint_id = $1 RETURNING id"

# The endpoint of a token, unless it is removed.  `stale`: last_used_at is older than a minute.
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
    """A new fetch token, shown only now."""

    id: UUID
    """Id of the endpoint."""
    name: str
    token: str
    old_until: datetime | None
    """Expiry of the last old token; None: no old token is valid."""


@dataclass(frozen=True, slots=True)
class Fetcher:
    """The endpoint that a fetch token belongs to."""

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
    """Add a fetch token for an endpoint; old tokens stay valid for `overlap_s` seconds.

    Raises:
        NotFound: there is no endpoint of that name.
    """
    token = format_fetch_token(secrets.token_bytes(SECRET_BYTES))
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="read_committed"):
            found = await lock_endpoint(connection, name)
            made = await connection.fetchval(ADD_TOKEN, found.id, digest(token), actor)
            rows = await connection.fetch(END_TOKENS, found.id, made, float(overlap_s))
            data = {"name": name, "overlap_s": overlap_s}
            await write_journal(connection, "fetch_token_added", actor, found.id, data)
    old = [row["expires_at"] for row in rows]
    return FetchToken(found.id, name, token, max(old, default=None))


async def revoke(connection: Connection[Any], schema: str, name: str, *, actor: str) -> int:
    """Revoke all fetch tokens of an endpoint; returns their number.

    Raises:
        NotFound: there is no endpoint of that name.
    """
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="read_committed"):
            found = await lock_endpoint(connection, name)
            deleted = await connection.fetch(REVOKE_TOKENS, found.id)
            if deleted:
                data = {"name": name, "tokens": len(deleted)}
                await write_journal(connection, "fetch_tokens_revoked", actor, found.id, data)
    return len(deleted)


async def find_fetcher(connection: Connection[Any], schema: str, token: str) -> Fetcher | None:
    """Find the endpoint of a valid fetch token, and record its use."""
    with map_errors(schema):
        row = await connection.fetchrow(FIND_TOKEN, digest(token))
        if row is None or not matches_digest(token, row["hash"]):
            return None
        if row["stale"]:
            await connection.execute(NOTE_USE, row["id"])
    return Fetcher(row["endpoint_id"], row["name"])

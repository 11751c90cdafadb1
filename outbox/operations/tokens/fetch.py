"""Fetch tokens: a receiver's access to the delivered events of its endpoint."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model.api_token import SECRET_BYTES, digest, format_fetch_token, matches_digest
from outbox.operations.endpoints.found import find_endpoint
from outbox.operations.endpoints.live_secrets import OVERLAP_S
from outbox.store.change import make_change
from outbox.store.connection.connect import map_errors
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

    from outbox.store.change import Change

ADD_TOKEN = WriteStatement(
    "add_fetch_token",
    "INSERT INTO fetch_token (endpoint_id, hash, created_by) VALUES ($1, $2, $3)",
)

# Locks the endpoint, so that its tokens do not change until the end of the message.  FOR NO KEY
# UPDATE: it does not exclude new dead letters, whose foreign key refers to the row.
LOCK_ENDPOINT = WriteStatement(
    "lock_endpoint", "SELECT FROM endpoint WHERE id = $1 FOR NO KEY UPDATE"
)

# The time at which old tokens expire if they stay valid for $2 seconds, and the expiry of the last
# one; NULL: none is valid.
READ_EXPIRY = """
SELECT at.until,
       (SELECT max(least(expires_at, at.until)) FROM fetch_token
         WHERE endpoint_id = $1 AND $2 > 0
           AND (expires_at IS NULL OR expires_at > clock_timestamp())) AS old_until
  FROM (SELECT clock_timestamp() + make_interval(secs => $2) AS until) at
"""

# Lets tokens expire at $3, and deletes expired ones; with an overlap ($2) of 0, deletes all.
# Aborts if the expiry of the last old token is not the planned one, $4.
END_TOKENS = WriteStatement(
    "end_fetch_tokens",
    """
WITH deleted AS (
    DELETE FROM fetch_token
     WHERE endpoint_id = $1 AND ($2::float8 = 0 OR expires_at <= statement_timestamp())),
ended AS (
    UPDATE fetch_token SET expires_at = least(expires_at, $3::timestamptz)
     WHERE endpoint_id = $1 AND $2::float8 > 0
       AND (expires_at IS NULL OR expires_at > statement_timestamp())
    RETURNING expires_at)
SELECT abort_unless((SELECT max(expires_at) FROM ended) IS NOT DISTINCT FROM $4::timestamptz)
""",
)

COUNT_TOKENS = "SELECT count(*) FROM fetch_token WHERE endpoint_id = $1"

# Deletes the tokens of an endpoint, and aborts if their number is not the planned one.
REVOKE_TOKENS = WriteStatement(
    "revoke_fetch_tokens",
    """
WITH revoked AS (DELETE FROM fetch_token WHERE endpoint_id = $1 RETURNING 1)
SELECT abort_unless((SELECT count(*) FROM revoked) = $2)
""",
)

# The endpoint of a token, unless it is removed.  `stale`: last_used_at is older than a minute, or
# in the future, by a clock that was wrong.
FIND_TOKEN = """
SELECT t.id, t.endpoint_id, e.name, e.tenant, t.hash,
       coalesce(t.last_used_at NOT BETWEEN clock_timestamp() - interval '1 minute'
                                      AND clock_timestamp(), true) AS stale
  FROM fetch_token t JOIN endpoint e ON e.id = t.endpoint_id AND e.state <> 'removed'
 WHERE t.hash = $1 AND (t.expires_at IS NULL OR t.expires_at > clock_timestamp())
"""  # noqa: S105

NOTE_USE = WriteStatement(
    "note_fetch_token_use",
    """
UPDATE fetch_token SET last_used_at = clock_timestamp()
 WHERE id = $1
   AND coalesce(last_used_at NOT BETWEEN clock_timestamp() - interval '1 minute'
                                     AND clock_timestamp(), true)
""",
)


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
class RevokedFetchTokens:
    """The number of fetch tokens of an endpoint that were revoked."""

    name: str
    revoked: int


@dataclass(frozen=True, slots=True)
class Fetcher:
    """The endpoint that a fetch token belongs to."""

    endpoint_id: UUID
    name: str
    tenant: str | None


async def add_fetch_token(
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

    async def plan(change: Change) -> FetchToken:
        endpoint = await find_endpoint(change, name)
        until, old_until = await change.db.fetchrow(READ_EXPIRY, endpoint.id, float(overlap_s))
        change.write(LOCK_ENDPOINT, endpoint.id)
        change.write(END_TOKENS, endpoint.id, float(overlap_s), until, old_until)
        change.write(ADD_TOKEN, endpoint.id, digest(token), actor)
        change.journal("fetch_token_added", endpoint.id, {"name": name, "overlap_s": overlap_s})
        return FetchToken(endpoint.id, name, token, old_until)

    return await make_change(connection, schema, actor, plan, routing=False)


async def revoke_fetch_tokens(
    connection: Connection[Any], schema: str, name: str, *, actor: str
) -> RevokedFetchTokens:
    """Revoke all fetch tokens of an endpoint.

    Raises:
        NotFound: there is no endpoint of that name.
    """

    async def plan(change: Change) -> RevokedFetchTokens:
        endpoint = await find_endpoint(change, name)
        tokens: int = await change.db.fetchval(COUNT_TOKENS, endpoint.id)
        if tokens:
            change.write(LOCK_ENDPOINT, endpoint.id)
            change.write(REVOKE_TOKENS, endpoint.id, tokens)
            change.journal("fetch_tokens_revoked", endpoint.id, {"name": name, "tokens": tokens})
        return RevokedFetchTokens(name, tokens)

    return await make_change(connection, schema, actor, plan, routing=False)


async def find_fetcher(connection: Connection[Any], schema: str, token: str) -> Fetcher | None:
    """Find the endpoint of a valid fetch token, and record its use."""
    with map_errors(schema):
        row = await connection.fetchrow(FIND_TOKEN, digest(token))
        if row is None or not matches_digest(token, row["hash"]):
            return None
        if row["stale"]:
            await connection.write(NOTE_USE, row["id"])
    return Fetcher(row["endpoint_id"], row["name"], row["tenant"])

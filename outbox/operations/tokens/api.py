"""API tokens: add, list, revoke and look up."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import orjson

from outbox.core.model.api_token import SECRET_BYTES, digest, format_token, matches_digest
from outbox.errors import Conflict, NotFound
from outbox.operations.pages import convert, page_of
from outbox.operations.rows import RowPage, from_row
from outbox.store.change import make_change, make_change_and_read
from outbox.store.connection.connect import map_errors
from outbox.store.routing_change import ADD_TO_JOURNAL, READ_NOW
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.model.api_token import Scope, TokenSettings
    from outbox.store.change import Change

TokenState = Literal["live", "expired", "revoked"]

# Without the hash, which only the lookup of a token selects.
_COLUMNS = """id, name, scopes, tenant, created_at, created_by, expires_at, revoked_at, revoked_by,
       last_used_at,
       CASE WHEN revoked_at IS NOT NULL THEN 'revoked'
            WHEN expires_at <= clock_timestamp() THEN 'expired'
            ELSE 'live' END AS state"""

# In the order of creation; a name can be reused.
LIST_TOKENS = f"""
SELECT {_COLUMNS}
  FROM token
 WHERE id > $1 AND ($2 OR revoked_at IS NULL)
   AND ($4::text IS NULL OR strpos(lower(name), lower($4)) > 0)
   AND ($5::text IS NULL OR tenant = $5) AND ($6::text IS NULL OR $6 = ANY (scopes))
 ORDER BY id LIMIT $3
"""  # noqa: S608 (constants only)

# By the unique index of hashes.  `stale`: last_used_at is older than a minute, or in
# the future, by a clock that was wrong.
FIND_TOKEN = f"""
SELECT {_COLUMNS}, hash,
       coalesce(last_used_at NOT BETWEEN clock_timestamp() - interval '1 minute'
                                      AND clock_timestamp(), true) AS stale
  FROM token WHERE hash = $1
"""  # noqa: S608 (constants only)

# At most once a minute, even with concurrent requests.
NOTE_USE = WriteStatement(
    "note_token_use",
    """
UPDATE token SET last_used_at = clock_timestamp()
 WHERE id = $1
   AND coalesce(last_used_at NOT BETWEEN clock_timestamp() - interval '1 minute'
                                     AND clock_timestamp(), true)
""",
)

# Frees the name of an expired token; its row is kept as revoked.
END_EXPIRED = WriteStatement(
    "end_expired_token",
    """
UPDATE token SET revoked_at = expires_at, revoked_by = $2
 WHERE name = $1 AND revoked_at IS NULL AND expires_at <= clock_timestamp()
""",
)

ADD_TOKEN = WriteStatement(
    "add_token",
    """
INSERT INTO token (name, hash, scopes, tenant, created_by, created_at, expires_at)
VALUES ($1, $2, $3, $4, $5, $6, $6::timestamptz + make_interval(secs => $7))
""",
)

# A token that has a name, and whether it is live; and the token that was added at some time.
FIND_NAME = """
SELECT id, expires_at IS NULL OR expires_at > clock_timestamp() AS is_live FROM token
 WHERE name = $1 AND revoked_at IS NULL
"""
READ_ADDED = "SELECT id, expires_at FROM token WHERE name = $1 AND created_at = $2"

REVOKE_TOKEN = WriteStatement(
    "revoke_token",
    """
WITH revoked AS (
    UPDATE token SET revoked_at = clock_timestamp(), revoked_by = $2
     WHERE id = $1 AND revoked_at IS NULL RETURNING 1)
SELECT abort_unless(EXISTS (SELECT FROM revoked))
""",
)


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A token in a listing, without its secret, of which only a hash is stored."""

    id: int
    name: str
    state: TokenState
    scopes: tuple[Scope, ...]
    tenant: str | None
    created_at: datetime
    created_by: str
    expires_at: datetime | None
    revoked_at: datetime | None
    revoked_by: str | None
    last_used_at: datetime | None
    """The time of the last use, to the minute."""


@dataclass(frozen=True, slots=True)
class NewToken:
    """A new token; the secret is shown only now."""

    id: int
    name: str
    secret: str
    scopes: tuple[Scope, ...]
    tenant: str | None
    created_at: datetime
    expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class RevokedToken:
    """A revoked token."""

    revoked: str
    """Its name."""


async def add_token(
    connection: Connection[Any], schema: str, settings: TokenSettings, *, actor: str
) -> NewToken:
    """Create a token.

    Raises:
        Conflict: a live token has this name.
    """
    secret = format_token(secrets.token_bytes(SECRET_BYTES))

    async def plan(change: Change) -> datetime:
        created_at: datetime = await change.db.fetchval(READ_NOW)
        named = await change.db.fetchrow(FIND_NAME, settings.name)
        if named is not None and named["is_live"]:
            raise Conflict(
                f'token "{settings.name}" exists already; choose another name, or run: '
                f"outbox token revoke {settings.name}"
            )
        change.write(END_EXPIRED, settings.name, actor)
        change.write(
            ADD_TOKEN,
            settings.name,
            digest(secret),
            settings.scopes,
            settings.tenant,
            actor,
            created_at,
            settings.expires_in_s,
        )
        data = {"name": settings.name, "scopes": settings.scopes, "tenant": settings.tenant}
        change.journal("token_added", None, data)
        return created_at

    async def read_back(db: Any, _: UUID, created_at: datetime) -> NewToken:
        token_id, expires_at = await db.fetchrow(READ_ADDED, settings.name, created_at)
        return NewToken(
            id=token_id,
            name=settings.name,
            secret=secret,
            scopes=settings.scopes,
            tenant=settings.tenant,
            created_at=created_at,
            expires_at=expires_at,
        )

    return await make_change_and_read(connection, schema, actor, plan, read_back, routing=False)


async def list_tokens(
    connection: Connection[Any],
    schema: str,
    *,
    revoked: bool = False,
    search: str | None = None,
    tenant: str | None = None,
    scope: Scope | None = None,
    limit: int = 100,
    after: int = 0,
) -> RowPage[TokenRow]:
    """List tokens by id, at most `limit`, starting after the id `after`.

    Args:
        revoked: include revoked tokens.
        search: only names that contain this text, in upper or lower case.
        tenant: only tokens that are restricted to this tenant.
        scope: only tokens with this scope.
    """
    with map_errors(schema):
        rows = await connection.fetch(LIST_TOKENS, after, revoked, limit + 1, search, tenant, scope)
    return await convert(page_of(rows, limit), _token)


async def revoke_token(
    connection: Connection[Any], schema: str, name: str, *, actor: str
) -> RevokedToken:
    """Revoke a token; its name can be reused.

    Raises:
        NotFound: no live token has this name.
    """

    async def plan(change: Change) -> RevokedToken:
        named = await change.db.fetchrow(FIND_NAME, name)
        if named is None:
            raise NotFound(f'there is no token "{name}"; see: outbox token list')
        change.write(REVOKE_TOKEN, named["id"], actor)
        change.journal("token_revoked", None, {"name": name})
        return RevokedToken(name)

    return await make_change(connection, schema, actor, plan, routing=False)


async def find_token(connection: Connection[Any], schema: str, secret: str) -> TokenRow | None:
    """Find a token by its secret, in any state, and record its use."""
    with map_errors(schema):
        row = await connection.fetchrow(FIND_TOKEN, digest(secret))
        if row is None or not matches_digest(secret, row["hash"]):
            return None
        if row["stale"] and row["state"] == "live":
            await connection.write(NOTE_USE, row["id"])
    return _token(row)


async def record_failed_logins(
    connection: Connection[Any], schema: str, data: Mapping[str, Any]
) -> None:
    """Write a journal entry about failed logins, with their count."""
    with map_errors(schema):
        text = orjson.dumps(dict(data)).decode()
        await connection.write(ADD_TO_JOURNAL, "logins_failed", "admin", None, text)


def _token(row: Any) -> TokenRow:
    return from_row(TokenRow, row, scopes=tuple(row["scopes"]))

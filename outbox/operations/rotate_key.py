"""Key rotation: encrypts every stored secret with the first key of the vault.

Each endpoint is processed in its own transaction, under its row lock, so a concurrent secret
rotation waits briefly; deliveries are not affected.  An interrupted run can be repeated: secrets
already encrypted with the first key are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import orjson

from outbox.store.connection.connect import map_errors
from outbox.store.connection.secrets import (
    IDENTITY,
    SIGNING,
    UnreadableSecret,
    is_sealed,
    unreadable_values,
)
from outbox.store.routing_change import LOCK_CURSOR, write_journal

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from asyncpg import Connection

    from outbox.store.connection.secrets import Vault

PAGE = 200
PASSES_MAX = 5
"""Other sessions may write secrets with an older key concurrently; the next pass encrypts these."""

COUNT_SECRETS = "SELECT key, count FROM count_secrets_by_key()"

ENDPOINTS = "SELECT count(*) FROM endpoint WHERE state <> 'removed'"

PAGE_OF_IDS = """
SELECT id FROM endpoint WHERE state <> 'removed' AND ($1::uuid IS NULL OR id > $1)
 ORDER BY id LIMIT $2
"""

# Rotation of a secret and changes of headers take the same lock.
LOCK = """
SELECT name, headers::text AS headers, identity FROM endpoint
 WHERE id = $1 AND state <> 'removed' FOR NO KEY UPDATE
"""

# Expired secrets are deleted, because their key may not be available.
FORGET_EXPIRED = """
DELETE FROM endpoint_secret WHERE endpoint_id = $1 AND expires_at <= clock_timestamp()
"""

SECRETS = "SELECT id, secret FROM endpoint_secret WHERE endpoint_id = $1"

WRITE_SECRET = "UPDATE endpoint_secret SET secret = $3 WHERE endpoint_id = $1 AND id = $2"  # noqa: S105

WRITE_ENDPOINT = "UPDATE endpoint SET headers = $2::text::jsonb, identity = $3 WHERE id = $1"


@dataclass(frozen=True, slots=True)
class SecretCount:
    """Number of secrets per encryption key."""

    key: str | None
    """Key id; None: stored in clear."""
    count: int


@dataclass(frozen=True, slots=True)
class RekeyProgress:
    """Progress and result of a key rotation."""

    key: str | None
    """Id of the new key; None: secrets are stored in clear."""
    endpoints: int = 0
    """Number of endpoints."""
    done: int = 0
    """Endpoints processed in the current pass."""
    secrets: int = 0
    """Secrets encrypted with the new key."""
    left: int = 0
    """Secrets not encrypted with the new key: unreadable, or written concurrently."""
    locked: tuple[str, ...] = field(default=())
    """Endpoints with secrets that could not be decrypted, with the reason."""


async def count_secrets(connection: Connection[Any], schema: str) -> list[SecretCount]:
    """Count the secrets by encryption key."""
    with map_errors(schema):
        return [SecretCount(**row) for row in await connection.fetch(COUNT_SECRETS)]


async def rekey(
    connection: Connection[Any],
    schema: str,
    vault: Vault,
    *,
    actor: str,
    force: bool = False,
    on_progress: Callable[[RekeyProgress], object] = lambda _: None,
) -> RekeyProgress:
    """Encrypt every secret with the vault's first key; skip secrets that it cannot decrypt.

    Args:
        force: continue even if a running relay lacks the new key.

    Raises:
        Conflict: a running relay lacks the new key.
    """
    with map_errors(schema, "operator"):
        if vault.key_id is not None and not force:
            await vault.require_key_on_relays(connection)
        done = RekeyProgress(vault.key_id, await connection.fetchval(ENDPOINTS))
        for _ in range(PASSES_MAX):
            done = replace(done, done=0, locked=())
            after = None
            while ids := [r["id"] for r in await connection.fetch(PAGE_OF_IDS, after, PAGE)]:
                for endpoint_id in ids:
                    async with connection.transaction(isolation="read_committed"):
                        done = await _endpoint(connection, endpoint_id, vault, done)
                    on_progress(done)
                after = ids[-1]
            async with connection.transaction(isolation="read_committed"):
                # Writers of secrets hold this lock, so they committed before, or see the new state.
                await connection.execute(LOCK_CURSOR)
                kept = [SecretCount(**row) for row in await connection.fetch(COUNT_SECRETS)]
                left = sum(each.count for each in kept if each.key != vault.key_id)
                done = replace(done, left=left)
                if left and not done.locked:
                    continue
                if done.secrets:
                    data = {"key": done.key, "secrets": done.secrets, "left": left}
                    await write_journal(connection, "secrets_rekeyed", actor, None, data)
                break
    return done


async def _endpoint(
    connection: Connection[Any], endpoint_id: UUID, vault: Vault, done: RekeyProgress
) -> RekeyProgress:
    row = await connection.fetchrow(LOCK, endpoint_id)
    if row is None:
        return done
    await connection.execute(FORGET_EXPIRED, endpoint_id)
    written, why = 0, ""
    for secret in await connection.fetch(SECRETS, endpoint_id):
        if vault.is_current(secret["secret"]):
            continue
        try:
            text = vault.open(secret["secret"], endpoint_id, SIGNING)
        except UnreadableSecret as locked:
            why = why or str(locked)
            continue
        encrypted = vault.seal(text, endpoint_id, SIGNING)
        await connection.execute(WRITE_SECRET, endpoint_id, secret["id"], encrypted)
        written += 1
    stored, identity = orjson.loads(row["headers"]), row["identity"]
    headers = {n: v for n, v in stored.items() if not vault.is_current(_stored(v))}
    opened = vault.open_headers(headers, endpoint_id)
    for locked_text in unreadable_values(opened):
        why = why or locked_text.why
    sealed = vault.seal_headers(opened, endpoint_id)
    encrypted = identity
    if identity is not None and not vault.is_current(identity):
        try:
            encrypted = vault.seal(
                vault.open(identity, endpoint_id, IDENTITY), endpoint_id, IDENTITY
            )
        except UnreadableSecret as locked:
            why = why or str(locked)
    changed = sum(sealed[name] != stored[name] for name in sealed)
    if changed or encrypted != identity:
        text = orjson.dumps({**stored, **sealed}).decode()
        await connection.execute(WRITE_ENDPOINT, endpoint_id, text, encrypted)
    written += changed + (encrypted != identity)
    locked_here = (f'endpoint "{row["name"]}": {why}',) if why else ()
    return replace(
        done,
        done=done.done + 1,
        secrets=done.secrets + written,
        locked=(*done.locked, *locked_here),
    )


def _stored(value: Any) -> str:
    """The stored text of a header value, encrypted or in clear."""
    if isinstance(value, str):
        # A plain string is in clear, even if it resembles encrypted text.
        return f"={value}" if is_sealed(value) else value
    sealed = value.get("sealed") if isinstance(value, dict) else None
    return sealed if isinstance(sealed, str) else ""

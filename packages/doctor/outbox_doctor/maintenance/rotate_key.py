"""Key rotation: encrypts every stored secret with the first key of the vault.

Each endpoint is read, and written in one message, which replaces only what is still as it was
read; another pass follows if something was written meanwhile.  Deliveries are not affected.  An
interrupted run can be repeated: secrets already encrypted with the first key are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import orjson

from outbox.store.change import document
from outbox.store.connection.connect import map_errors
from outbox.store.connection.secrets import (
    COMPAT,
    IDENTITY,
    SIGNING,
    UnreadableSecret,
    is_sealed,
    unreadable_values,
)
from outbox.store.routing_change import ADD_TO_JOURNAL, RAISE_VERSION
from outbox.store.sql.message import Private, WriteStatement

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from outbox.store.connection.secrets import Vault
    from outbox.store.connection.store_connection import StoreConnection
    from outbox.store.sql.message import WriteCall

ROTATED_PAGE = 200
PASSES_MAX = 5
"""Other sessions may write secrets with an older key concurrently; the next pass encrypts these."""

COUNT_SECRETS = "SELECT key, count FROM count_secrets_by_key()"

ENDPOINTS = "SELECT count(*) FROM endpoint WHERE state <> 'removed'"

PAGE_OF_IDS = """
SELECT id FROM endpoint WHERE state <> 'removed' AND ($1::uuid IS NULL OR id > $1)
 ORDER BY id LIMIT $2
"""

READ_ENDPOINT = """
SELECT name, headers::text AS headers, identity FROM endpoint
 WHERE id = $1 AND state <> 'removed'
"""

# Expired secrets are deleted, because their key may not be available.
DELETE_EXPIRED = WriteStatement(
    "delete_expired_secrets",
    "DELETE FROM endpoint_secret WHERE endpoint_id = $1 AND expires_at <= clock_timestamp()",
)

READ_SECRETS = """
SELECT id, secret, compat FROM endpoint_secret
 WHERE endpoint_id = $1 AND (expires_at IS NULL OR expires_at > clock_timestamp())
"""

# $1: {endpoint_id, id, old, new} of secrets, as a JSON array.
REPLACE_SECRETS = WriteStatement(
    "replace_secrets",
    """
UPDATE endpoint_secret s SET secret = r.new
  FROM jsonb_to_recordset($1::text::jsonb)
           AS r(endpoint_id uuid, id integer, old text, new text)
 WHERE s.endpoint_id = r.endpoint_id AND s.id = r.id AND s.secret = r.old
""",
)

# $1: {id, old_headers, headers, old_identity, identity} as a JSON object.
REPLACE_IN_ENDPOINT = WriteStatement(
    "replace_in_endpoint",
    """
UPDATE endpoint e SET headers = r.headers, identity = r.identity
  FROM jsonb_to_record($1::text::jsonb)
           AS r(id uuid, old_headers jsonb, headers jsonb, old_identity text, identity text)
 WHERE e.id = r.id AND e.headers = r.old_headers AND e.identity IS NOT DISTINCT FROM r.old_identity
""",
)

# Rejects every change that was planned before, and might write a secret with an older key.
REJECT_EARLIER_PLANS = WriteStatement("reject_earlier_plans", RAISE_VERSION)


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


async def count_secrets(connection: StoreConnection, schema: str) -> list[SecretCount]:
    """Count the secrets by encryption key."""
    with map_errors(schema):
        return [SecretCount(**row) for row in await connection.fetch(COUNT_SECRETS)]


async def rotate_key(
    connection: StoreConnection,
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
            while ids := [
                r["id"] for r in await connection.fetch(PAGE_OF_IDS, after, ROTATED_PAGE)
            ]:
                for endpoint_id in ids:
                    done = await _endpoint(connection, endpoint_id, vault, done)
                    on_progress(done)
                after = ids[-1]
            await connection.write(REJECT_EARLIER_PLANS)
            kept = [SecretCount(**row) for row in await connection.fetch(COUNT_SECRETS)]
            left = sum(each.count for each in kept if each.key != vault.key_id)
            done = replace(done, left=left)
            if left and not done.locked:
                continue
            if done.secrets:
                data = {"key": done.key, "secrets": done.secrets, "left": left}
                entry = ("secrets_rekeyed", actor, None, document(data))
                await connection.write(ADD_TO_JOURNAL, *entry)
            break
    return done


async def _endpoint(
    connection: StoreConnection, endpoint_id: UUID, vault: Vault, done: RekeyProgress
) -> RekeyProgress:
    row = await connection.fetchrow(READ_ENDPOINT, endpoint_id)
    if row is None:
        return done
    calls: list[WriteCall] = [(DELETE_EXPIRED, endpoint_id)]
    replaced: list[dict[str, Any]] = []
    reason = ""
    for secret in await connection.fetch(READ_SECRETS, endpoint_id):
        if vault.is_current(secret["secret"]):
            continue
        purpose = COMPAT if secret["compat"] else SIGNING
        try:
            text = vault.open(secret["secret"], endpoint_id, purpose)
        except UnreadableSecret as locked:
            reason = reason or str(locked)
            continue
        new = vault.seal(text, endpoint_id, purpose)
        replaced.append(
            {"endpoint_id": endpoint_id, "id": secret["id"], "old": secret["secret"], "new": new}
        )
    if replaced:
        calls.append((REPLACE_SECRETS, Private(document(replaced))))
    stored, identity = orjson.loads(row["headers"]), row["identity"]
    headers = {n: v for n, v in stored.items() if not vault.is_current(_stored(v))}
    opened = vault.open_headers(headers, endpoint_id)
    for locked_text in unreadable_values(opened):
        reason = reason or str(locked_text.error)
    sealed = vault.seal_headers(opened, endpoint_id)
    encrypted = identity
    if identity is not None and not vault.is_current(identity):
        try:
            encrypted = vault.seal(
                vault.open(identity, endpoint_id, IDENTITY), endpoint_id, IDENTITY
            )
        except UnreadableSecret as locked:
            reason = reason or str(locked)
    changed = sum(sealed[name] != stored[name] for name in sealed)
    if changed or encrypted != identity:
        new_row = {
            "id": endpoint_id,
            "old_headers": stored,
            "headers": {**stored, **sealed},
            "old_identity": identity,
            "identity": encrypted,
        }
        calls.append((REPLACE_IN_ENDPOINT, Private(document(new_row))))
    await connection.write_together(*calls)
    written = len(replaced) + changed + (encrypted != identity)
    locked_here = (f'endpoint "{row["name"]}": {reason}',) if reason else ()
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

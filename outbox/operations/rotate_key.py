"""Encrypting anew: every secret in the tables, with the first key of the vault.

Each endpoint in a transaction of its own, under its lock, so that whoever rotates a
secret meanwhile waits for a moment; deliveries do not notice.  Running it again goes on
where it was interrupted, because what has the right key is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import orjson

from outbox.store.connection.connect import map_errors
from outbox.store.connection.secrets import IDENTITY, SIGNING, Locked, is_sealed, locked_values
from outbox.store.routing_change import LOCK_CURSOR, write_journal

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from asyncpg import Connection

    from outbox.store.connection.secrets import Vault

PAGE = 200
PASSES_MAX = 5
"""Others may write secrets meanwhile, with a key that they have; these are for the next pass."""

KEPT = "SELECT key, count FROM secrets_kept()"

ENDPOINTS = "SELECT count(*) FROM endpoint WHERE state <> 'removed'"

PAGE_OF_IDS = """
SELECT id FROM endpoint WHERE state <> 'removed' AND ($1::uuid IS NULL OR id > $1)
 ORDER BY id LIMIT $2
"""

# Whoever gives it another secret, or changes its headers, takes the same lock.
LOCK = """
SELECT name, headers::text AS headers, identity FROM endpoint
 WHERE id = $1 AND state <> 'removed' FOR NO KEY UPDATE
"""

# Those that have ended are of no use, and their key may be gone.
FORGET_EXPIRED = """
DELETE FROM endpoint_secret WHERE endpoint_id = $1 AND expires_at <= clock_timestamp()
"""

SECRETS = "SELECT id, secret FROM endpoint_secret WHERE endpoint_id = $1"

WRITE_SECRET = "UPDATE endpoint_secret SET secret = $3 WHERE endpoint_id = $1 AND id = $2"  # noqa: S105

WRITE_ENDPOINT = "UPDATE endpoint SET headers = $2::text::jsonb, identity = $3 WHERE id = $1"


@dataclass(frozen=True, slots=True)
class Kept:
    """How many secrets are encrypted with a key."""

    key: str | None
    """None: they are in clear."""
    count: int


@dataclass(frozen=True, slots=True)
class Rekeyed:
    """What was done."""

    key: str | None
    """What they are encrypted with now; None: they are in clear."""
    endpoints: int = 0
    """Of so many in all."""
    done: int = 0
    """So many were looked at."""
    secrets: int = 0
    """So many were written anew."""
    left: int = 0
    """So many are not as they should be, because they cannot be read, or others write them."""
    locked: tuple[str, ...] = field(default=())
    """Endpoints of which something could not be read, each with the reason."""


async def survey(connection: Connection[Any], schema: str) -> list[Kept]:
    """How secrets are kept."""
    with map_errors(schema):
        return [Kept(**row) for row in await connection.fetch(KEPT)]


async def rekey(
    connection: Connection[Any],
    schema: str,
    vault: Vault,
    *,
    actor: str,
    force: bool = False,
    on_progress: Callable[[Rekeyed], object] = lambda _: None,
) -> Rekeyed:
    """Write every secret anew as the vault does; what it cannot read is left alone.

    Args:
        force: although there are relays that will not be able to read them.

    Raises:
        Conflict: a relay has not the key.
    """
    with map_errors(schema, "operator"):
        if vault.key_id is not None and not force:
            await vault.hold_to_relays(connection)
        done = Rekeyed(vault.key_id, await connection.fetchval(ENDPOINTS))
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
                # Whoever writes a secret holds this, and is before us or sees what we did.
                await connection.execute(LOCK_CURSOR)
                kept = [Kept(**row) for row in await connection.fetch(KEPT)]
                left = sum(each.count for each in kept if each.key != vault.key_id)
                done = replace(done, left=left)
                if left and not done.locked:
                    continue
                if done.secrets:
                    told = {"key": done.key, "secrets": done.secrets, "left": left}
                    await write_journal(connection, "secrets_rekeyed", actor, None, told)
                break
    return done


async def _endpoint(
    connection: Connection[Any], endpoint_id: UUID, vault: Vault, done: Rekeyed
) -> Rekeyed:
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
        except Locked as locked:
            why = why or str(locked)
            continue
        anew = vault.seal(text, endpoint_id, SIGNING)
        await connection.execute(WRITE_SECRET, endpoint_id, secret["id"], anew)
        written += 1
    stored, identity = orjson.loads(row["headers"]), row["identity"]
    headers = {n: v for n, v in stored.items() if not vault.is_current(_stored(v))}
    opened = vault.open_headers(headers, endpoint_id)
    for locked_text in locked_values(opened):
        why = why or locked_text.why
    sealed = vault.seal_headers(opened, endpoint_id)
    anew = identity
    if identity is not None and not vault.is_current(identity):
        try:
            anew = vault.seal(vault.open(identity, endpoint_id, IDENTITY), endpoint_id, IDENTITY)
        except Locked as locked:
            why = why or str(locked)
    changed = sum(sealed[name] != stored[name] for name in sealed)
    if changed or anew != identity:
        text = orjson.dumps({**stored, **sealed}).decode()
        await connection.execute(WRITE_ENDPOINT, endpoint_id, text, anew)
    written += changed + (anew != identity)
    locked_here = (f'endpoint "{row["name"]}": {why}',) if why else ()
    return replace(
        done,
        done=done.done + 1,
        secrets=done.secrets + written,
        locked=(*done.locked, *locked_here),
    )


def _stored(value: Any) -> str:
    """A header's value as text, encrypted or not."""
    if isinstance(value, str):
        # Whatever it says, it is in clear.
        return f"={value}" if is_sealed(value) else value
    sealed = value.get("sealed") if isinstance(value, dict) else None
    return sealed if isinstance(sealed, str) else ""

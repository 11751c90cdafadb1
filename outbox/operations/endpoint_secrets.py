"""Rotation of an endpoint's signing secret."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.errors import Conflict
from outbox.operations.endpoint_changes import ADD_SECRET, lock_endpoint, new_secret, public_key
from outbox.operations.endpoint_states import require_state
from outbox.store.connection.secrets import CLEAR, SIGNING
from outbox.store.routing_change import routing_transaction, write_journal

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

    from outbox.store.connection.secrets import Vault

OVERLAP_S = 86400.0
SECRETS_MAX = 3
"""Limit of live secrets: each delivery is signed with all of them."""

# Whether the newest secret is an Ed25519 private key.
IS_ED25519 = """
SELECT public_key IS NOT NULL FROM endpoint_secret WHERE endpoint_id = $1 ORDER BY id DESC LIMIT 1
"""

# Sets the expiry of older secrets, and deletes expired ones; without an overlap, deletes all
# older secrets.
END_SECRETS = """
WITH deleted AS (
    DELETE FROM endpoint_secret
     WHERE endpoint_id = $1 AND id < $2 AND ($3 = 0 OR expires_at <= clock_timestamp()))
UPDATE endpoint_secret
   SET expires_at = least(expires_at, clock_timestamp() + make_interval(secs => $3))
 WHERE endpoint_id = $1 AND id < $2 AND $3 > 0
   AND (expires_at IS NULL OR expires_at > clock_timestamp())
RETURNING expires_at
"""


@dataclass(frozen=True, slots=True)
class Rotation:
    """A new signing secret, shown only now."""

    id: UUID
    name: str
    secret: str
    """The secret, or the public key `whpk_…` of an Ed25519 key."""
    live: int
    """Number of live secrets, including the new one."""
    old_until: datetime | None
    """Expiry of the last old secret; None: all old ones are deleted."""


async def rotate_secret(
    connection: Connection[Any],
    schema: str,
    name: str,
    *,
    actor: str,
    overlap_s: float = OVERLAP_S,
    vault: Vault = CLEAR,
    ed25519: bool | None = None,
) -> Rotation:
    """Add a new signing secret; the old ones stay valid for `overlap_s` seconds.

    Args:
        overlap_s: validity of the old secrets, in seconds; 0 deletes them.
        ed25519: create an Ed25519 key; None: the same kind as the newest secret.

    Raises:
        NotFound: no endpoint has this name.
        Locked: the vault lacks the key in use.
        Conflict: the limit of live secrets is reached.
    """
    async with routing_transaction(connection, schema):
        found = await lock_endpoint(connection, name)
        require_state(found, ("active", "paused", "disabling", "disabled"), "given a new secret")
        vault = await vault.for_writing(connection)
        if ed25519 is None:
            ed25519 = await connection.fetchval(IS_ED25519, found.id) or False
        secret = new_secret(ed25519=ed25519)
        sealed = vault.seal(secret, found.id, SIGNING)
        public = public_key(secret)
        secret_id = await connection.fetchval(ADD_SECRET, found.id, sealed, public)
        rows = await connection.fetch(END_SECRETS, found.id, secret_id, float(overlap_s))
        old = [row["expires_at"] for row in rows]
        if len(old) >= SECRETS_MAX:
            raise Conflict(
                f'endpoint "{name}" has {SECRETS_MAX} live secrets, the first until '
                f"{min(old).isoformat(timespec='seconds')}; wait, or set the overlap to 0"
            )
        data = {"name": name, "overlap_s": overlap_s, "live": len(old) + 1}
        if ed25519:
            data["ed25519"] = True
        await write_journal(connection, "endpoint_secret_rotated", actor, found.id, data)
    return Rotation(found.id, name, public or secret, len(old) + 1, max(old, default=None))

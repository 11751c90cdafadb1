"""Endpoints: replacing the secret that their deliveries are signed with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.errors import Conflict
from outbox.operations.endpoint_changes import ADD_SECRET, lock, new_secret, public_key
from outbox.operations.endpoint_states import must_be
from outbox.store.connection.secrets import CLEAR, SIGNING
from outbox.store.routing_change import change, write_journal

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

    from outbox.store.connection.secrets import Vault

OVERLAP_S = 86400.0
SECRETS_MAX = 3
"""More live ones are not needed to replace one, and each is signed with."""

# Whether the newest one is a private key.
IS_ED25519 = """
SELECT public_key IS NOT NULL FROM endpoint_secret WHERE endpoint_id = $1 ORDER BY id DESC LIMIT 1
"""

# The secrets older than the new one: they expire, and those that have are not
# kept.  Without an overlap all of them go.
END_SECRETS = """
WITH gone AS (
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
    """A new signing secret, shown this once."""

    id: UUID
    name: str
    secret: str
    """Or the public key, `whpk_…`, of one that is not shown."""
    live: int
    """How many sign now, the new one among them."""
    old_until: datetime | None
    """The last of the old ones signs until then; None: no more."""


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
    """A new signing secret; the old ones sign beside it for `overlap_s` more seconds.

    Args:
        ed25519: a private key, of which the receiver is given the public one, or not; None: as
            the newest one is.

    Raises:
        NotFound: there is none of that name.
        Locked: secrets are encrypted here with a key that the vault has not.
        Conflict: there are as many live secrets as there may be.
    """
    async with change(connection, schema):
        found = await lock(connection, name)
        must_be(found, ("active", "paused", "disabling", "disabled"), "given a new secret")
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
                f'endpoint "{name}" has {SECRETS_MAX} live secrets already, the first until '
                f"{min(old).isoformat(timespec='seconds')}; wait, or give an overlap of 0"
            )
        told = {"name": name, "overlap_s": overlap_s, "live": len(old) + 1}
        if ed25519:
            told["ed25519"] = True
        await write_journal(connection, "endpoint_secret_rotated", actor, found.id, told)
    return Rotation(found.id, name, public or secret, len(old) + 1, max(old, default=None))

"""Rotation of an endpoint's signing secret."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.errors import Conflict
from outbox.operations.endpoints.changes import find_endpoint, new_secret, public_key
from outbox.operations.endpoints.states import require_state
from outbox.store.change import make_change
from outbox.store.connection.secrets import CLEAR, SIGNING
from outbox.store.sql.message import Private, WriteStatement

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

    from outbox.store.change import Change
    from outbox.store.connection.secrets import Vault

OVERLAP_S = 86400.0
"""How long an old secret or fetch token stays valid after a rotation."""
SECRETS_MAX = 3
"""Limit of live secrets: each delivery is signed with all of them."""

# The secrets of an endpoint, the newest first, with their expiry after a rotation now, which
# leaves them valid for $2 seconds; expired ones are included.
READ_SECRETS = """
SELECT id, public_key IS NOT NULL AS is_ed25519,
       $2 > 0 AND (expires_at IS NULL OR expires_at > clock_timestamp()) AS stays,
       least(expires_at, clock_timestamp() + make_interval(secs => $2)) AS until
  FROM endpoint_secret WHERE endpoint_id = $1 ORDER BY id DESC
"""

ADD_SECRET = WriteStatement(
    "add_secret",
    "INSERT INTO endpoint_secret (endpoint_id, id, secret, public_key) VALUES ($1, $2, $3, $4)",
)

# Ends older secrets at the planned times, and deletes the others.
END_SECRETS = WriteStatement(
    "end_secrets",
    """
WITH kept AS (
    SELECT * FROM unnest($3::integer[], $4::timestamptz[]) AS k(id, until)),
deleted AS (
    DELETE FROM endpoint_secret
     WHERE endpoint_id = $1 AND id < $2 AND id NOT IN (SELECT id FROM kept))
UPDATE endpoint_secret s SET expires_at = k.until
  FROM kept k WHERE s.endpoint_id = $1 AND s.id = k.id
""",
)


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
    owner: str | None = None,
) -> Rotation:
    """Add a new signing secret; the old ones stay valid for `overlap_s` seconds.

    Args:
        overlap_s: validity of the old secrets, in seconds; 0 deletes them.
        ed25519: create an Ed25519 key; None: the same kind as the newest secret.
        owner: the tenant that the endpoint must belong to; None: any.

    Raises:
        NotFound: no endpoint has this name.
        Locked: the vault lacks the key in use.
        Conflict: the limit of live secrets is reached.
    """

    async def plan(change: Change) -> Rotation:
        endpoint = await find_endpoint(change, name, owner)
        require_state(endpoint, ("active", "paused", "disabling", "disabled"), "given a new secret")
        in_use = await vault.for_writing(change.db)
        old = await change.db.fetch(READ_SECRETS, endpoint.id, float(overlap_s))
        is_ed25519 = bool(old and old[0]["is_ed25519"]) if ed25519 is None else ed25519
        kept = [row for row in old if row["stays"]]
        if len(kept) >= SECRETS_MAX:
            first = min(row["until"] for row in kept)
            raise Conflict(
                f'endpoint "{name}" has {SECRETS_MAX} live secrets, the first until '
                f"{first.isoformat(timespec='seconds')}; wait, or set the overlap to 0"
            )
        secret, secret_id = new_secret(ed25519=is_ed25519), (old[0]["id"] if old else 0) + 1
        public = public_key(secret)
        sealed = Private(in_use.seal(secret, endpoint.id, SIGNING))
        change.write(ADD_SECRET, endpoint.id, secret_id, sealed, public)
        ids, untils = [row["id"] for row in kept], [row["until"] for row in kept]
        change.write(END_SECRETS, endpoint.id, secret_id, ids, untils)
        data = {"name": name, "overlap_s": overlap_s, "live": len(kept) + 1}
        if is_ed25519:
            data["ed25519"] = True
        change.journal("endpoint_secret_rotated", endpoint.id, data)
        return Rotation(
            endpoint.id, name, public or secret, len(kept) + 1, max(untils, default=None)
        )

    return await make_change(connection, schema, actor, plan)

"""The stored secrets of an endpoint: of its signature, and of its compat signature.

A new secret of one kind ends the older ones of that kind.
"""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.messages.ed25519 import KEY_BYTES, format_private_key
from outbox.core.messages.signature import format_secret, parse_given_secret, parse_signing_key
from outbox.core.model.destination import is_stream
from outbox.core.model.secret_text import SECRETS_MAX
from outbox.errors import Conflict, UsageError
from outbox.store.connection.secrets import COMPAT, SIGNING, UnreadableSecret
from outbox.store.sql.message import Private, WriteStatement

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.model.compat import Compat
    from outbox.core.model.secret_text import GivenSecret
    from outbox.store.change import Change
    from outbox.store.connection.secrets import Vault

SECRET_BYTES = 32
OVERLAP_S = 86400.0
"""How long an old secret or fetch token stays valid after a rotation."""

# The secrets of an endpoint, the newest first, with their expiry after a rotation now, which
# leaves them valid for $2 seconds; expired ones are included.
READ_SECRETS = """
SELECT id, secret, compat, public_key IS NOT NULL AS is_ed25519,
       expires_at IS NULL OR expires_at > clock_timestamp() AS is_live,
       $2 > 0 AND (expires_at IS NULL OR expires_at > clock_timestamp()) AS stays,
       least(expires_at, clock_timestamp() + make_interval(secs => $2)) AS until
  FROM endpoint_secret WHERE endpoint_id = $1 ORDER BY id DESC
"""

ADD_SECRET = WriteStatement(
    "add_secret",
    """
INSERT INTO endpoint_secret (endpoint_id, id, secret, public_key, compat)
VALUES ($1, $2, $3, $4, $5)
""",
)

# Ends the older secrets of a kind at the planned times, and deletes the others.
END_SECRETS = WriteStatement(
    "end_secrets",
    """
WITH kept AS (
    SELECT * FROM unnest($4::integer[], $5::timestamptz[]) AS k(id, until)),
deleted AS (
    DELETE FROM endpoint_secret
     WHERE endpoint_id = $1 AND compat = $2 AND id < $3 AND id NOT IN (SELECT id FROM kept))
UPDATE endpoint_secret s SET expires_at = k.until
  FROM kept k WHERE s.endpoint_id = $1 AND s.id = k.id
""",
)

DELETE_COMPAT_SECRETS = WriteStatement(
    "delete_compat_secrets", "DELETE FROM endpoint_secret WHERE endpoint_id = $1 AND compat"
)


@dataclass(frozen=True, slots=True)
class PlannedSecret:
    """A new secret, and the older ones of its kind that stay for a while."""

    endpoint_id: UUID
    id: int
    sealed: str
    public_key: str | None
    compat: bool
    kept_ids: list[int]
    kept_until: list[datetime]

    def write(self, change: Change) -> None:
        """Add it, and end the older ones."""
        endpoint_id, sealed = self.endpoint_id, Private(self.sealed)
        change.write(ADD_SECRET, endpoint_id, self.id, sealed, self.public_key, self.compat)
        kept = self.kept_ids, self.kept_until
        change.write(END_SECRETS, endpoint_id, self.compat, self.id, *kept)


class LiveSecrets:
    """The secrets of an endpoint, as a plan has read them; of each kind the newest signs first.

    Args:
        rows: the rows of `READ_SECRETS`.
    """

    def __init__(self, endpoint_id: UUID, rows: list[Any]) -> None:
        self._endpoint_id = endpoint_id
        self._rows = rows
        self._next_id = rows[0]["id"] + 1 if rows else 1

    @classmethod
    async def read(
        cls, connection: Connection[Any], endpoint_id: UUID, *, overlap_s: float = OVERLAP_S
    ) -> LiveSecrets:
        """Read those of one endpoint.

        Args:
            overlap_s: how long they stay valid after a new one, in seconds; 0: not at all.
        """
        return cls(endpoint_id, await connection.fetch(READ_SECRETS, endpoint_id, float(overlap_s)))

    @property
    def is_ed25519(self) -> bool:
        """Whether the newest signing secret is a private key."""
        signing = self._of_kind(compat=False)
        return bool(signing and signing[0]["is_ed25519"])

    def is_newest(self, text: str, vault: Vault, *, compat: bool) -> bool:
        """Whether a secret, in its stored form, is the newest one of its kind already."""
        rows = self._of_kind(compat=compat)
        return bool(rows) and rows[0]["is_live"] and self._is(rows[0], text, vault)

    def plan(
        self, text: str, vault: Vault, in_use: Vault, name: str, *, compat: bool
    ) -> PlannedSecret:
        """Plan a new secret in its stored form; one that is live already becomes the newest.

        Args:
            in_use: the vault to write with (`Vault.for_writing`).
            name: the endpoint's name, for messages.

        Raises:
            Conflict: the limit of live secrets is reached.
        """
        rows = self._of_kind(compat=compat)
        kept = [row for row in rows if row["stays"] and not self._is(row, text, vault)]
        if len(kept) >= SECRETS_MAX:
            first = min(row["until"] for row in kept)
            raise Conflict(
                f'endpoint "{name}" has {SECRETS_MAX} live secrets, the first until '
                f"{first.isoformat(timespec='seconds')}; wait, or set the overlap to 0"
            )
        secret_id = self._next_id
        self._next_id += 1
        return PlannedSecret(
            self._endpoint_id,
            secret_id,
            in_use.seal(text, self._endpoint_id, _purpose(compat)),
            None if compat else public_key(text),
            compat,
            [row["id"] for row in kept],
            [row["until"] for row in kept],
        )

    def _of_kind(self, *, compat: bool) -> list[Any]:
        """The rows of one kind, the newest first."""
        return [row for row in self._rows if row["compat"] is compat]

    def _is(self, row: Any, text: str, vault: Vault) -> bool:
        """Whether a row has this secret; one that cannot be decrypted is replaced by it."""
        try:
            return vault.open(row["secret"], self._endpoint_id, _purpose(row["compat"])) == text
        except UnreadableSecret:
            return False


def _purpose(compat: bool) -> str:
    return COMPAT if compat else SIGNING


def new_secret(*, ed25519: bool = False) -> str:
    """Generate a signing secret, `whsec_…`, or an Ed25519 private key, `whsk_…`."""
    if ed25519:
        return format_private_key(secrets.token_bytes(KEY_BYTES))
    return format_secret(secrets.token_bytes(SECRET_BYTES))


def public_key(secret: str) -> str | None:
    """The public key of an Ed25519 private key, `whpk_…`; None for a symmetric secret."""
    key = parse_signing_key(secret)
    return None if isinstance(key, bytes) else key.public_text


def stored_secret(given: GivenSecret, url: str) -> str:
    """The stored form of a signing secret that a user gives for an endpoint.

    Raises:
        UsageError: it is invalid, or the endpoint is a broker's.
    """
    if is_stream(url):
        raise UsageError("secret: is for HTTP receivers; messages of a broker are not signed")
    return parse_given_secret(given)


def stored_compat_secret(compat: Compat, text: str) -> str:
    """The stored form of a secret of the compat signature: base64 of the key.

    Raises:
        UsageError: it is invalid; the message never contains it.
    """
    return base64.b64encode(compat.decode(text)).decode()

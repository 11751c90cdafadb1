"""Secrets at rest: encrypted when a key is configured, otherwise stored as plain text.

    sealed:KEY:DATA      the stored form; KEY is the key's id, DATA is base64 of a 12-byte nonce
                         and the AES-256-GCM ciphertext

Encrypted are an endpoint's secrets, its client certificate with the private key, and its
header values.  The associated data contains the endpoint's id and the purpose of the text, so that
a writer to the tables cannot assign one endpoint's secret to another.

A secret is always written with a key that is already in use; a process without any of these keys
is refused (`for_writing`).  Otherwise one command without its OUTBOX_KEY would silently store plain
text, or a secret that the relays cannot read.
"""

from __future__ import annotations

import base64
import binascii
import os
from typing import TYPE_CHECKING, Any

from outbox.core.model.encryption_keys import KEY_BYTES, format_key, parse_keys
from outbox.errors import CannotRun, Conflict
from outbox.store.sql.expressions import lease_runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.core.model.encryption_keys import EncryptionKey

SETTING = "OUTBOX_KEY"
SIGNING, COMPAT, IDENTITY = "signing secret", "compat secret", "client certificate"
"""Purposes of a text; the purpose of a header value includes the header's name."""

_PREFIX = "sealed:"
_NONCE_BYTES = 12

# The keys in use; every endpoint has a secret.
READ_KEYS_IN_USE = "SELECT DISTINCT key_id FROM endpoint_secret WHERE key_id IS NOT NULL ORDER BY 1"


# Running relays that do not have a key.
READ_RELAYS_WITHOUT_KEY = f"""
SELECT name FROM replica WHERE {lease_runs("replica")} AND NOT $1 = ANY (keys)
 ORDER BY name
"""  # noqa: S608 (constants only)


class UnreadableSecret(CannotRun):
    """A secret cannot be decrypted, because the key is missing."""


class AlteredSecret(UnreadableSecret):
    """A stored secret is not what was encrypted for its endpoint: the table was changed.

    The key is there, but the authentication tag of AES-GCM does not match the text and what it
    is bound to.  So this is an alarm, unlike a missing key.
    """


class Vault:
    """Encrypts and decrypts with the keys of this process; without keys, text stays plain."""

    def __init__(self, keys: Sequence[EncryptionKey] = (), *, encrypts: bool = True) -> None:
        self._keys = {key.id: key for key in keys}
        self._first = keys[0] if keys and encrypts else None

    @classmethod
    def from_settings(cls, settings: Settings) -> Vault:
        """A vault with the configured keys."""
        return cls(parse_keys(settings.key.get_secret_value()) if settings.key else ())

    @property
    def key_id(self) -> str | None:
        """Id of the key that encrypts; None: nothing is encrypted."""
        return None if self._first is None else self._first.id

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Ids of all keys that decrypt."""
        return tuple(self._keys)

    def in_clear(self) -> Vault:
        """A vault with the same keys that does not encrypt."""
        return Vault(tuple(self._keys.values()), encrypts=False)

    def is_current(self, stored: str) -> bool:
        """Whether a stored text has the form that this vault would store."""
        if self._first is None:
            return not is_sealed(stored)
        return stored.startswith(f"{_PREFIX}{self._first.id}:")

    def seal(self, text: str, endpoint_id: UUID, what: str) -> str:
        """Encrypt a text for storage."""
        if self._first is None:
            return text
        nonce = os.urandom(_NONCE_BYTES)
        sealed = _cipher(self._first).encrypt(nonce, text.encode(), _bound(endpoint_id, what))
        return f"{_PREFIX}{self._first.id}:{base64.b64encode(nonce + sealed).decode()}"

    def open(self, stored: str, endpoint_id: UUID, what: str) -> str:
        """Decrypt a stored text; plain text is returned unchanged.

        Raises:
            UnreadableSecret: the key is missing.
            AlteredSecret: the stored text was changed.
        """
        if not is_sealed(stored):
            return stored
        from cryptography.exceptions import InvalidTag

        key_id, _, data = stored.removeprefix(_PREFIX).partition(":")
        key = self._keys.get(key_id)
        if key is None:
            raise UnreadableSecret(
                f"its {what} is encrypted with the key {key_id}; {_set_key_hint(key_id)}"
            )
        try:
            raw = base64.b64decode(data, validate=True)
            nonce, sealed = raw[:_NONCE_BYTES], raw[_NONCE_BYTES:]
            opened = _cipher(key).decrypt(nonce, sealed, _bound(endpoint_id, what))
        except (binascii.Error, ValueError, InvalidTag):
            raise AlteredSecret(
                f"its {what} is not what was encrypted for it: the table was changed; set it again"
            ) from None
        return str(opened, "utf-8")

    def seal_headers(self, headers: Mapping[str, str], endpoint_id: UUID) -> dict[str, Any]:
        """Encrypt header values for storage; encrypted values are objects."""
        if self._first is None:
            return {n: v.stored if isinstance(v, UnreadableText) else v for n, v in headers.items()}
        return {
            name: value.stored
            if isinstance(value, UnreadableText)
            else {"sealed": self.seal(value, endpoint_id, _header(name))}
            for name, value in headers.items()
        }

    def open_headers(self, stored: Mapping[str, Any], endpoint_id: UUID) -> dict[str, str]:
        """Decrypt stored headers; a value that cannot be decrypted is an `UnreadableText`."""
        headers: dict[str, str] = {}
        for name, value in stored.items():
            if isinstance(value, str):
                headers[name] = value
                continue
            sealed = value.get("sealed") if isinstance(value, dict) else None
            try:
                if not isinstance(sealed, str) or not is_sealed(sealed):
                    raise AlteredSecret(f"its {_header(name)} is neither a text nor encrypted")
                headers[name] = self.open(sealed, endpoint_id, _header(name))
            except UnreadableSecret as error:
                headers[name] = UnreadableText(value, error)
        return headers

    async def for_writing(self, connection: Connection[Any]) -> Vault:
        """The vault to write a secret with; its key is one that all readers have.

        That is a key with which something is already encrypted.  A new key comes into use by
        `rekey`, or when nothing is encrypted yet and every running relay has it.

        Raises:
            UnreadableSecret: secrets are encrypted, and not with one of these keys.
            Conflict: a running relay does not have the key.
        """
        in_use = {row["key_id"] for row in await connection.fetch(READ_KEYS_IN_USE)}
        for key in self._keys.values():
            if key.id in in_use:
                return Vault((key, *self._keys.values()))
        if in_use:
            key_id = min(in_use)
            raise UnreadableSecret(
                f"secrets are encrypted with the key {key_id}; {_set_key_hint(key_id)}"
            )
        if self._first is not None:
            await self.require_key_on_relays(connection)
        return self

    async def require_key_on_relays(self, connection: Connection[Any]) -> None:
        """Check that every running relay has the key.

        Raises:
            Conflict: a relay does not have it.
        """
        missing = [
            row["name"] for row in await connection.fetch(READ_RELAYS_WITHOUT_KEY, self.key_id)
        ]
        if missing:
            raise Conflict(
                f"the relay {missing[0]} does not have the key {self.key_id}; "
                "first start every relay with this key in front of the old one"
            )


CLEAR = Vault()
"""A vault without keys."""


class UnreadableText(str):
    """Placeholder for a text that cannot be decrypted; it is written back unchanged."""

    __slots__ = ("error", "stored")

    stored: Any
    error: UnreadableSecret

    def __new__(cls, stored: Any, error: UnreadableSecret) -> UnreadableText:
        text = super().__new__(cls, "(encrypted)")
        text.stored, text.error = stored, error
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        # copy.deepcopy would otherwise copy only the text.
        return UnreadableText, (self.stored, self.error)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnreadableText) and self.stored == other.stored

    def __hash__(self) -> int:
        return hash(str(self.stored))


def is_sealed(stored: str) -> bool:
    """Whether a stored text is encrypted."""
    return stored.startswith(_PREFIX)


def new_key() -> str:
    """Generate a random key."""
    return format_key(os.urandom(KEY_BYTES))


def unreadable_values(headers: Mapping[str, str]) -> Iterable[UnreadableText]:
    """The header values that could not be decrypted."""
    return (value for value in headers.values() if isinstance(value, UnreadableText))


def _set_key_hint(key_id: str) -> str:
    return f"set {SETTING} to that key"


def _header(name: str) -> str:
    return f"header {name.lower()}"


def _bound(endpoint_id: UUID, what: str) -> bytes:
    return f"outbox {what} of {endpoint_id}".encode()


def _cipher(key: EncryptionKey) -> Any:
    # Imported lazily: processes without a key should not pay for it.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key.value)

"""Secrets at rest: encrypted where there is a key, and as they are where there is none.

    sealed:KEY:DATA      what stands in the database; KEY is the key's id, DATA is
                         base64 of 12 random bytes and what AES-256-GCM made of it

Encrypted are an endpoint's signing secrets, its client certificate with its key, and the
values of its headers.  The endpoint's id and what the text is for are bound to it
(associated data), so that whoever can write to the tables cannot give one endpoint the
secret of another.

That tables hold encrypted secrets is never forgotten: a secret is written with a key
that is in use already, and who has none of these is refused (`for_writing`).  Otherwise
one command without its OUTBOX_KEY would leave secrets in clear that nobody looks for,
or one that the relays cannot read.
"""

from __future__ import annotations

import base64
import binascii
import os
from typing import TYPE_CHECKING, Any

from outbox.core.model.encryption_keys import KEY_BYTES, format_key, parse_keys
from outbox.errors import CannotRun, Conflict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.core.model.encryption_keys import Key

SETTING = "OUTBOX_KEY"
SIGNING, IDENTITY = "signing secret", "client certificate"
"""What a text is for; a header's value is for the header of that name."""

_PREFIX = "sealed:"
_NONCE_BYTES = 12

# The keys that anything is encrypted with; every endpoint has a secret.
KEYS_IN_USE = "SELECT DISTINCT key_id FROM endpoint_secret WHERE key_id IS NOT NULL ORDER BY 1"


# Relays that could not read what is written with a key; their lease is not over.
WITHOUT_KEY = """
SELECT name FROM replica WHERE expires_at > clock_timestamp() AND NOT $1 = ANY (keys)
 ORDER BY name
"""


class Locked(CannotRun):
    """A secret cannot be read: its key is not here, or it is not what was written."""


class Vault:
    """Encrypts and decrypts with the keys of one process; without keys it leaves things as
    they are.
    """

    def __init__(self, keys: Sequence[Key] = (), *, encrypts: bool = True) -> None:
        self._keys = {key.id: key for key in keys}
        self._first = keys[0] if keys and encrypts else None

    @classmethod
    def of(cls, settings: Settings) -> Vault:
        """With the keys of the settings."""
        return cls(parse_keys(settings.key.get_secret_value()) if settings.key else ())

    @property
    def key_id(self) -> str | None:
        """The key that encrypts; None: nothing is encrypted."""
        return None if self._first is None else self._first.id

    @property
    def key_ids(self) -> tuple[str, ...]:
        """All that decrypt."""
        return tuple(self._keys)

    def in_clear(self) -> Vault:
        """The same keys, with which nothing is encrypted any more."""
        return Vault(tuple(self._keys.values()), encrypts=False)

    def is_current(self, stored: str) -> bool:
        """Whether what is stored is as this vault would store it."""
        if self._first is None:
            return not is_sealed(stored)
        return stored.startswith(f"{_PREFIX}{self._first.id}:")

    def seal(self, text: str, endpoint_id: UUID, what: str) -> str:
        """The text as it is to be stored."""
        if self._first is None:
            return text
        nonce = os.urandom(_NONCE_BYTES)
        sealed = _cipher(self._first).encrypt(nonce, text.encode(), _bound(endpoint_id, what))
        return f"{_PREFIX}{self._first.id}:{base64.b64encode(nonce + sealed).decode()}"

    def open(self, stored: str, endpoint_id: UUID, what: str) -> str:
        """The text of what is stored, encrypted or not.

        Raises:
            Locked: it cannot be read.
        """
        if not is_sealed(stored):
            return stored
        from cryptography.exceptions import InvalidTag

        key_id, _, data = stored.removeprefix(_PREFIX).partition(":")
        key = self._keys.get(key_id)
        if key is None:
            raise Locked(f"its {what} is encrypted with the key {key_id}; {_give(key_id)}")
        try:
            raw = base64.b64decode(data, validate=True)
            nonce, sealed = raw[:_NONCE_BYTES], raw[_NONCE_BYTES:]
            opened = _cipher(key).decrypt(nonce, sealed, _bound(endpoint_id, what))
        except (binascii.Error, ValueError, InvalidTag):
            raise Locked(
                f"its {what} is not what was encrypted for it with the key {key_id}: somebody "
                "changed the table; write it anew"
            ) from None
        return str(opened, "utf-8")

    def seal_headers(self, headers: Mapping[str, str], endpoint_id: UUID) -> dict[str, Any]:
        """Headers as they are to be stored: encrypted values are objects."""
        if self._first is None:
            return {n: v.stored if isinstance(v, LockedText) else v for n, v in headers.items()}
        return {
            name: value.stored
            if isinstance(value, LockedText)
            else {"sealed": self.seal(value, endpoint_id, _header(name))}
            for name, value in headers.items()
        }

    def open_headers(self, stored: Mapping[str, Any], endpoint_id: UUID) -> dict[str, str]:
        """Headers of what is stored; a value that cannot be read is a `LockedText`."""
        headers: dict[str, str] = {}
        for name, value in stored.items():
            if isinstance(value, str):
                headers[name] = value
                continue
            sealed = value.get("sealed") if isinstance(value, dict) else None
            try:
                if not isinstance(sealed, str) or not is_sealed(sealed):
                    raise Locked(f"its {_header(name)} is neither a text nor encrypted")
                headers[name] = self.open(sealed, endpoint_id, _header(name))
            except Locked as locked:
                headers[name] = LockedText(value, str(locked))
        return headers

    async def for_writing(self, connection: Connection[Any]) -> Vault:
        """The vault to write a secret with: its key is one that whoever reads it has.

        That is a key with which something is encrypted already.  A new one comes into use
        by `rekey`, or where nothing is encrypted yet and every running relay has it.

        Raises:
            Locked: secrets are encrypted here, and not with one of these keys.
            Conflict: a running relay could not read what would be written.
        """
        in_use = {row["key_id"] for row in await connection.fetch(KEYS_IN_USE)}
        for key in self._keys.values():
            if key.id in in_use:
                return Vault((key, *self._keys.values()))
        if in_use:
            wanted = min(in_use)
            raise Locked(f"secrets are encrypted here with the key {wanted}; {_give(wanted)}")
        if self._first is not None:
            await self.hold_to_relays(connection)
        return self

    async def hold_to_relays(self, connection: Connection[Any]) -> None:
        """Refuse a key that a running relay has not.

        Raises:
            Conflict: there is one.
        """
        blind = [row["name"] for row in await connection.fetch(WITHOUT_KEY, self.key_id)]
        if blind:
            raise Conflict(
                f"the relay {blind[0]} has not the key {self.key_id}, and could not read it; "
                "start every relay with this key in front, and the old one behind it, first"
            )


CLEAR = Vault()
"""Without a key."""


class LockedText(str):
    """Stands for a text that cannot be read, and is written back as it was."""

    __slots__ = ("stored", "why")

    stored: Any
    why: str

    def __new__(cls, stored: Any, why: str) -> LockedText:
        text = super().__new__(cls, "(encrypted)")
        text.stored, text.why = stored, why
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        # Settings are copied, and strings are copied by their text.
        return LockedText, (self.stored, self.why)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LockedText) and self.stored == other.stored

    def __hash__(self) -> int:
        return hash(str(self.stored))


def is_sealed(stored: str) -> bool:
    """Whether what is stored is encrypted."""
    return stored.startswith(_PREFIX)


def new_key() -> str:
    """A key that nobody has."""
    return format_key(os.urandom(KEY_BYTES))


def locked_values(headers: Mapping[str, str]) -> Iterable[LockedText]:
    """The values that could not be read."""
    return (value for value in headers.values() if isinstance(value, LockedText))


def _give(key_id: str) -> str:
    return f"set {SETTING} to that key"


def _header(name: str) -> str:
    return f"header {name.lower()}"


def _bound(endpoint_id: UUID, what: str) -> bytes:
    return f"outbox {what} of {endpoint_id}".encode()


def _cipher(key: Key) -> Any:
    # Not before it is needed: nobody without a key should wait for it.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key.value)

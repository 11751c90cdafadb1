"""Encryption keys for secrets at rest: `OUTBOX_KEY`.

    obkey_… [obkey_…]…

The first key encrypts, all of them decrypt.  To rotate keys, put a new key first, encrypt all
secrets again (`outbox rekey`), and remove the old key.  A key is 32 random bytes in base64.
The database and messages refer to a key by its *id*, a prefix of a hash, which reveals
nothing about the key.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field
from hashlib import sha256

from outbox.errors import UsageError

PREFIX = "obkey_"
KEY_BYTES = 32
KEYS_MAX = 10
_ID_CHARS = 8
_BETWEEN = re.compile(r"[\s,]+")


@dataclass(frozen=True, slots=True)
class EncryptionKey:
    """An encryption key and its id."""

    id: str
    value: bytes = field(repr=False)


def parse_keys(text: str) -> tuple[EncryptionKey, ...]:
    """Parse keys that are separated by whitespace or commas; duplicates are removed.

    Raises:
        UsageError: a key is invalid; the message does not contain it.
    """
    parts = [part for part in _BETWEEN.split(text) if part]
    if len(parts) > KEYS_MAX:
        raise UsageError(f"{len(parts)} keys; the limit is {KEYS_MAX}")
    keys = tuple(dict.fromkeys(map(_parse, parts)))
    if len({key.id for key in keys}) < len(keys):
        raise UsageError("two of the keys have the same id; generate another key")
    return keys


def format_key(value: bytes) -> str:
    """Encode 32 bytes as `obkey_…`."""
    return PREFIX + base64.urlsafe_b64encode(value).decode().rstrip("=")


def _parse(text: str) -> EncryptionKey:
    message = (
        f"a key must be {PREFIX}, followed by {KEY_BYTES} bytes in base64; "
        "create one with outbox rekey --generate"
    )
    encoded = text.removeprefix(PREFIX).rstrip("=")
    try:
        value = base64.b64decode(
            encoded.replace("-", "+").replace("_", "/") + "=" * (-len(encoded) % 4), validate=True
        )
    except (binascii.Error, ValueError):
        raise UsageError(message) from None
    if encoded == text.rstrip("=") or len(value) != KEY_BYTES:
        raise UsageError(message)
    return EncryptionKey(sha256(b"outbox key " + value).hexdigest()[:_ID_CHARS], value)

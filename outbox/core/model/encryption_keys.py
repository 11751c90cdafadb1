"""Keys that secrets at rest are encrypted with: `OUTBOX_KEY`.

    obkey_… [obkey_…]…

The first one encrypts, all of them decrypt; so a new key is put in front, everything is
encrypted anew (`outbox rekey`), and the old one is taken away.  Each is 32 random bytes
in base64.  Where a key has to be named, in the database and in messages, its *id* stands
for it: the beginning of a hash, which tells nothing of the key.
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
class Key:
    """A key, and what it is called."""

    id: str
    value: bytes = field(repr=False)


def parse_keys(text: str) -> tuple[Key, ...]:
    """Keys with spaces, commas or lines between them; none is written twice.

    Raises:
        UsageError: one is none; the message does not show it.
    """
    parts = [part for part in _BETWEEN.split(text) if part]
    if len(parts) > KEYS_MAX:
        raise UsageError(f"{len(parts)} keys; at most {KEYS_MAX} can be there")
    keys = tuple(dict.fromkeys(map(_parse, parts)))
    if len({key.id for key in keys}) < len(keys):
        raise UsageError("two of the keys have the same id; make another one")
    return keys


def format_key(value: bytes) -> str:
    """`obkey_…` of 32 bytes."""
    return PREFIX + base64.urlsafe_b64encode(value).decode().rstrip("=")


def _parse(text: str) -> Key:
    wanted = (
        f"a key must be {PREFIX}, followed by {KEY_BYTES} bytes in base64; "
        "outbox rekey --generate makes one"
    )
    encoded = text.removeprefix(PREFIX).rstrip("=")
    try:
        value = base64.b64decode(
            encoded.replace("-", "+").replace("_", "/") + "=" * (-len(encoded) % 4), validate=True
        )
    except (binascii.Error, ValueError):
        raise UsageError(wanted) from None
    if encoded == text.rstrip("=") or len(value) != KEY_BYTES:
        raise UsageError(wanted)
    return Key(sha256(b"outbox key " + value).hexdigest()[:_ID_CHARS], value)

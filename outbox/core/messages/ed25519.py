"""Standard Webhooks 1.0, asymmetric signatures (`v1a`): ed25519 over id, time stamp and body.

The receiver has a public key, `whpk_…`, which cannot sign; the sender has the private key,
`whsk_…`.

`cryptography` is imported when a key is parsed: most receivers use a shared secret and do not
need it.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING

from outbox.errors import UsageError
from outbox.extras import needs_extra

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

PUBLIC_PREFIX = "whpk_"
PRIVATE_PREFIX = "whsk_"
KEY_BYTES = 32
PAIR_BYTES = 64
"""Some tools print the private key followed by the public one."""

# The points of small order, by the y coordinate in all its encodings, canonical or not; the
# sign bit is ignored.  The same list as libsodium's ge25519_has_small_order (RFC 8032, section
# 5.1.7, leaves this check to applications; OpenSSL does not make it).
_FIELD_PRIME = 2**255 - 19
_ORDER_8_Y = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
_SMALL_ORDER_Y = frozenset(
    (0, 1, _FIELD_PRIME - 1, _FIELD_PRIME, _FIELD_PRIME + 1, _ORDER_8_Y, _FIELD_PRIME - _ORDER_8_Y)
)
_SIGN_BIT = 1 << 255


class PublicKey:
    """A public key that verifies signatures."""

    __slots__ = ("_key",)

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key

    def verifies(self, signature: str, signed: bytes) -> bool:
        """Whether the base64 text is a valid signature of these bytes."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(base64.b64decode(signature, validate=True), signed)
        except (binascii.Error, ValueError, InvalidSignature):
            return False
        return True


class PrivateKey:
    """A private key that signs deliveries."""

    __slots__ = ("_key",)

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    def sign(self, signed: bytes) -> str:
        """The signature of these bytes, in base64."""
        return base64.b64encode(self._key.sign(signed)).decode("ascii")

    @property
    def public_text(self) -> str:
        """The public key for receivers, `whpk_…`."""
        return PUBLIC_PREFIX + base64.b64encode(self._key.public_key().public_bytes_raw()).decode()


def parse_public_key(text: str) -> PublicKey:
    """Decode a public key, `whpk_…`.

    Raises:
        UsageError: the text is not a public key, or the key has small order: anybody can
            create signatures that verify with such a key.
        MissingExtra: `cryptography` is not installed.
    """
    with needs_extra("ed25519", "a public key, whpk_…,"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    key = _key(text, PUBLIC_PREFIX, (KEY_BYTES,))
    if int.from_bytes(key, "little") & ~_SIGN_BIT in _SMALL_ORDER_Y:
        raise UsageError("key: this public key has small order, so anybody can forge signatures")
    return PublicKey(Ed25519PublicKey.from_public_bytes(key))


def format_private_key(key: bytes) -> str:
    """Encode a private key of 32 bytes as `whsk_…`."""
    return PRIVATE_PREFIX + base64.b64encode(key).decode("ascii")


def parse_private_key(text: str) -> PrivateKey:
    """Decode a private key, `whsk_…`.

    Raises:
        UsageError: the text is not a private key; the message never contains it.
        MissingExtra: `cryptography` is not installed.
    """
    with needs_extra("ed25519", "a private key, whsk_…,"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = _key(text, PRIVATE_PREFIX, (KEY_BYTES, PAIR_BYTES))
    return PrivateKey(Ed25519PrivateKey.from_private_bytes(key[:KEY_BYTES]))


def _key(text: str, prefix: str, sizes: tuple[int, ...]) -> bytes:
    wanted = f"must be {prefix!r}, followed by {' or '.join(map(str, sizes))} bytes in base64"
    encoded = text.removeprefix(prefix)
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise UsageError(f"key: {wanted}") from None
    if encoded == text or len(key) not in sizes:
        raise UsageError(f"key: {wanted}")
    return key

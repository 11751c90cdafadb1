"""Standard Webhooks 1.0: what a signature vouches for, and what each wrong one is.

https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md

The signed text is `{webhook-id}.{webhook-timestamp}.{body}`; the header
`webhook-signature` holds one or more signatures, each with its version, set
apart by spaces.  A sender whose secret is being replaced signs with both.
Version `v1` is HMAC-SHA256 with a secret that both sides have, `v1a` is ed25519
(`outbox.core.delivery.ed25519`).

    SignatureError
    ├── MissingHeader        one of the three headers is not there
    ├── RepeatedHeader       it is there twice: which one was signed?
    ├── MalformedHeader      it is there, and means nothing
    ├── TimestampTooOld      a replayed request, or the clocks differ
    ├── TimestampTooNew      the clocks differ
    └── SignatureMismatch    the secret, the body or the headers are others
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from outbox.core.delivery.ed25519 import (
    PRIVATE_PREFIX,
    PUBLIC_PREFIX,
    PublicKey,
    parse_private_key,
    parse_public_key,
)
from outbox.errors import OutboxError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outbox.core.delivery.ed25519 import PrivateKey

Key: TypeAlias = bytes | PublicKey
"""What a signature is checked with: a secret, or a public key."""
SigningKey: TypeAlias = "bytes | PrivateKey"
"""What signs: a secret that the receiver has, too, or a private key."""

SECRET_PREFIX = "whsec_"  # noqa: S105  a prefix, not a secret
SECRET_BYTES_MIN = 24
SECRET_BYTES_MAX = 64
TOLERANCE_S = 300
SIGNATURES_MAX = 32
ED25519_SIGNATURES_MAX = 4
"""In one request.  Each of the latter costs a pass through the body, and anybody can send
them."""

ID_HEADER = "webhook-id"
TIMESTAMP_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"

_HMAC, _ED25519 = "v1", "v1a"
_TIMESTAMP = re.compile(r"[0-9]{1,15}", re.ASCII)


class SignatureError(OutboxError):
    """The request is not one that a holder of the secret made just now."""


class MissingHeader(SignatureError):
    """A header that every signed request has is not there."""

    def __init__(self, header: str) -> None:
        super().__init__(f"the header {header} is missing")
        self.header = header


class RepeatedHeader(SignatureError):
    """A header is there more than once, and only one of them can be the signed one."""

    def __init__(self, header: str) -> None:
        super().__init__(f"the header {header} is there more than once")
        self.header = header


class MalformedHeader(SignatureError):
    """A header is there but cannot be read."""

    def __init__(self, header: str, why: str) -> None:
        super().__init__(f"the header {header} {why}")
        self.header = header


class TimestampTooOld(SignatureError):
    """Signed longer ago than tolerated: replayed, or the clocks differ."""


class TimestampTooNew(SignatureError):
    """Signed further in the future than tolerated: the clocks differ."""


class SignatureMismatch(SignatureError):
    """No signature fits: another secret, or somebody changed the request."""


@dataclass(frozen=True, slots=True)
class Signed:
    """What a good signature vouches for, beside the body."""

    message_id: str
    timestamp: int


def parse_secret(text: str) -> bytes:
    """The key inside `whsec_…`.

    Raises:
        UsageError: it is not one; the message never shows the secret.
    """
    if not text.startswith(SECRET_PREFIX):
        raise UsageError(
            f"secret: must start with {SECRET_PREFIX!r}, followed by "
            f"{SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes in base64"
        )
    encoded = text[len(SECRET_PREFIX) :]
    try:
        # Other senders' tools print secrets without padding.
        secret = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise UsageError(f"secret: what follows {SECRET_PREFIX!r} is not base64") from None
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise UsageError(
            f"secret: must hold {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes, not {len(secret)}"
        )
    return secret


def format_secret(secret: bytes) -> str:
    """`whsec_…` of a key of 24 to 64 bytes.

    Raises:
        UsageError: the key is shorter or longer.
    """
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise UsageError(
            f"secret: must hold {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes, not {len(secret)}"
        )
    return SECRET_PREFIX + base64.b64encode(secret).decode("ascii")


def sign(secret: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """One signature, `v1,…`; `timestamp` is in epoch seconds."""
    return f"{_HMAC},{_hmac(secret, f'{message_id}.{timestamp}.'.encode(), body)}"


def sign_ed25519(key: PrivateKey, message_id: str, timestamp: int, body: bytes) -> str:
    """One signature, `v1a,…`; `timestamp` is in epoch seconds."""
    return f"{_ED25519},{key.sign(f'{message_id}.{timestamp}.'.encode() + body)}"


def sign_with(key: SigningKey, message_id: str, timestamp: int, body: bytes) -> str:
    """One signature of the version that the key is for; `timestamp` is in epoch seconds."""
    if isinstance(key, bytes):
        return sign(key, message_id, timestamp, body)
    return sign_ed25519(key, message_id, timestamp, body)


def parse_signing_key(text: str) -> SigningKey:
    """The secret inside `whsec_…`, or the private key inside `whsk_…`.

    Raises:
        UsageError: it is neither; the message never shows it.
    """
    return parse_private_key(text) if text.startswith(PRIVATE_PREFIX) else parse_secret(text)


def parse_key(text: str) -> Key:
    """The secret inside `whsec_…`, or the public key inside `whpk_…`.

    Raises:
        UsageError: it is neither; the message never shows a secret.
    """
    return parse_public_key(text) if text.startswith(PUBLIC_PREFIX) else parse_secret(text)


def verify(
    headers: Mapping[str, str],
    body: bytes,
    keys: Sequence[Key],
    now: float,
    tolerance_s: float = TOLERANCE_S,
) -> Signed:
    """Check that a holder of one of `keys` signed this request just now.

    The names of `headers` may be in any case.  Signatures of versions for which
    there is no key are passed over, as the specification asks.  `now` is in epoch
    seconds.

    Raises:
        SignatureError: one of its kinds, see the top of this module.
        UsageError: there is no key to check with.
    """
    if not keys:
        raise UsageError("secret: at least one is needed to verify a signature")
    message_id, timestamp_text, signatures = _signed_headers(headers)
    candidates = _candidates(signatures, keys)
    timestamp = int(timestamp_text)
    if timestamp < now - tolerance_s:
        raise TimestampTooOld(
            f"signed {now - timestamp:.0f} s ago; {tolerance_s:g} s are tolerated"
        )
    if timestamp > now + tolerance_s:
        raise TimestampTooNew(
            f"signed {timestamp - now:.0f} s in the future; {tolerance_s:g} s are tolerated"
        )
    signed = _bytes(ID_HEADER, f"{message_id}.{timestamp_text}.") + body
    match = False
    for key in keys:
        # No early exit: the time taken must not tell which secret fitted.
        if isinstance(key, PublicKey):
            for candidate in candidates[_ED25519]:
                match |= key.fits(candidate, signed)
        else:
            expected = _hmac(key, signed).encode("ascii")
            for candidate in candidates[_HMAC]:
                match |= hmac.compare_digest(expected, _bytes(SIGNATURE_HEADER, candidate))
    if not match:
        raise SignatureMismatch(
            "no signature fits: the secret is another one, or the request was changed on its way"
        )
    return Signed(message_id, timestamp)


def _signed_headers(headers: Mapping[str, str]) -> tuple[str, str, str]:
    """Id, time stamp and signatures, as far as they mean something."""
    wanted = {ID_HEADER: "", TIMESTAMP_HEADER: "", SIGNATURE_HEADER: ""}
    for name, value in headers.items():
        if (lower := name.lower()) in wanted:
            if wanted[lower]:
                raise RepeatedHeader(lower)
            wanted[lower] = value
    for header, value in wanted.items():
        if not value:
            raise MissingHeader(header)
    message_id, timestamp, signatures = wanted.values()
    if "." in message_id:
        # Else the same bytes could be another id, time and body.
        raise MalformedHeader(ID_HEADER, 'holds a ".", which is what sets signed parts apart')
    _bytes(ID_HEADER, message_id)
    if not _TIMESTAMP.fullmatch(timestamp):
        raise MalformedHeader(TIMESTAMP_HEADER, "is not a number of epoch seconds")
    return message_id, timestamp, signatures


def _candidates(text: str, keys: Sequence[Key]) -> dict[str, list[str]]:
    """The signatures of each version that there is a key for, without their versions."""
    versions = {_ED25519 if isinstance(key, PublicKey) else _HMAC for key in keys}
    found: dict[str, list[str]] = {_HMAC: [], _ED25519: []}
    signatures = text.split(" ")
    if len(signatures) > SIGNATURES_MAX:
        raise MalformedHeader(SIGNATURE_HEADER, f"has more than {SIGNATURES_MAX} signatures")
    for signature in signatures:
        version, comma, encoded = signature.partition(",")
        if comma and version in versions:
            _bytes(SIGNATURE_HEADER, encoded)
            found[version].append(encoded)
    if len(found[_ED25519]) > ED25519_SIGNATURES_MAX:
        why = f"has more than {ED25519_SIGNATURES_MAX} signatures of version {_ED25519}"
        raise MalformedHeader(SIGNATURE_HEADER, why)
    if not any(found.values()):
        wanted = " or ".join(sorted(versions))
        raise MalformedHeader(SIGNATURE_HEADER, f"has no signature of version {wanted}")
    return found


def _hmac(secret: bytes, *signed: bytes) -> str:
    mac = _begun(secret).copy()
    for part in signed:
        mac.update(part)
    return binascii.b2a_base64(mac.digest(), newline=False).decode("ascii")


@lru_cache(1024)
def _begun(secret: bytes) -> hmac.HMAC:
    """A MAC with its key taken in: a copy costs less than to begin anew each time."""
    return hmac.new(secret, digestmod="sha256")


def _bytes(header: str, text: str) -> bytes:
    """Header text as bytes; servers decode odd bytes to lone surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise MalformedHeader(header, "has characters that no header can have") from None

"""Standard Webhooks 1.0, symmetric: HMAC-SHA256 over id, time stamp and body.

https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md

The signed text is `{webhook-id}.{webhook-timestamp}.{body}`; the header
`webhook-signature` holds one or more signatures, each with its version, set
apart by spaces.  A sender whose secret is being replaced signs with both.

    SignatureError
    ├── MissingHeader        one of the three headers is not there
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
from typing import TYPE_CHECKING

from outbox.errors import OutboxError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SECRET_PREFIX = "whsec_"  # noqa: S105  a prefix, not a secret
SECRET_BYTES_MIN = 24
SECRET_BYTES_MAX = 64
TOLERANCE_S = 300

ID_HEADER = "webhook-id"
TIMESTAMP_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"

_TIMESTAMP = re.compile(r"[0-9]{1,15}", re.ASCII)


class SignatureError(OutboxError):
    """The request is not one that a holder of the secret made just now."""


class MissingHeader(SignatureError):
    """A header that every signed request has is not there."""

    def __init__(self, header: str) -> None:
        super().__init__(f"the header {header} is missing")
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
    return _signature(secret, f"{message_id}.{timestamp}.".encode(), body)


def verify(
    headers: Mapping[str, str],
    body: bytes,
    secrets: Sequence[bytes],
    now: float,
    tolerance_s: float = TOLERANCE_S,
) -> Signed:
    """Check that a holder of one of `secrets` signed this request just now.

    The names of `headers` may be in any case.  Signatures of versions other
    than `v1` are passed over, as the specification asks.  `now` is in epoch
    seconds.

    Raises:
        SignatureError: one of its kinds, see the top of this module.
        UsageError: there is no secret to check with.
    """
    if not secrets:
        raise UsageError("secret: at least one is needed to verify a signature")
    wanted = {ID_HEADER: "", TIMESTAMP_HEADER: "", SIGNATURE_HEADER: ""}
    for name, value in headers.items():
        if (lower := name.lower()) in wanted:
            wanted[lower] = value
    for header, value in wanted.items():
        if not value:
            raise MissingHeader(header)
    message_id, timestamp_text, signatures = wanted.values()
    if not _TIMESTAMP.fullmatch(timestamp_text):
        raise MalformedHeader(TIMESTAMP_HEADER, "is not a number of epoch seconds")
    candidates = [
        _bytes(SIGNATURE_HEADER, signature)
        for signature in signatures.split(" ")
        if signature.startswith("v1,")
    ]
    if not candidates:
        raise MalformedHeader(SIGNATURE_HEADER, "has no signature of version v1")
    timestamp = int(timestamp_text)
    if timestamp < now - tolerance_s:
        raise TimestampTooOld(
            f"signed {now - timestamp:.0f} s ago; {tolerance_s:g} s are tolerated"
        )
    if timestamp > now + tolerance_s:
        raise TimestampTooNew(
            f"signed {timestamp - now:.0f} s in the future; {tolerance_s:g} s are tolerated"
        )
    prefix = _bytes(ID_HEADER, f"{message_id}.{timestamp_text}.")
    match = False
    for secret in secrets:
        expected = _signature(secret, prefix, body).encode("ascii")
        for candidate in candidates:
            # No early exit: the time taken must not tell which one fitted.
            match |= hmac.compare_digest(expected, candidate)
    if not match:
        raise SignatureMismatch(
            "no signature fits: the secret is another one, or the request was changed on its way"
        )
    return Signed(message_id, timestamp)


def _signature(secret: bytes, prefix: bytes, body: bytes) -> str:
    digest = hmac.digest(secret, prefix + body, "sha256")
    return "v1," + base64.b64encode(digest).decode("ascii")


def _bytes(header: str, text: str) -> bytes:
    """Header text as bytes; servers decode odd bytes to lone surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise MalformedHeader(header, "has characters that no header can have") from None

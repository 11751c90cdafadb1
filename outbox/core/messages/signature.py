"""Standard Webhooks 1.0 signatures: signing, verification and its errors.

https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md

The signed text is `{webhook-id}.{webhook-timestamp}.{body}`; the header
`webhook-signature` has one or more signatures, separated by spaces, each with its
version.  During a secret rotation the sender signs with both secrets.
Version `v1` is HMAC-SHA256 with a shared secret, `v1a` is ed25519
(`outbox.core.messages.ed25519`).

    SignatureError
    ├── MissingHeader        one of the three headers is missing
    ├── RepeatedHeader       a header occurs twice, so the signed one is unknown
    ├── MalformedHeader      a header has an invalid value
    ├── SignatureMismatch    another secret, or a changed body or header
    └── TimestampRefused     a valid signature, but its time is not tolerated
        ├── TimestampTooOld      a replayed request, or the clocks differ
        └── TimestampTooNew      the clocks differ
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, TypeAlias

from outbox.core.messages.ed25519 import (
    PRIVATE_PREFIX,
    PUBLIC_PREFIX,
    PublicKey,
    parse_private_key,
    parse_public_key,
)
from outbox.core.model.secret_text import (
    SECRET_PREFIX,
    decode_base64,
    is_ambiguous,
    raw_bytes,
)
from outbox.errors import OutboxError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from hashlib import _Hash

    from outbox.core.messages.ed25519 import PrivateKey
    from outbox.core.model.secret_text import GivenSecret

Key: TypeAlias = bytes | PublicKey
"""A verification key: a shared secret or a public key."""
SigningKey: TypeAlias = "bytes | PrivateKey"
"""A signing key: a shared secret or a private key."""

SECRET_BYTES_MIN = 24
SECRET_BYTES_MAX = 64
TOLERANCE_S = 300
SIGNATURES_MAX = 32
ED25519_SIGNATURES_MAX = 4
"""Signatures per request.  Every ed25519 check costs a pass over the body, and unauthenticated
senders can cause it."""

ID_HEADER = "webhook-id"
TIMESTAMP_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"
REFUSED_TIMESTAMP = ("X-Refused", "timestamp")
"""The header of a 503 response to a request whose signature is valid and whose time is not
tolerated."""

_HMAC, _ED25519 = "v1", "v1a"
_BLOCK_BYTES = 64
_INNER_PAD = bytes(byte ^ 0x36 for byte in range(256))
_OUTER_PAD = bytes(byte ^ 0x5C for byte in range(256))
_TIMESTAMP = re.compile(r"[0-9]{1,15}", re.ASCII)


class SignatureError(OutboxError):
    """The request has no valid, recent signature."""


class MissingHeader(SignatureError):
    """A required header is missing."""

    def __init__(self, header: str) -> None:
        super().__init__(f"the header {header} is missing")
        self.header = header


class RepeatedHeader(SignatureError):
    """A header occurs more than once, so the signed value is unknown."""

    def __init__(self, header: str) -> None:
        super().__init__(f"the header {header} occurs more than once")
        self.header = header


class MalformedHeader(SignatureError):
    """A header has an invalid value."""

    def __init__(self, header: str, reason: str) -> None:
        super().__init__(f"the header {header} {reason}")
        self.header = header


class TimestampRefused(SignatureError):
    """The signature is valid, but its time is not tolerated: respond 503, with REFUSED_TIMESTAMP.

    The sender signs each attempt anew, so a later one may be accepted.
    """


class TimestampTooOld(TimestampRefused):
    """Signed longer ago than tolerated: replayed, or the clocks differ."""


class TimestampTooNew(TimestampRefused):
    """Signed further in the future than tolerated: the clocks differ."""


class SignatureMismatch(SignatureError):
    """No signature matches: the secret differs, or the request was changed."""


@dataclass(frozen=True, slots=True)
class VerifiedSignature:
    """The signed values of a verified request, besides the body."""

    message_id: str
    timestamp: int


def parse_secret(text: str) -> bytes:
    """Decode a shared secret: `whsec_…`, or its base64 alone.

    Other senders' tools print secrets without the prefix or the padding.

    Raises:
        UsageError: the text is not a secret; the message never contains it.
    """
    secret = decode_base64(text)
    if secret is None:
        raise UsageError(
            f"secret: must be {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes in base64, with or "
            f"without {SECRET_PREFIX!r} before it"
        )
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise UsageError(
            f"secret: must hold {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes, not {len(secret)}"
        )
    return secret


def format_secret(secret: bytes) -> str:
    """Encode a shared secret of 24 to 64 bytes as `whsec_…`.

    Raises:
        UsageError: the secret is shorter or longer.
    """
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise UsageError(
            f"secret: must hold {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes, not {len(secret)}"
        )
    return SECRET_PREFIX + base64.b64encode(secret).decode("ascii")


def sign(key: SigningKey, message_id: str, timestamp: int, body: bytes) -> str:
    """A signature of the key's version: `v1,…` (HMAC-SHA256) with a shared secret, `v1a,…` with a
    private key; `timestamp` is in epoch seconds.
    """
    if isinstance(key, bytes):
        return f"{_HMAC},{_hmac(key, f'{message_id}.{timestamp}.'.encode(), body)}"
    return sign_ed25519(key, message_id, timestamp, body)


def sign_ed25519(key: PrivateKey, message_id: str, timestamp: int, body: bytes) -> str:
    """An ed25519 signature, `v1a,…`; `timestamp` is in epoch seconds."""
    return f"{_ED25519},{key.sign(f'{message_id}.{timestamp}.'.encode() + body)}"


def parse_signing_key(text: str) -> SigningKey:
    """Decode a shared secret, `whsec_…`, or a private key, `whsk_…`.

    Raises:
        UsageError: the text is neither; the message never contains it.
    """
    return parse_private_key(text) if text.startswith(PRIVATE_PREFIX) else parse_secret(text)


def parse_given_secret(given: GivenSecret) -> str:
    """The stored form of a signing secret that a user gives: `whsec_…` or `whsk_…`.

    A key of more bytes than a block of SHA-256 is stored as its hash, which signs the same
    (RFC 2104, section 2).

    Raises:
        UsageError: it is no signing secret, or it could be meant in two ways; the message never
            contains it.
    """
    text = given.text
    if text.startswith(PRIVATE_PREFIX):
        if given.encoding is not None:
            raise UsageError(f"secret_encoding: is for shared secrets, not for {PRIVATE_PREFIX}…")
        parse_private_key(text)
        return text
    if given.encoding == "raw":
        key = raw_bytes(text)
        if key is None or len(key) < SECRET_BYTES_MIN:
            raise UsageError(f"secret: must be a text of at least {SECRET_BYTES_MIN} bytes")
        return format_secret(key if len(key) <= _BLOCK_BYTES else sha256(key).digest())
    if given.encoding is None and is_ambiguous(text):
        raise UsageError(
            "secret: some senders decode such hex digits as base64, and some sign with the text's "
            "own bytes; give the secret encoding: base64 or raw"
        )
    return format_secret(parse_secret(text))


def parse_key(text: str) -> Key:
    """Decode a shared secret, `whsec_…`, or a public key, `whpk_…`.

    Raises:
        UsageError: the text is neither; the message never contains a secret.
    """
    return parse_public_key(text) if text.startswith(PUBLIC_PREFIX) else parse_secret(text)


def verify(
    headers: Mapping[str, str],
    body: bytes,
    keys: Sequence[Key],
    now: float,
    tolerance_s: float = TOLERANCE_S,
) -> VerifiedSignature:
    """Verify that one of `keys` signed this request within `tolerance_s` of `now`.

    Signatures of versions without a key are ignored, as the specification requires.

    Args:
        headers: the request's headers; names in any case.
        keys: the receiver's keys, at least one; two during a rotation.
        now: epoch seconds.
        tolerance_s: maximum difference between `now` and the signed time stamp, in seconds.

    Raises:
        SignatureError: a subclass for each cause, see the top of this module.
        UsageError: `keys` is empty.
    """
    if not keys:
        raise UsageError("secret: at least one is needed to verify a signature")
    message_id, timestamp_text, signatures = _signed_headers(headers)
    candidates = _candidates(signatures, keys)
    _require_match(_bytes(ID_HEADER, f"{message_id}.{timestamp_text}.") + body, candidates, keys)
    # Last, so that the error of a time shows that the request has a valid signature.
    timestamp = int(timestamp_text)
    if timestamp < now - tolerance_s:
        raise TimestampTooOld(
            f"signed {now - timestamp:.0f} s ago; {tolerance_s:g} s are tolerated"
        )
    if timestamp > now + tolerance_s:
        raise TimestampTooNew(
            f"signed {timestamp - now:.0f} s in the future; {tolerance_s:g} s are tolerated"
        )
    return VerifiedSignature(message_id, timestamp)


def verify_signatures(header: str, signatures: str, signed: bytes, keys: Sequence[Key]) -> None:
    """Verify that one of `keys` signed a text besides the body.

    Args:
        header: the header's name, for errors.
        signatures: the header's value, in the form of `webhook-signature`.
        signed: the text, which has the id and the time stamp of a verified request.

    Raises:
        SignatureError: none did.
    """
    _require_match(signed, _candidates(signatures, keys, header), keys)


def _require_match(signed: bytes, candidates: dict[str, list[str]], keys: Sequence[Key]) -> None:
    match = False
    for key in keys:
        # No early exit: the duration must not reveal which secret matched.
        if isinstance(key, PublicKey):
            for candidate in candidates[_ED25519]:
                match |= key.verifies(candidate, signed)
        else:
            expected = _hmac(key, signed).encode("ascii")
            for candidate in candidates[_HMAC]:
                match |= hmac.compare_digest(expected, _bytes(SIGNATURE_HEADER, candidate))
    if not match:
        raise SignatureMismatch(
            "no signature matches: the secret differs, or the request was changed in transit"
        )


def _signed_headers(headers: Mapping[str, str]) -> tuple[str, str, str]:
    """Validated id, time stamp and signatures."""
    values = {ID_HEADER: "", TIMESTAMP_HEADER: "", SIGNATURE_HEADER: ""}
    for name, value in headers.items():
        if (lower := name.lower()) in values:
            if values[lower]:
                raise RepeatedHeader(lower)
            values[lower] = value
    for header, value in values.items():
        if not value:
            raise MissingHeader(header)
    message_id, timestamp, signatures = values.values()
    if "." in message_id:
        # Otherwise the same signed bytes could be another id, time stamp and body.
        raise MalformedHeader(ID_HEADER, 'contains a ".", which separates the signed parts')
    _bytes(ID_HEADER, message_id)
    if not _TIMESTAMP.fullmatch(timestamp):
        raise MalformedHeader(TIMESTAMP_HEADER, "is not a number of epoch seconds")
    return message_id, timestamp, signatures


def _candidates(
    text: str, keys: Sequence[Key], header: str = SIGNATURE_HEADER
) -> dict[str, list[str]]:
    """The signatures by version, for versions with a key, without the version prefix."""
    versions = {_ED25519 if isinstance(key, PublicKey) else _HMAC for key in keys}
    by_version: dict[str, list[str]] = {_HMAC: [], _ED25519: []}
    signatures = text.split(" ")
    if len(signatures) > SIGNATURES_MAX:
        raise MalformedHeader(header, f"has more than {SIGNATURES_MAX} signatures")
    for signature in signatures:
        version, comma, encoded = signature.partition(",")
        if comma and version in versions:
            _bytes(header, encoded)
            by_version[version].append(encoded)
    if len(by_version[_ED25519]) > ED25519_SIGNATURES_MAX:
        reason = f"has more than {ED25519_SIGNATURES_MAX} signatures of version {_ED25519}"
        raise MalformedHeader(header, reason)
    if not any(by_version.values()):
        wanted = " or ".join(sorted(versions))
        raise MalformedHeader(header, f"has no signature of version {wanted}")
    return by_version


def _hmac(secret: bytes, start: bytes, rest: bytes = b"") -> str:
    """The HMAC-SHA256 of `start + rest` in base64, without joining them."""
    keyed_inner, keyed_outer = _keyed_hashes(secret)
    inner, outer = keyed_inner.copy(), keyed_outer.copy()
    inner.update(start)
    inner.update(rest)
    outer.update(inner.digest())
    return binascii.b2a_base64(outer.digest(), newline=False).decode("ascii")


@lru_cache(1024)
def _keyed_hashes(secret: bytes) -> tuple[_Hash, _Hash]:
    """The inner and outer hash of HMAC-SHA256 (RFC 2104), keyed.

    Copying them takes half the time of copying an `hmac.HMAC`, and a fifth of keying one.
    """
    key = secret if len(secret) <= _BLOCK_BYTES else sha256(secret).digest()
    key = key.ljust(_BLOCK_BYTES, b"\0")
    return sha256(key.translate(_INNER_PAD)), sha256(key.translate(_OUTER_PAD))


def _bytes(header: str, text: str) -> bytes:
    """Header text as bytes; servers decode non-ASCII bytes to lone surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise MalformedHeader(header, "has characters that a header cannot contain") from None

"""Signature verification of requests.

    verified = verify(headers, body, ["whsec_…"])

It accepts every sender that signs according to Standard Webhooks 1.0.  For deliveries of
a relay it also parses the body and compares the `X-` headers with it, because the
signature does not cover them: see `outbox.receiver.message`.

    SignatureError       no valid signature: see `outbox.core.messages.signature`
    BadMessage           signed, but headers and body differ, or the headers are those of
                         a delivery and the body is not one
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args
from uuid import UUID

from outbox.core.messages import signed_metadata
from outbox.core.messages.ed25519 import PUBLIC_PREFIX
from outbox.core.messages.signature import (
    ID_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    TOLERANCE_S,
    RepeatedHeader,
    parse_key,
    verify_signatures,
)
from outbox.core.messages.signature import verify as verify_signature
from outbox.core.model.headers import DEFAULT_PREFIX, check_prefix, relay_headers
from outbox.core.model.message_format import FormatName, MessageFormat
from outbox.core.model.secret_text import SECRET_PREFIX
from outbox.core.model.text import quoted
from outbox.errors import UsageError
from outbox.receiver.message import BadMessage, Message, has_signed_metadata, is_delivery
from outbox.receiver.message import parse as parse_messages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from outbox.core.messages.signature import Key, VerifiedSignature
    from outbox.receiver.payload import Parse

    Headers: TypeAlias = Mapping[str, str] | Iterable[tuple[str, str]]
    """Names in any case; pairs preserve repeated headers, which are refused."""

_SIGNED = {
    ID_HEADER,
    TIMESTAMP_HEADER,
    SIGNATURE_HEADER,
    signed_metadata.SIGNATURE_HEADER,
    signed_metadata.CONTENT_TYPE,
    *(signed_metadata.ATTRIBUTE_PREFIX + name for name in signed_metadata.ATTRIBUTES),
}
_DELIVERY_ID_VERSION = 8
"""An X-Delivery is a UUID of this version; other senders have other ids."""


@dataclass(frozen=True, slots=True)
class Verified:
    """A request with a valid signature."""

    message_id: str
    """The header `webhook-id`: the idempotency key of the request.  For a batch, use the
    `delivery_id` of each message instead."""
    timestamp: int
    """Time of the signature, in epoch seconds."""
    messages: tuple[Message, ...] = ()
    """The delivery of a relay, or those of a batch; empty for requests of other senders."""


class Verifier:
    """Verifies requests with a fixed set of keys.

    Args:
        secrets: one or more of `whsec_…` (HMAC secret, also without its prefix) and `whpk_…`
            (ed25519 public key).
        tolerance_s: maximum difference between signature time and clock, in seconds.
        header_prefix: prefix of the endpoint's header names, if it is not `X-`; several while
            the endpoint's prefix is being changed.
        formats: the endpoint's format; several while it is being changed; None: any.  An endpoint
            whose format is `raw` or `cloudevents-binary` needs it: otherwise a payload that looks
            like an envelope is read as one when headers are removed in transit.
        parse: parses the JSON text of a payload when `Message.data` is read; None: orjson, without
            rounding numbers.
        clock: returns epoch seconds.

    Raises:
        UsageError: no secret, or an invalid one; the message never shows it.
    """

    def __init__(
        self,
        secrets: str | Sequence[str],
        *,
        tolerance_s: float = TOLERANCE_S,
        header_prefix: str | Sequence[str] = DEFAULT_PREFIX,
        formats: Collection[FormatName] | None = None,
        parse: Parse | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        texts = [secrets] if isinstance(secrets, str) else list(secrets or ())
        self._keys = tuple(map(_parse_key, texts))
        if not self._keys:
            raise UsageError("secret: at least one is required to verify signatures")
        self._tolerance_s = tolerance_s
        _require_formats(formats)
        self._formats = self._fetched_formats = None
        if formats is not None:
            self._formats = set(formats)
            self._fetched_formats = {MessageFormat(each).fetched.name for each in formats}
        self._parse = parse
        self._clock = clock
        given = [header_prefix] if isinstance(header_prefix, str) else list(header_prefix or ())
        self.header_prefixes = tuple(check_prefix("header_prefix", p) for p in given)
        if not self.header_prefixes:
            raise UsageError("header_prefix: at least one is required")
        self._names = _SIGNED.union(*map(relay_headers, self.header_prefixes))
        # Other senders may number their attempts, too.
        self._delivery_headers = {
            p: relay_headers(p) - {f"{p}{name}".lower() for name in ("attempt", "last-sequence")}
            for p in self.header_prefixes
        }

    def verify(self, headers: Headers, body: bytes, *, fetched: bool = False) -> Verified:
        """Verify one request.

        Args:
            headers: the request's headers; names in any case.
            body: the raw body.
            fetched: it was fetched, so a thin message has its payload.

        Raises:
            SignatureError: no valid signature.
            BadMessage: signed, but headers and body differ.
        """
        read = fold(headers, self._names)
        signed = verify_signature(read, body, self._keys, self._clock(), self._tolerance_s)
        # Publishers cannot set the lane under any prefix, but other names of another prefix.
        found = [p for p in self.header_prefixes if f"{p}lane".lower() in read] or [
            p for p in self.header_prefixes if not self._delivery_headers[p].isdisjoint(read)
        ]
        # Headers without a signature of their own can be removed: that must not turn a delivery
        # into a request of another sender.
        if found or is_delivery(body):
            prefix = (found or self.header_prefixes)[0]
            messages = parse_signed(
                read, body, prefix, signed, self._keys, read_payload=self._parse
            )
            self._check_format(messages[0].format, fetched=fetched)
            return Verified(signed.message_id, signed.timestamp, messages)
        if _is_delivery_id(signed.message_id):
            raise BadMessage("the headers of the delivery are missing")
        return Verified(signed.message_id, signed.timestamp)

    def _check_format(self, name: FormatName, *, fetched: bool) -> None:
        if fetched and name == "thin":
            raise BadMessage("what was fetched has no payload")
        accepted = self._fetched_formats if fetched else self._formats
        if accepted is not None and name not in accepted:
            raise BadMessage(f"the format is {name}, not {' or '.join(sorted(accepted))}")


def parse_signed(
    headers: Mapping[str, str],
    body: bytes,
    prefix: str,
    signed: VerifiedSignature | None,
    keys: Sequence[Key],
    *,
    read_payload: Parse | None = None,
) -> tuple[Message, ...]:
    """Parse the deliveries of a request, and verify the signature of metadata in headers.

    Args:
        headers: the request's headers, by lower-case name.
        prefix: begins the names of the headers that describe a delivery.
        signed: the verified signature of the body; None: nothing is verified.
        read_payload: see `parse`.

    Raises:
        SignatureError: the signature of the metadata is not valid.
        BadMessage: neither a delivery nor a batch, or headers and body differ.
    """
    in_headers = has_signed_metadata(headers)
    if in_headers and signed is not None:
        header = signed_metadata.SIGNATURE_HEADER
        signed_id = f"{signed_metadata.SIGNED_ID}{signed.message_id}.{signed.timestamp}."
        text = signed_metadata.signed_text(headers, prefix.lower())
        verify_signatures(header, headers[header], signed_id.encode() + text, keys)
    return parse_messages(headers, body, prefix, in_headers=in_headers, read_payload=read_payload)


def _is_delivery_id(text: str) -> bool:
    try:
        return UUID(text).version == _DELIVERY_ID_VERSION
    except ValueError:
        return False


def verify(
    headers: Headers,
    body: bytes,
    secrets: str | Sequence[str],
    *,
    tolerance_s: float = TOLERANCE_S,
    header_prefix: str | Sequence[str] = DEFAULT_PREFIX,
    formats: Collection[FormatName] | None = None,
    parse: Parse | None = None,
    now: float | None = None,
) -> Verified:
    """Verify the signature of a request and parse its deliveries.

    Args:
        headers: the request's headers; names in any case.
        body: the raw body, not parsed and serialized again.
        secrets: one or more of `whsec_…` and `whpk_…`; both the old and the new one
            while a secret is being rotated.
        tolerance_s: maximum difference between signature time and `now`, in seconds.
        header_prefix, formats, parse: see `Verifier`.
        now: epoch seconds; None: the system clock.

    Raises:
        SignatureError: no valid signature; a subclass for each cause.
        BadMessage: signed, but headers and body differ.
        UsageError: no secret, or an invalid one.
    """
    clock = time.time if now is None else lambda: now
    verifier = Verifier(
        secrets,
        tolerance_s=tolerance_s,
        header_prefix=header_prefix,
        formats=formats,
        parse=parse,
        clock=clock,
    )
    return verifier.verify(headers, body)


def _parse_key(text: object) -> Key:
    if not isinstance(text, str):
        raise UsageError(f"secret: must be a text or a list of texts, not {type(text).__name__}")
    if sum(map(text.count, (SECRET_PREFIX, PUBLIC_PREFIX))) > 1:
        raise UsageError("secret: one text has several; give a list, such as text.split(',')")
    return parse_key(text.strip())


def _require_formats(given: Collection[str] | None) -> None:
    if given is not None and not given:
        raise UsageError("formats: at least one is required")
    for each in given or ():
        if each not in get_args(FormatName):
            raise UsageError(f"formats: there is no format {quoted(each)}")


def fold(headers: Headers, names: Collection[str]) -> dict[str, str]:
    """Return the headers with these lower-case names.

    Raises:
        RepeatedHeader: one of them occurs more than once.
    """
    folded: dict[str, str] = {}
    for name, value in pairs_of(headers):
        lower = name.lower()
        if lower in names:
            if lower in folded:
                raise RepeatedHeader(lower)
            folded[lower] = value
    return folded


def pairs_of(headers: Headers) -> Iterable[tuple[str, str]]:
    """Return headers as (name, value) pairs."""
    return headers.items() if hasattr(headers, "items") else headers

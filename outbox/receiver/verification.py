"""Is this request what a holder of the secret sent just now?

    verified = verify(headers, body, ["whsec_…"])

It says so of every sender that signs as Standard Webhooks 1.0 has it.  Of the relay's
own deliveries the body is read, too, and the `X-` headers are held against it, because
the signature does not cover them: see `outbox.receiver.message`.

    SignatureError       no, and why: see `outbox.core.delivery.signature`
    BadMessage           signed, but the headers say something else than the body, or it
                         is no delivery of a relay although its headers say so
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.core.delivery import receiver_checkpoint as checkpoint
from outbox.core.delivery.batch import LAST_SEQUENCE
from outbox.core.delivery.signature import (
    ID_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    TOLERANCE_S,
    RepeatedHeader,
    parse_key,
)
from outbox.core.delivery.signature import verify as verify_signature
from outbox.errors import UsageError
from outbox.receiver.message import HEADERS, BadMessage, Message, is_delivery, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from outbox.core.delivery.receiver_checkpoint import Mark

    Headers: TypeAlias = Mapping[str, str] | Iterable[tuple[str, str]]
    """Names in any case; as pairs, so that one that is there twice can be told."""

_READ = {
    ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER,
    "x-attempt", LAST_SEQUENCE.lower(), *map(str.lower, HEADERS),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verified:
    """A request that a holder of the secret sent."""

    message_id: str
    """The header `webhook-id`: the same for every copy.  Drop what you have seen; of a batch,
    by the `delivery_id` of each message."""
    timestamp: int
    """When this attempt was signed, in epoch seconds."""
    messages: tuple[Message, ...] = ()
    """The delivery of a relay, or those of a batch; none: a checkpoint, or another sender's
    request."""
    checkpoint: tuple[Mark, ...] | None = None
    """How far its lanes are, if that is what a relay tells; see
    `outbox.core.delivery.receiver_checkpoint`."""


class Verifier:
    """Checks requests against the same keys.

    Args:
        secrets: one or more texts, `whsec_…` for a secret or `whpk_…` for an ed25519 key.
        tolerance_s: how old, or how far in the future, a signature may be.
        clock: epoch seconds.

    Raises:
        UsageError: there is none, or one cannot be read; the message never shows it.
    """

    def __init__(
        self,
        secrets: str | Sequence[str],
        *,
        tolerance_s: float = TOLERANCE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        texts = [secrets] if isinstance(secrets, str) else list(secrets or ())
        self._keys = tuple(parse_key(text.strip()) for text in texts)
        if not self._keys:
            raise UsageError("secret: at least one is needed to verify a signature")
        self._tolerance_s = tolerance_s
        self._clock = clock

    def verify(self, headers: Headers, body: bytes) -> Verified:
        """Check one request.

        Raises:
            SignatureError: it is not signed as it should be.
            BadMessage: it is signed, and contradicts itself.
        """
        read = fold(headers)
        signed = verify_signature(read, body, self._keys, self._clock(), self._tolerance_s)
        says_so = any(name.lower() in read for name in HEADERS)
        # Nor is it somebody else's when the headers are taken away, which nobody signed.
        if says_so or is_delivery(body):
            return Verified(signed.message_id, signed.timestamp, parse(read, body))
        try:
            marks = checkpoint.parse(body)
        except ValueError as error:
            raise BadMessage(str(error)) from None
        return Verified(signed.message_id, signed.timestamp, (), marks)


def verify(
    headers: Headers,
    body: bytes,
    secrets: str | Sequence[str],
    *,
    tolerance_s: float = TOLERANCE_S,
    now: float | None = None,
) -> Verified:
    """Check that a holder of one of `secrets` signed this request just now.

    Args:
        headers: of the request; names in any case.
        body: its bytes as they came, not parsed and written anew.
        secrets: one or more texts, `whsec_…` or `whpk_…`.  While a secret is being
            replaced, give both.
        tolerance_s: how old, or how far in the future, the signature may be.
        now: epoch seconds; by default this machine's clock.

    Raises:
        SignatureError: it is not signed as it should be; each way has its own kind.
        BadMessage: it is signed, and its headers say something else than its body.
        UsageError: a secret cannot be read, or there is none.
    """
    clock = time.time if now is None else lambda: now
    return Verifier(secrets, tolerance_s=tolerance_s, clock=clock).verify(headers, body)


def fold(headers: Headers) -> dict[str, str]:
    """The headers that are read here, in lower case.

    Raises:
        RepeatedHeader: one is there more than once.
    """
    folded: dict[str, str] = {}
    for name, value in pairs_of(headers):
        lower = name.lower()
        if lower in _READ:
            if lower in folded:
                raise RepeatedHeader(lower)
            folded[lower] = value
    return folded


def pairs_of(headers: Headers) -> Iterable[tuple[str, str]]:
    """The headers as pairs."""
    return headers.items() if hasattr(headers, "items") else headers

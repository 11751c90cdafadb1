"""Framework-independent requests and responses of a receiver.

| status | cause | effect at the relay |
|---|---|---|
| 200 | processed, now or before | delivered |
| 400, 401 | headers and body disagree; no valid signature | dead letter |
| 405, 413 | not a POST; body too large | dead letter |
| 422 | refused by a handler, no handler, or sequence number of another delivery | dead letter |
| 500 | a handler or the receiver failed | retried |
| 503 | overloaded, no database, or earlier deliveries missing | retried after Retry-After |
| 503, `X-Refused: timestamp` | valid signature, time not tolerated | signed and sent again |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from outbox.core.messages.signature import REFUSED_TIMESTAMP, TimestampRefused

if TYPE_CHECKING:
    from outbox.core.messages.signature import SignatureError
    from outbox.receiver.verification import Headers

DELIVERY_BODY_BYTES_MAX = 1024 * 1024
"""Four times the largest payload that can be published by default."""


@dataclass(frozen=True, slots=True)
class Request:
    """An HTTP request to a receiver."""

    method: str
    headers: Headers
    body: bytes


class RequestOutcome(StrEnum):
    """Outcome of a request; the `outcome` attribute of the receiver's metrics."""

    PROCESSED = "processed"
    DUPLICATE = "duplicate"
    """Processed before."""
    CONFLICT = "conflict"
    """Its sequence number was used by another delivery."""
    REJECTED = "rejected"
    """No valid signature, or headers and body disagree."""
    REFUSED = "refused"
    """A handler raised `Refuse`: the event can never be processed."""
    FAILED = "failed"
    """A handler raised another error, or the receiver has an error."""
    PUT_OFF = "put_off"
    """503 with Retry-After: overloaded, database unavailable or busy, or deliveries missing."""


@dataclass(frozen=True, slots=True)
class Response:
    """The HTTP response to a request."""

    outcome: RequestOutcome
    status: int
    text: str
    """One line for the sender's log; the body without its newline."""
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def body(self) -> bytes:
        """The response body: `text` and a newline."""
        return f"{self.text}\n".encode()

    @property
    def all_headers(self) -> tuple[tuple[str, str], ...]:
        """All response headers, including Content-Type and Content-Length."""
        length = ("Content-Length", str(len(self.body)))
        return (("Content-Type", "text/plain; charset=utf-8"), length, *self.headers)


def rejected(status: int, reason: str, *headers: tuple[str, str]) -> Response:
    """Build a response for a request that is not a valid delivery."""
    return Response(RequestOutcome.REJECTED, status, reason, headers)


def unverified(error: SignatureError) -> Response:
    """Build the 401 response, or 503 if the signature is valid and only its time is not tolerated.

    A forged request must not get a status that makes its sender keep and repeat it.
    """
    if isinstance(error, TimestampRefused):
        return rejected(503, str(error), REFUSED_TIMESTAMP)
    return rejected(401, str(error))


def put_off(reason: str, retry_after_s: int) -> Response:
    """Build a 503 response with Retry-After."""
    headers = (("Retry-After", str(retry_after_s)),)
    return Response(RequestOutcome.PUT_OFF, 503, one_line(reason), headers)


def too_large(bytes_max: int) -> Response:
    """Build the 413 response."""
    return rejected(413, f"the body is larger than {bytes_max} bytes")


def not_post() -> Response:
    """Build the 405 response."""
    return rejected(405, "send deliveries by POST", ("Allow", "POST"))


def one_line(text: str) -> str:
    """Collapse a text to one line of at most 500 characters."""
    return " ".join(text.split())[:500]

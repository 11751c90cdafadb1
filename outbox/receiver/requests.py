"""A request to a receiver and its answer, whatever the web framework calls them.

| status | when | what the relay makes of it |
|---|---|---|
| 200 | processed, or it had been before | delivered |
| 400, 401 | it contradicts itself; it is not signed | a dead letter |
| 405, 413 | not a POST; too large | a dead letter |
| 422 | refused by a handler, or its number was taken by another delivery | a dead letter |
| 500 | a handler failed | tried again later |
| 503 | too much at once, no database, something is missing | tried again after Retry-After |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox.receiver.verification import Headers

BODY_BYTES_MAX = 1024 * 1024
"""The largest payload that is published by default, four times."""


@dataclass(frozen=True, slots=True)
class Request:
    """What came."""

    method: str
    headers: Headers
    body: bytes


class Ended(StrEnum):
    """What became of a request."""

    PROCESSED = "processed"
    DUPLICATE = "duplicate"
    """It had been processed before."""
    CONFLICT = "conflict"
    """Its number was taken by another delivery."""
    REJECTED = "rejected"
    """It is not signed, or contradicts itself."""
    REFUSED = "refused"
    """A handler will never process it."""
    FAILED = "failed"
    """A handler failed."""
    COMPARED = "compared"
    """A checkpoint: what is missing is known now."""
    PUT_OFF = "put_off"
    """The sender was asked to come back later."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What to say to it."""

    ended: Ended
    status: int
    text: str
    """One line, for the sender's log."""
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def body(self) -> bytes:
        """The text with an end of line."""
        return f"{self.text}\n".encode()

    @property
    def all_headers(self) -> tuple[tuple[str, str], ...]:
        """Those of this answer, and what every one has."""
        length = ("Content-Length", str(len(self.body)))
        return (("Content-Type", "text/plain; charset=utf-8"), length, *self.headers)


def rejected(status: int, why: str, *headers: tuple[str, str]) -> Answer:
    """Not looked at any further: 4xx."""
    return Answer(Ended.REJECTED, status, why, headers)


def put_off(why: str, retry_after_s: int) -> Answer:
    """Not now: 503 with Retry-After."""
    return Answer(Ended.PUT_OFF, 503, one_line(why), (("Retry-After", str(retry_after_s)),))


def too_large(bytes_max: int) -> Answer:
    """More than is read: 413."""
    return rejected(413, f"the body is larger than {bytes_max} bytes")


def not_post() -> Answer:
    """Deliveries are sent by POST: 405."""
    return rejected(405, "send deliveries by POST", ("Allow", "POST"))


def one_line(text: str) -> str:
    """The text as it can stand in an answer's one line."""
    return " ".join(text.split())[:500]

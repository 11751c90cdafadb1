"""Response scripts of a receiver: one successful response, and all faults."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from outbox_devtools.chaos.ledger import ResponseOutcome

if TYPE_CHECKING:
    import random

BREAKS_OFF = (b"HTTP/1.1 200 O", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nonly this")
"""Truncated responses; the second one has a complete status line, so it counts as 200."""
GARBAGE = b"\x16\x03\x01\x00\xffthis is not HTTP\r\n\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DRIP_S_MIN, DRIP_S_MAX = 0.5, 5.0


class Responder(Protocol):
    """A receiver's end of a connection, with one request to respond to."""

    def expect(self, outcome: ResponseOutcome, label: str) -> None:
        """Record a response that is chosen but not sent yet."""

    def finish(
        self, outcome: ResponseOutcome, label: str, data: bytes, *, close: bool = False
    ) -> None:
        """Send a response."""

    def drip(self, label: str, data: bytes, every_s: float) -> None:
        """Send a response byte by byte; the relay may time out before its end."""

    def stream_endlessly(self) -> None:
        """Send chunks until the connection is closed."""

    def reset(self, label: str) -> None:
        """Send RST instead of a response, or right after one."""


ResponseScript = Callable[[Responder, "random.Random"], None]
"""Sends one kind of response, or starts to."""


def status_line(status: int, *headers: str) -> bytes:
    """Build a complete response without a body."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    lines = [f"HTTP/1.1 {status} {phrase}", *headers, "Content-Length: 0", "", ""]
    return "\r\n".join(lines).encode("latin-1")


GOOD = status_line(200)


def _respond(
    outcome: ResponseOutcome, label: str, data: bytes, *, close: bool = False
) -> ResponseScript:
    return lambda connection, rng: connection.finish(outcome, label, data, close=close)


def _hang(connection: Responder, rng: random.Random) -> None:
    connection.expect(ResponseOutcome.BAD, "hang")


def _drip(connection: Responder, rng: random.Random) -> None:
    connection.expect(ResponseOutcome.BAD, "drip")
    connection.drip("drip", GOOD, rng.uniform(DRIP_S_MIN, DRIP_S_MAX) / len(GOOD))


def _reset(connection: Responder, rng: random.Random) -> None:
    connection.reset("reset")


def _lose(connection: Responder, rng: random.Random) -> None:
    connection.finish(ResponseOutcome.GOOD, "lost", b"")
    connection.reset("lost")


def _half(connection: Responder, rng: random.Random) -> None:
    which = rng.randrange(len(BREAKS_OFF))
    outcome = ResponseOutcome.GOOD if which else ResponseOutcome.BAD
    connection.finish(outcome, "half-response", BREAKS_OFF[which], close=True)


def _endless(connection: Responder, rng: random.Random) -> None:
    connection.finish(ResponseOutcome.GOOD, "endless", ENDLESS)
    connection.stream_endlessly()


def _retry_after(connection: Responder, rng: random.Random) -> None:
    status = rng.choice((429, 503))
    connection.finish(ResponseOutcome.BAD, "retry-after", status_line(status, "Retry-After: 1"))


OK = _respond(ResponseOutcome.GOOD, "ok", GOOD)
RESPONSES: dict[str, ResponseScript] = {
    "hang": _hang,
    "drip": _drip,
    "reset": _reset,
    "garbage": _respond(ResponseOutcome.BAD, "garbage", GARBAGE, close=True),
    "half-response": _half,
    "endless": _endless,
    "error": _respond(ResponseOutcome.BAD, "error", status_line(500)),
    "retry-after": _retry_after,
    "reject": _respond(ResponseOutcome.BAD, "reject", status_line(422)),
}
FAILURES: tuple[ResponseScript, ...] = (
    _reset,
    _lose,
    *(
        _respond(outcome, "failure", data)
        for data in (status_line(500), status_line(503, "Retry-After: 0"))
        for outcome in (ResponseOutcome.BAD, ResponseOutcome.UNSURE)
    ),
)
"""Failures at random, half of them after the receiver has processed the delivery."""

"""Response scripts of a receiver: one successful response, and all faults."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from outbox.devtools.chaos.ledger import ResponseOutcome

if TYPE_CHECKING:
    import random

BREAKS_OFF = (b"HTTP/1.1 200 O", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nonly this")
"""Truncated responses; the second one has a complete status line, so it counts as 200."""
GARBAGE = b"\x16\x03\x01\x00\xffthis is not HTTP\r\n\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DRIP_S_MIN, DRIP_S_MAX = 0.5, 5.0


class ResponseWriter(Protocol):
    """Interface of a connection that waits for a response."""

    def expect(self, outcome: ResponseOutcome, label: str) -> None: ...
    def finish(
        self, outcome: ResponseOutcome, label: str, data: bytes, *, close: bool = False
    ) -> None: ...
    def drip(self, label: str, data: bytes, every_s: float) -> None: ...
    def stream_endlessly(self) -> None: ...
    def reset(self, label: str) -> None: ...


ResponseScript = Callable[[ResponseWriter, "random.Random"], None]
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


def _ok(connection: ResponseWriter, rng: random.Random) -> None:
    connection.finish(ResponseOutcome.GOOD, "ok", GOOD)


def _hang(connection: ResponseWriter, rng: random.Random) -> None:
    connection.expect(ResponseOutcome.BAD, "hang")


def _drip(connection: ResponseWriter, rng: random.Random) -> None:
    connection.expect(ResponseOutcome.BAD, "drip")
    connection.drip("drip", GOOD, rng.uniform(DRIP_S_MIN, DRIP_S_MAX) / len(GOOD))


def _reset(connection: ResponseWriter, rng: random.Random) -> None:
    connection.reset("reset")


def _garbage(connection: ResponseWriter, rng: random.Random) -> None:
    connection.finish(ResponseOutcome.BAD, "garbage", GARBAGE, close=True)


def _half(connection: ResponseWriter, rng: random.Random) -> None:
    which = rng.randrange(len(BREAKS_OFF))
    outcome = ResponseOutcome.GOOD if which else ResponseOutcome.BAD
    connection.finish(outcome, "half-response", BREAKS_OFF[which], close=True)


def _endless(connection: ResponseWriter, rng: random.Random) -> None:
    connection.finish(ResponseOutcome.GOOD, "endless", ENDLESS)
    connection.stream_endlessly()


def _error(connection: ResponseWriter, rng: random.Random) -> None:
    connection.finish(ResponseOutcome.BAD, "error", status_line(500))


def _retry_after(connection: ResponseWriter, rng: random.Random) -> None:
    status = rng.choice((429, 503))
    connection.finish(ResponseOutcome.BAD, "retry-after", status_line(status, "Retry-After: 1"))


def _reject(connection: ResponseWriter, rng: random.Random) -> None:
    connection.finish(ResponseOutcome.BAD, "reject", status_line(422))


OK = _ok
RESPONSES: dict[str, ResponseScript] = {
    "hang": _hang,
    "drip": _drip,
    "reset": _reset,
    "garbage": _garbage,
    "half-response": _half,
    "endless": _endless,
    "error": _error,
    "retry-after": _retry_after,
    "reject": _reject,
}

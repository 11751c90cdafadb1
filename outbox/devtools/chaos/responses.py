"""The ways in which a receiver answers, one good and all the others."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from outbox.devtools.chaos.ledger import Outcome

if TYPE_CHECKING:
    import random

BREAKS_OFF = (b"HTTP/1.1 200 O", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nonly this")
"""The second one has its status line, which decides."""
GARBAGE = b"\x16\x03\x01\x00\xffthis is not HTTP\r\n\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DRIP_S_MIN, DRIP_S_MAX = 0.5, 5.0


class Guest(Protocol):
    """What can be done with a connection that waits for an answer."""

    def expect(self, outcome: Outcome, label: str) -> None: ...
    def finish(self, outcome: Outcome, label: str, data: bytes, *, close: bool = False) -> None: ...
    def drip(self, label: str, data: bytes, every_s: float) -> None: ...
    def pour(self) -> None: ...
    def reset(self, label: str) -> None: ...


Answer = Callable[[Guest, "random.Random"], None]
"""One way to answer, or to begin to."""


def status_line(status: int, *headers: str) -> bytes:
    """A whole answer without a body."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    lines = [f"HTTP/1.1 {status} {phrase}", *headers, "Content-Length: 0", "", ""]
    return "\r\n".join(lines).encode("latin-1")


GOOD = status_line(200)


def _ok(guest: Guest, rng: random.Random) -> None:
    guest.finish(Outcome.GOOD, "ok", GOOD)


def _hang(guest: Guest, rng: random.Random) -> None:
    guest.expect(Outcome.BAD, "hang")


def _drip(guest: Guest, rng: random.Random) -> None:
    guest.expect(Outcome.BAD, "drip")
    guest.drip("drip", GOOD, rng.uniform(DRIP_S_MIN, DRIP_S_MAX) / len(GOOD))


def _reset(guest: Guest, rng: random.Random) -> None:
    guest.reset("reset")


def _garbage(guest: Guest, rng: random.Random) -> None:
    guest.finish(Outcome.BAD, "garbage", GARBAGE, close=True)


def _half(guest: Guest, rng: random.Random) -> None:
    which = rng.randrange(len(BREAKS_OFF))
    outcome = Outcome.GOOD if which else Outcome.BAD
    guest.finish(outcome, "half-answer", BREAKS_OFF[which], close=True)


def _endless(guest: Guest, rng: random.Random) -> None:
    guest.finish(Outcome.GOOD, "endless", ENDLESS)
    guest.pour()


def _error(guest: Guest, rng: random.Random) -> None:
    guest.finish(Outcome.BAD, "error", status_line(500))


def _retry_after(guest: Guest, rng: random.Random) -> None:
    status = rng.choice((429, 503))
    guest.finish(Outcome.BAD, "retry-after", status_line(status, "Retry-After: 1"))


def _reject(guest: Guest, rng: random.Random) -> None:
    guest.finish(Outcome.BAD, "reject", status_line(422))


OK = _ok
ANSWERS: dict[str, Answer] = {
    "hang": _hang,
    "drip": _drip,
    "reset": _reset,
    "garbage": _garbage,
    "half-answer": _half,
    "endless": _endless,
    "error": _error,
    "retry-after": _retry_after,
    "reject": _reject,
}

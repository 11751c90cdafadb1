"""What the errors of server and network mean for an endpoint."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from outbox.core.brokers.port import Stop, StopKind
from outbox.core.model.response import Failure, one_line

if TYPE_CHECKING:
    from outbox.network.errors import NotConnected

NO_STREAM = 2
EXISTS = 5
ACCESS_REFUSED = 16
_NAMES = {
    2: "the stream does not exist",
    6: "the stream is not available",
    7: "the server does not offer this kind of authentication",
    8: "user or password are wrong",
    9: "authentication failed",
    10: "authentication failed",
    11: "the user may connect from the server's own host only",
    12: "the user has no access to the virtual host, or it does not exist",
    13: "the server does not know the request",
    14: "the frame is too large",
    15: "internal error",
    16: "access refused",
    17: "precondition failed",
    18: "the publisher does not exist",
}
_MISCONFIGURED = frozenset({2, 7, 8, 9, 10, 11, 12, 13, 16, 17})


class Stopped(Exception):
    """Ends a call with a `Stop`."""

    def __init__(self, kind: StopKind, detail: str) -> None:
        super().__init__(detail)
        self.stop = Stop(kind, one_line(detail))


def code_name(code: int) -> str:
    return f"{_NAMES.get(code, 'unknown error')} (code {code})"


def rejected(code: int, what: str) -> Stop:
    """The server refused a request, and nothing is stored."""
    kind = StopKind.MISCONFIGURED if code in _MISCONFIGURED else StopKind.UNAVAILABLE
    return Stop(kind, one_line(f"{what}: {code_name(code)}"))


def not_connected(error: NotConnected) -> Stop:
    """No connection was established."""
    if error.failure is Failure.LOCAL:
        return Stop(StopKind.LOCAL, error.detail)
    person = error.failure is Failure.EGRESS_REFUSED or (
        # A handshake that was cut is an outage; a certificate or a setting needs a person.
        error.failure is Failure.TLS and not _was_cut(error.__cause__)
    )
    kind = StopKind.MISCONFIGURED if person else StopKind.UNAVAILABLE
    # An error without a text: the server closed the connection.
    closed = "connection closed" if error.detail.startswith(" at ") else ""
    return Stop(kind, one_line(closed + error.detail))


def _was_cut(cause: BaseException | None) -> bool:
    return isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError)

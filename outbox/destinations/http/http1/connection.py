"""One connection: a request goes out, and one answer comes back.

What comes while nobody has asked closes the connection: taken for the next answer, it would
acknowledge a delivery that never arrived.
"""

from __future__ import annotations

import asyncio
import ssl
from time import monotonic
from typing import TYPE_CHECKING, cast

from outbox.core.model.response import Answer, Failure
from outbox.destinations.http.http1.response_parser import AnswerReader
from outbox.destinations.http.limits import HEAD_BYTES_MAX
from outbox.destinations.http.responses import (
    CANCELLED,
    CLOSED,
    ENDED,
    UNANSWERED,
    answered,
    out_of_time,
)
from outbox.destinations.http.tls import reason
from outbox.destinations.interface import NotConnected

if TYPE_CHECKING:
    from outbox.destinations.http.connector import Target
    from outbox.destinations.http.http1.response_parser import Known


class Connection(asyncio.Protocol):
    """An `asyncio.Protocol`; see `ask`.

    It is whoever took it's from the question until he has taken the answer in: only then may it
    be asked again, if it is `usable` still.

    Args:
        known: see `AnswerReader`.
    """

    __slots__ = (
        "_early",
        "_ended",
        "_loop",
        "_reader",
        "_started_at",
        "_timeout_s",
        "_transport",
        "_waiting",
        "free_since",
        "over_at",
        "target",
    )

    def __init__(
        self, target: Target, loop: asyncio.AbstractEventLoop, known: dict[bytes, Known]
    ) -> None:
        self.target = target
        self.free_since = 0.0
        """Since when it is kept for the next one, by the loop's clock."""
        self.over_at = 0.0
        """When the request that is on it runs out of time."""
        self._loop = loop
        self._reader = AnswerReader(known)
        # What the receiver said before it was asked anything; None: it was asked.
        self._early: bytes | None = b""
        # No request can follow on it, although the loop has not closed it yet.
        self._ended = False
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Answer] | None = None
        # By a clock that counts finer than the loop's: uvloop's has milliseconds.
        self._started_at = 0.0
        self._timeout_s = 0.0

    @property
    def usable(self) -> bool:
        """Whether a request may be sent on it."""
        transport = self._transport
        return transport is not None and not self._ended and not transport.is_closing()

    def ask(
        self, data: bytes, started_at: float, over_at: float, timeout_s: float
    ) -> asyncio.Future[Answer]:
        """Send a request; what comes back, or what becomes of it.

        Args:
            started_at: since when it has taken its time, by `time.monotonic`.
            over_at: when somebody will call `expire`, by the loop's clock.
            timeout_s: what it has in all.

        Raises:
            NotConnected: it was closed meanwhile.
        """
        transport = self._transport
        if transport is None or not self.usable:
            raise NotConnected(Failure.RESET, ENDED)
        assert self._waiting is None
        self._started_at, self._timeout_s = started_at, timeout_s
        self.over_at = over_at
        self._reader.begin()
        self._waiting = waiting = self._loop.create_future()
        # In one piece: two writes would be two packets.  What does not fit waits in the
        # transport, while an early answer can be read already.
        transport.write(data)
        early, self._early = self._early, None
        if early:
            # Whoever speaks first may do so again, and then each answer would be taken for
            # that of the next request.
            self._ended = True
            self.data_received(early)
        return waiting

    def expire(self) -> None:
        """Its time is up."""
        self._give_up(Failure.TIMEOUT, out_of_time(self._timeout_s))

    def call_off(self) -> Answer | None:
        """Nobody waits for the answer any more; returns it, if its head was there.

        The connection is closed: what still comes must not be taken for another's.
        """
        waiting, self._waiting = self._waiting, None
        self.close()
        if waiting is None or self._reader.status is None:
            return None
        return self._answer(None if self._reader.over else CANCELLED)

    def close(self) -> None:
        """Close it, without waiting for a receiver that does not read."""
        self._ended = True
        transport = self._transport
        if transport is None:
            return
        if transport.get_write_buffer_size():
            transport.abort()
        else:
            transport.close()

    def shut(self) -> None:
        """The client it belongs to is closed."""
        if self._waiting is not None:
            self._give_up(Failure.RESET, CLOSED)
        else:
            self.close()

    # ------------------------------------------------------ what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._waiting is None:
            self._unasked(data)
            return
        reader = self._reader
        if not reader.feed(data):
            return
        if reader.broken is not None:
            self._give_up(Failure.PROTOCOL, reader.broken)
            return
        transport = self._transport
        if not reader.reusable or transport is None or transport.get_write_buffer_size():
            self.close()
        self._settle(self._answer(None))

    def eof_received(self) -> None:
        """The connection is closed by that."""
        self._ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._waiting is not None and not self._waiting.done():
            if exc is None and self._reader.end():
                self._settle(self._answer(None))
            elif isinstance(exc, ssl.SSLError):
                # In TLS 1.3 a refused handshake shows at the first read.
                self._give_up(Failure.TLS, reason(exc))
            elif exc is None:
                in_body = self._reader.status is not None
                self._give_up(Failure.RESET, ENDED if in_body else UNANSWERED)
            else:
                self._give_up(Failure.RESET, getattr(exc, "strerror", "") or str(exc))
        self._reader.close()

    # ---------------------------------------------------------------- inside

    def _unasked(self, data: bytes) -> None:
        if self._early is not None and len(self._early) < HEAD_BYTES_MAX:
            # Overloaded servers say so as soon as somebody connects.
            self._early += data
        elif self._transport is not None:
            self._transport.abort()

    def _give_up(self, failure: Failure, why: str) -> None:
        """It is over: with the answer, if its head was there, and as a failure otherwise."""
        self.close()
        if self._reader.status is None:
            elapsed_s = monotonic() - self._started_at
            self._settle(Answer.failed(failure, why, elapsed_s))
        else:
            self._settle(self._answer(why))

    def _settle(self, answer: Answer) -> None:
        waiting = self._waiting
        # What was cancelled is for whoever calls it off.
        if waiting is not None and not waiting.done():
            self._waiting = None
            waiting.set_result(answer)

    def _answer(self, cut_by: str | None) -> Answer:
        reader = self._reader
        assert reader.status is not None
        elapsed_s = monotonic() - self._started_at
        return answered(reader.status, elapsed_s, reader.headers(), reader.body, cut_by)

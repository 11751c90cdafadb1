"""The transport of the hot path: nothing between a delivery and its socket.

No library does this: aiohttp's session takes five times the processor time for a request, and
the quickest others (reqwest in Rust, as pyreqwest and wreq) half as much again or more, in
threads besides.  None lets the guard have the last word about an address, or bounds what a
receiver may say before its answer.

A request costs one future.  Its time is not a timer of its own: most time-outs are the same
and none is reached, so one timer for all looks at the requests that are out when the first of
them could have run out of time.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from outbox.core.model.response import Answer, Failure
from outbox.destinations.http.http1.connection import Connection
from outbox.destinations.http.http1.pool import Pools
from outbox.destinations.http.request_encoding import written
from outbox.destinations.http.responses import CLOSED, out_of_time
from outbox.destinations.interface import NotConnected

if TYPE_CHECKING:
    from outbox.destinations.http.connector import Connecting, Target
    from outbox.destinations.http.http1.response_parser import Known
    from outbox.destinations.http.targets import Destination
    from outbox.destinations.interface import Request


class WireClient:
    """A `Client`; use it in the event loop that it was made in.

    Args:
        keep_alive_s: an unused connection is kept so long; None: not at all.
    """

    def __init__(self, connecting: Connecting, keep_alive_s: float | None) -> None:
        self._connecting = connecting
        self._pools = Pools(keep_alive_s)
        self._loop = asyncio.get_running_loop()
        # Those with a request on them.
        self._asked: set[Connection] = set()
        self._known: dict[bytes, Known] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._closed = False

    async def send(self, destination: Destination, request: Request) -> Answer:
        """See `Client.send`."""
        started_at, over_at = monotonic(), self._loop.time() + request.total_timeout_s
        connection: Connection | None = None
        try:
            data = written(destination, request)
            connection = self._pools.take(destination.target)
            if connection is None:
                connection = await self._connect(destination.target, request, over_at)
            answering = connection.ask(data, started_at, over_at, request.total_timeout_s)
        except NotConnected as error:
            return Answer.failed(error.failure, error.detail, monotonic() - started_at)
        except Exception as error:
            if connection is not None:
                connection.close()
            why = f"{type(error).__name__}: {error}"
            return Answer.failed(Failure.INTERNAL, why, monotonic() - started_at)
        self._asked.add(connection)
        if self._timer is None or over_at < self._timer_at:
            self._look_at(over_at)
        try:
            answer = await answering
        except asyncio.CancelledError:
            called_off = connection.call_off()
            # It may have come in the very moment in which nobody wanted it any more.
            if answering.done() and not answering.cancelled():
                called_off = answering.result()
            if called_off is None:
                raise
            # Not of a class of its own, which `asyncio.timeout` of Python 3.11 does not know.
            raise asyncio.CancelledError(called_off) from None
        finally:
            self._asked.discard(connection)
        if connection.usable:
            self._pools.keep(connection)
        else:
            connection.close()
        return answer

    async def aclose(self) -> None:
        """See `Client.aclose`."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in list(self._asked):
            connection.shut()
        self._pools.close()

    async def _connect(self, target: Target, request: Request, over_at: float) -> Connection:
        if self._closed:
            raise NotConnected(Failure.RESET, CLOSED)
        try:
            async with asyncio.timeout_at(over_at):
                connection = await self._connecting.open(
                    target,
                    lambda: Connection(target, self._loop, self._known),
                    request.connect_timeout_s,
                )
        except TimeoutError:
            why = out_of_time(request.total_timeout_s)
            raise NotConnected(Failure.TIMEOUT, why) from None
        if self._closed:  # Meanwhile.
            connection.close()
            raise NotConnected(Failure.RESET, CLOSED)
        return connection

    # ------------------------------------------------------------------ time

    def _look_at(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(at, self._look), at

    def _look(self) -> None:
        """End what has run out of time."""
        now = self._timer_at
        self._timer = None
        for connection in [each for each in self._asked if each.over_at <= now]:
            connection.expire()
            self._asked.discard(connection)
        if self._asked:
            self._look_at(min(each.over_at for each in self._asked))

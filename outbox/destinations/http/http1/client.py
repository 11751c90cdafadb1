"""HTTP/1.1 client of the hot path.

aiohttp's session needs five times the CPU time per request, and the fastest alternatives
(reqwest in Rust, as pyreqwest and wreq) 1.5 times or more, and additional threads.  None of
them lets the egress policy check the final address, or bounds the bytes before a response.

A request costs one future.  Time-outs share one timer: most are equal and few expire, so the
timer runs at the earliest deadline and checks all requests in flight.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from outbox.core.model.response import AttemptResult, Failure
from outbox.destinations.http.attempt_results import timeout_detail
from outbox.destinations.http.http1.connection import Connection, FollowUps
from outbox.destinations.http.http1.pool import ConnectionPools
from outbox.network.errors import TRANSPORT_CLOSED, NotConnected
from outbox.network.reuse_limits import ReuseLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.destinations.http.http1.response_parser import CachedResponse
    from outbox.destinations.http.targets import Destination
    from outbox.destinations.interface import Following, Request
    from outbox.network.connector import ConnectionOpener, Target
    from outbox.network.dns import Resolver


class Http1Client:
    """Sends requests to checked destinations; bound to the event loop in which it was created.

    Args:
        keep_alive_s: idle time-out of pooled connections; None: no pooling.
        idle_bytes_max: what pooled connections may take in memory.
    """

    def __init__(
        self,
        opener: ConnectionOpener,
        resolver: Resolver,
        keep_alive_s: float | None,
        idle_bytes_max: int,
    ) -> None:
        self._opener = opener
        self._resolver = resolver
        self._pools = ConnectionPools(keep_alive_s, idle_bytes_max)
        self._loop = asyncio.get_running_loop()
        # Connections with a request in flight.
        self._in_flight: set[Connection] = set()
        self._cached_responses: dict[bytes, CachedResponse] = {}
        self._follow_ups = FollowUps(self._loop)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._closed = False

    async def send(
        self,
        destination: Destination,
        request: Request,
        following: Following | None,
        before_write: Callable[[], object] | None,
    ) -> AttemptResult:
        started_at, deadline = monotonic(), self._loop.time() + request.recipient.timeout_s
        connection: Connection | None = None
        try:
            if request.keep_alive:
                connection = self._pools.acquire(destination.target)
            if connection is None:
                connection = await self._connect(destination.target, request, deadline)
            pending = connection.send_request(
                destination, request, started_at, deadline, following, before_write
            )
        except NotConnected as error:
            return AttemptResult.failed(error.failure, error.detail, monotonic() - started_at)
        except Exception as error:
            if connection is not None:
                connection.close()
            elif isinstance(error, MemoryError):
                return AttemptResult.failed(Failure.LOCAL, "out of memory", 0.0)
            reason = f"{type(error).__name__}: {error}"
            return AttemptResult.failed(Failure.INTERNAL, reason, monotonic() - started_at)
        self._track(connection)
        try:
            response = await pending
            while connection.resendable:
                self._in_flight.discard(connection)
                fresh = await self._connect(destination.target, request, connection.deadline)
                pending = fresh.resend(connection)
                connection = fresh
                self._track(connection)
                response = await pending
        except NotConnected as error:
            # The receiver may have got the request, so it was an attempt.
            failure = Failure.RESET if error.failure is Failure.LOCAL else error.failure
            return AttemptResult.failed(failure, error.detail, connection.elapsed_s)
        except asyncio.CancelledError:
            preempted = connection.cancel()
            # The response may have completed in the same loop iteration as the cancellation.
            if pending.done() and not pending.cancelled() and not connection.resendable:
                preempted = pending.result()
            if preempted is None:
                raise
            # Not a subclass: `asyncio.timeout` of Python 3.11 does not handle one.
            raise asyncio.CancelledError(preempted) from None
        finally:
            self._in_flight.discard(connection)
        if request.keep_alive and connection.reusable:
            self._pools.release(connection)
        else:
            connection.close()
        return response

    async def aclose(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in list(self._in_flight):
            connection.shut_down()
        self._pools.close()

    async def _connect(self, target: Target, request: Request, deadline: float) -> Connection:
        if self._closed:
            raise NotConnected(Failure.RESET, TRANSPORT_CLOSED)
        try:
            async with asyncio.timeout_at(deadline):
                connection = await self._open(target, request.recipient.connect_timeout_s)
        except TimeoutError:
            reason = timeout_detail(request.recipient.timeout_s)
            raise NotConnected(Failure.TIMEOUT, reason) from None
        if self._closed:  # The client was closed meanwhile.
            connection.close()
            raise NotConnected(Failure.RESET, TRANSPORT_CLOSED)
        return connection

    async def _open(self, target: Target, timeout_s: float) -> Connection:
        retried = False
        while True:
            try:
                return await self._opener.open(
                    target,
                    lambda: Connection(
                        target,
                        self._loop,
                        self._cached_responses,
                        self._follow_ups,
                        self._pools.bytes_of(target),
                        ReuseLimits(
                            self._resolver, self._loop, None if target.via_proxy else target.host
                        ),
                    ),
                    timeout_s,
                )
            except NotConnected as error:
                if error.failure is not Failure.LOCAL:
                    raise
                # Idle connections have what it lacks, or another request has just closed them.
                if not self._pools.free_resources() and retried:
                    raise
            retried = True
            await asyncio.sleep(0)

    # ------------------------------------------------------------------ time

    def _track(self, connection: Connection) -> None:
        """Expire the request in flight on a connection at its deadline."""
        self._in_flight.add(connection)
        if self._timer is None or connection.deadline < self._timer_at:
            self._schedule_expiry(connection.deadline)

    def _schedule_expiry(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(at, self._expire_requests), at

    def _expire_requests(self) -> None:
        """Expire requests whose deadline has passed."""
        now = self._timer_at
        self._timer = None
        for connection in [each for each in self._in_flight if each.deadline <= now]:
            connection.expire()
            self._in_flight.discard(connection)
        if self._in_flight:
            self._schedule_expiry(min(each.deadline for each in self._in_flight))

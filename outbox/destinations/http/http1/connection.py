"""One HTTP/1.1 connection: one request at a time, no pipelining.

Unsolicited data closes the connection: treated as the response of the next request, it would
acknowledge a delivery that never arrived.  If it arrives after the next request was sent, it is
such a response (see `outbox.core.delivery.connection_reuse`).  Before a connection of the pool is
used, and before a request follows a response in a request run, its socket is polled.

A receiver that closes an idle connection may do so while a request is on its way.  If a reused
connection ends soon after a request, and before the first byte of a response, its client sends
the request again on a new connection (RFC 9112, 9.3.1: the request is idempotent, because receivers
drop duplicates by their delivery id).  A receiver that takes longer may be processing the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
from time import monotonic
from typing import TYPE_CHECKING, cast

from outbox.core.model.response import AttemptResult, Failure
from outbox.destinations.http.attempt_results import (
    CANCELLED,
    CONNECTION_CLOSED,
    NO_RESPONSE,
    completed_result,
    timeout_detail,
)
from outbox.destinations.http.http1.response_parser import ResponseReader
from outbox.destinations.http.limits import RESPONSE_HEAD_BYTES_MAX
from outbox.destinations.http.request import encode_request
from outbox.network.errors import TRANSPORT_CLOSED, NotConnected
from outbox.network.reuse_limits import RESEND_WITHIN_S, peer_address
from outbox.network.tls import ResumingContext, ssl_error_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from outbox.destinations.http.http1.response_parser import CachedResponse
    from outbox.destinations.http.targets import Destination
    from outbox.destinations.interface import Following, Request
    from outbox.network.connector import Target
    from outbox.network.reuse_limits import ReuseLimits


_QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)
"""Linux only."""


class Connection(asyncio.Protocol):
    """Protocol of one connection; see `send_request`.

    A caller owns the connection from `send_request` until it has read the result.  Then the
    connection can be reused, if it is still `usable`.

    Args:
        cached_responses: see `ResponseReader`.
        follow_ups: takes the connections that received a response in a request run.
        idle_bytes: what it takes in memory while it is idle.
        limits: the limits of its age and its peer's address; None: it has none.
    """

    __slots__ = (
        "_before_write",
        "_data",
        "_destination",
        "_early",
        "_ended",
        "_follow_ups",
        "_following",
        "_limits",
        "_loop",
        "_on_unsolicited",
        "_poll",
        "_reader",
        "_request",
        "_resent",
        "_response",
        "_reused",
        "_socket",
        "_started_at",
        "_timeout_s",
        "_transport",
        "_waiting",
        "deadline",
        "fd",
        "idle_bytes",
        "idle_until",
        "resendable",
        "target",
    )

    def __init__(
        self,
        target: Target,
        loop: asyncio.AbstractEventLoop,
        cached_responses: dict[bytes, CachedResponse],
        follow_ups: FollowUps,
        idle_bytes: int = 0,
        limits: ReuseLimits | None = None,
    ) -> None:
        self.target = target
        self.idle_bytes = idle_bytes
        self.idle_until = 0.0
        """When it is closed if it is still idle, by the loop's clock."""
        self.deadline = 0.0
        """Deadline of the request in flight, by the loop's clock."""
        self.resendable = False
        """Whether it was reused, and ended before the first byte of a response."""
        self._loop = loop
        self._follow_ups = follow_ups
        self._limits = limits
        self._reader = ResponseReader(cached_responses)
        # Data received before the first request; None: a request was sent.
        self._early: bytes | None = b""
        # Not reusable, although the loop has not closed it yet.
        self._ended = False
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self.fd = -1
        """File descriptor of its socket, which may be closed."""
        self._poll = select.poll()
        # Of the last request.
        self._on_unsolicited: Callable[[], object] | None = None
        self._waiting: asyncio.Future[AttemptResult] | None = None
        # time.monotonic: uvloop's clock has a resolution of milliseconds.
        self._started_at = 0.0
        self._timeout_s = 0.0
        # Whether it had received a complete response before.
        self._reused = False
        # Of the request in flight.
        self._request = b""
        # Whether that request was sent before, on another connection.
        self._resent = False
        self._destination: Destination | None = None
        self._before_write: Callable[[], object] | None = None
        self._following: Following | None = None
        # A complete response in a request run, until `take_following`.
        self._response: AttemptResult | None = None

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        transport = self._transport
        return transport is not None and not self._ended and not transport.is_closing()

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent, by the connection's age and address, too."""
        return self.usable and (self._limits is None or self._limits.allow(self))

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of the request in flight."""
        return monotonic() - self._started_at

    @property
    def keep_alive_s(self) -> float | None:
        """Idle time-out that the receiver announced (`Keep-Alive: timeout`); None: it did not."""
        return self._reader.keep_alive_s

    @property
    def address(self) -> str | None:
        """IP address of the peer; None: the connection has ended."""
        return peer_address(self._transport)

    @property
    def readable(self) -> bool:
        """Whether the socket has data or EOF that the loop has not read yet."""
        return bool(self._poll.poll(0))

    def send_request(
        self,
        destination: Destination,
        request: Request,
        started_at: float,
        deadline: float,
        following: Following | None,
        before_write: Callable[[], object] | None = None,
    ) -> asyncio.Future[AttemptResult]:
        """Send a request; returns a future of its result, or of the last one that followed it.

        Args:
            started_at: start of the attempt, by `time.monotonic`.
            deadline: when the client calls `expire`, by the loop's clock.
            before_write: see `Transport.send`.

        Raises:
            NotConnected: the connection was closed meanwhile.
        """
        self._request = encode_request(destination, request)
        self._resent = False
        self._started_at, self._timeout_s = started_at, request.recipient.timeout_s
        self._destination = destination
        self._following = following if request.keep_alive else None
        self._before_write = before_write
        self.deadline = deadline
        self._on_unsolicited = request.recipient.on_unsolicited
        return self._send()

    def resend(self, ended: Connection) -> asyncio.Future[AttemptResult]:
        """Send the request of a connection that is `resendable`, with its deadline.

        Raises:
            NotConnected: the connection was closed meanwhile.
        """
        self._request = ended._request
        self._started_at, self._timeout_s = ended._started_at, ended._timeout_s
        self._destination = ended._destination
        self._following = ended._following
        self._before_write = ended._before_write
        self.deadline = ended.deadline
        self._on_unsolicited = ended._on_unsolicited
        self._resent = True
        ended._request = b""
        return self._send()

    def _send(self) -> asyncio.Future[AttemptResult]:
        transport = self._transport
        if transport is None or not self.usable:
            raise NotConnected(Failure.RESET, CONNECTION_CLOSED)
        assert self._waiting is None
        self._reader.begin()
        self._waiting = waiting = self._loop.create_future()
        if not self._may_write():
            return waiting
        # One write: two would be two packets.  The transport buffers the rest, and an early
        # response can be read meanwhile.
        transport.write(self._request)
        early, self._early = self._early, None
        if early:
            # A peer that sends first may do so again, and every response would be attributed
            # to the next request: do not reuse the connection.
            self._ended = True
            self._report_unsolicited()
            self.data_received(early)
        return waiting

    def expire(self) -> None:
        self._fail(Failure.TIMEOUT, timeout_detail(self._timeout_s))

    def cancel(self) -> AttemptResult | None:
        """Cancel the request; returns its result if the response head was complete.

        Closes the connection: a late response must not be attributed to another request.
        """
        waiting, self._waiting = self._waiting, None
        self.close()
        if waiting is None or self._reader.status is None:
            return None
        return self._response or self._result(None if self._reader.over else CANCELLED)

    def close(self) -> None:
        """Close; abort if unsent data remains, so that a stalled receiver cannot delay it."""
        self._ended = True
        transport = self._transport
        # asyncio's TLS transport of Python 3.11 fails at the third `close`.
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size():
            transport.abort()
        else:
            transport.close()

    def abort(self) -> None:
        """Close without waiting for the peer."""
        self._ended = True
        if self._transport is not None:
            self._transport.abort()

    def shut_down(self) -> None:
        """Close the connection because its client is closed."""
        if self._waiting is not None:
            self._fail(Failure.RESET, TRANSPORT_CLOSED)
        else:
            self.close()

    # ------------------------------------------------------ asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._socket = transport.get_extra_info("socket")
        assert self._socket is not None
        self.fd = self._socket.fileno()
        self._poll.register(self.fd, select.POLLIN)

    def data_received(self, data: bytes) -> None:
        waiting = self._waiting
        if waiting is None:
            self._on_unsolicited_data(data)
            return
        reader = self._reader
        if not reader.feed(data):
            self._acknowledge()
            return
        if not self._reused:
            self._reused = True
            self._remember_session()
        if reader.broken is not None:
            self._fail(Failure.PROTOCOL, reader.broken)
            return
        transport, result = self._transport, self._result(None)
        if not reader.reusable or transport is None or transport.get_write_buffer_size():
            self.close()
            if reader.surplus:
                self._report_unsolicited()
        elif self._following is not None and not self._ended and not waiting.done():
            self._response = result
            self._follow_ups.add(self)
            return
        self._settle(result)

    def eof_received(self) -> None:
        """Returning None lets asyncio close the connection."""
        self._ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._waiting is not None and not self._waiting.done():
            self.resendable = (
                self._reused
                and self._reader.untouched
                and self._response is None
                and self.elapsed_s < RESEND_WITHIN_S
            )
            if exc is None and self._reader.end():
                self._settle(self._result(None))
            elif isinstance(exc, ssl.SSLError):
                # TLS 1.3 reports a rejected client certificate at the first read.
                self._fail(Failure.TLS, ssl_error_reason(exc))
            elif exc is None:
                in_body = self._reader.status is not None
                self._fail(Failure.RESET, CONNECTION_CLOSED if in_body else NO_RESPONSE)
            else:
                self._fail(Failure.RESET, getattr(exc, "strerror", "") or str(exc))
        self._reader.close()

    # ------------------------------------------------------ the three steps of `FollowUps`

    def take_following(self, readable: Container[int], now: float) -> bool:
        """Take the request that follows a response; False: none does, and the result is set.

        Args:
            readable: file descriptors of sockets that are closed, or have data or EOF that the loop
                has not read yet.
            now: the time by the loop's clock.
        """
        response, waiting = self._response, self._waiting
        # A cancelled task has not called `cancel` yet.
        if response is None or waiting is None or waiting.done():
            return False
        self._response = None
        assert self._destination is not None
        assert self._following is not None
        if self.fd not in readable and self.reusable:
            try:
                request = self._following.follow(response)
                if request is not None:
                    self._request = encode_request(self._destination, request)
                    self._resent = False
                    self._reader.begin()
                    self._started_at = monotonic()
                    self.deadline = now + request.recipient.timeout_s
                    return True
            except Exception as error:
                response = self._internal_failure(error)
        self._settle(response)
        return False

    def write_following(self) -> None:
        """Send the request that was taken."""
        if not self._may_write():
            return
        assert self._transport is not None
        try:
            self._transport.write(self._request)
        except Exception as error:
            self._settle(self._internal_failure(error))

    def prepare_next(self) -> None:
        """Prepare what follows the request that was sent."""
        assert self._following is not None
        if self._waiting is None:
            return  # It could not be sent.
        try:
            self._following.sent()
        except Exception as error:
            self._settle(self._internal_failure(error))

    # ---------------------------------------------------------------- internals

    def _acknowledge(self) -> None:
        """Acknowledge a part of a response at once.

        Otherwise the kernel may wait for 40 ms (delayed ACK), and a receiver that sends head and
        body apart, with Nagle's algorithm on, sends the body after the acknowledgement.
        """
        if _QUICKACK is not None and self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)

    def _remember_session(self) -> None:
        """Keep the TLS session of this connection for the next one."""
        tls = None if self._transport is None else self._transport.get_extra_info("ssl_object")
        if tls is not None and isinstance(tls.context, ResumingContext):
            tls.context.remember(tls)

    def _may_write(self) -> bool:
        """Call `before_write`; if it raises, the result of the request is that exception."""
        if self._before_write is None:
            return True
        try:
            self._before_write()
        except Exception as error:
            self.close()
            waiting, self._waiting = self._waiting, None
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
            return False
        return True

    def _internal_failure(self, error: Exception) -> AttemptResult:
        self.close()
        return AttemptResult.failed(Failure.INTERNAL, f"{type(error).__name__}: {error}", 0.0)

    def _on_unsolicited_data(self, data: bytes) -> None:
        if self._early is not None and len(self._early) < RESPONSE_HEAD_BYTES_MAX:
            # Overloaded servers send a response immediately after the connect.
            self._early += data
            return
        # A connection that is being closed may receive the response to a cancelled request.
        if not self._ended:
            self._ended = True
            self._report_unsolicited()
        if self._transport is not None:
            self._transport.abort()

    def _report_unsolicited(self) -> None:
        if self._on_unsolicited is not None:
            self._on_unsolicited()

    def _fail(self, failure: Failure, reason: str) -> None:
        """Close, and settle with the response if its head is complete, otherwise with a failure."""
        self.close()
        if self._response is not None:
            self._settle(self._response)
        elif self._reader.status is None:
            self._settle(AttemptResult.failed(failure, reason, self.elapsed_s))
        else:
            self._settle(self._result(reason))

    def _settle(self, response: AttemptResult) -> None:
        waiting, self._response = self._waiting, None
        if not self.resendable:
            self._request = b""  # An idle connection needs no memory for it.
        # `cancel` handles a cancelled future.
        if waiting is not None and not waiting.done():
            self._waiting = None
            waiting.set_result(response)

    def _result(self, cut_by: str | None) -> AttemptResult:
        reader = self._reader
        assert reader.status is not None
        result = completed_result(
            reader.status, self.elapsed_s, reader.headers(), reader.content(), cut_by
        )
        return result._replace(resent=True) if self._resent else result


class FollowUps:
    """Sends the requests of request runs that follow the responses of one pass of the event loop.

    In steps for all of these connections: first all decide, then all write, then all prepare.  Each
    step runs the same code again and again.  One connection at a time took almost twice the CPU
    time, because reading, deciding, writing and preparing evict each other's code from the
    processor's caches.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._connections: list[Connection] = []

    def add(self, connection: Connection) -> None:
        """Serve a connection after the responses that are being read now."""
        if not self._connections:
            self._loop.call_soon(self._serve)
        self._connections.append(connection)

    def _serve(self) -> None:
        connections, self._connections = self._connections, []
        # One system call for all, before the first decision.
        poll = select.poll()
        for each in connections:
            poll.register(each.fd, select.POLLIN)
        readable, now = {fd for fd, _ in poll.poll(0)}, self._loop.time()
        sending = [each for each in connections if each.take_following(readable, now)]
        for each in sending:
            each.write_following()
        for each in sending:
            each.prepare_next()

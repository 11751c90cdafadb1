"""Transport interface; all implementations pass the same conformance suite.

A transport sends one request and returns the result.  It has no notion of lanes, retries
or signatures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outbox.core.delivery.buffer_budget import BUFFER_BYTES_MAX
from outbox.core.model.headers import parse_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from outbox.core.model.response import AttemptResult, Headers
    from outbox.network.egress import Network
    from outbox.network.tls import Tls


KEEP_ALIVE_S = 4.0
"""Idle time after which a pooled connection is closed, if the receiver announces none: the usual
servers close one after 5 s."""
IDLE_BYTES_MAX = BUFFER_BYTES_MAX // 2
"""What pooled connections may take in memory; the least recently used are closed.  Each endpoint
has connections of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Recipient:
    """Where an endpoint's requests are sent, and how.

    Built once for the endpoint's settings, and compared by identity: clients keep what they derive
    from it.
    """

    url: str
    method: str = "POST"
    connect_timeout_s: float = 5.0
    """Time-out of DNS, connect and TLS handshake together."""
    timeout_s: float = 15.0
    """Time-out of the whole attempt, from DNS to the last byte read."""
    networks: tuple[Network, ...] = ()
    """Networks open for this endpoint, in addition to the relay's."""
    tls: Tls | None = None
    """The endpoint's TLS settings; None: system trust store, no client certificate."""
    endpoint: UUID | None = None
    """Its connections are used for no other endpoint."""
    on_unsolicited: Callable[[], object] | None = None
    """Called when the receiver sent data that is not part of the response to a request; also
    later, while the connection is idle."""


class Request(NamedTuple):
    """One attempt, ready to send."""

    recipient: Recipient
    lines: str
    """Header lines in wire format, without the framing headers (Host, Content-Length)."""
    body: bytes
    keep_alive: bool = True
    """Whether the connection may carry other requests.  Otherwise the request gets one of its own,
    which is closed after the response."""

    @property
    def headers(self) -> Headers:
        return parse_lines(self.lines)


class Following(Protocol):
    """Supplies the requests of a request run after the first one."""

    def follow(self, response: AttemptResult) -> Request | None:
        """Take a response and return the request to send now, to the same recipient on the
        same connection.

        None: the response was not taken, and is the result of `Transport.send`.
        """
        ...

    def sent(self) -> None:
        """The request was sent; prepare the one after it."""
        ...


class Transport(Protocol):
    """Sends requests; safe to use from many tasks of one event loop."""

    async def send(
        self,
        request: Request,
        following: Following | None = None,
        before_write: Callable[[], object] | None = None,
    ) -> AttemptResult:
        """Send `request` and return the result.

        It is sent once, and again if a reused connection ended before the first byte of a
        response: the receiver closed it while it was idle.

        `before_write` is called immediately before each request is written, so also after a
        connect.  If it raises, that request is not sent, and `send` raises the same.

        With `following`, a transport may ask it after a complete response on a connection that
        can be reused, and sends the request that it returns instead of returning the result.  It
        asks while no other request of this call is in flight; the result is that of the last one.
        It does not ask if `request.keep_alive` is False or surplus data arrived with the response.

        * Network and receiver errors do not raise: they are an `AttemptResult` with
          a `Failure`.
        * Once the response head is complete, its status decides, even if the body
          fails.  At most `RESPONSE_BODY_BYTES_MAX` of the body are read; `readable_body` says
          what is kept of a compressed one.  `HEADER_BYTES_MAX` bounds the stored headers.
        * Redirects are responses; they are not followed.
        * Each request ends within `timeout_s`, however slowly the receiver sends.
        * The egress policy checks every address immediately before the connect.
        * A connection is reused only for requests with the same `endpoint`, `networks` and `tls`,
          so that surplus data of one receiver never reaches another endpoint behind its host.
        * A pooled connection is not used while its socket is readable: the data is unsolicited,
          or the receiver has closed it.
        * Unsolicited data (before a request, between requests, after a complete response) closes
          its connection and calls `on_unsolicited`.
        * Cancellation closes the connection: the request may have arrived, but its
          response is never attributed to another request.  If the head was complete,
          the raised `asyncio.CancelledError` has the `AttemptResult` as its argument.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections; requests in flight fail."""
        ...

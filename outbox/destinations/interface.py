"""What the relay asks of a transport; one conformance suite holds for all.

A transport sends one request and says what came back.  It knows nothing of
lanes, retries or signatures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outbox.core.model.headers import pairs

if TYPE_CHECKING:
    from outbox.core.model.response import Answer, Failure, Headers
    from outbox.destinations.http.egress import Network


KEEP_ALIVE_S = 15.0
"""An unused connection is kept so long."""
POOLS_MAX = 1024
"""So many targets have kept connections; those of others are closed."""


@dataclass(frozen=True, slots=True)
class Tls:
    """What an endpoint's own TLS stands on; `transport.tls` checks both texts.

    There is no switch here that trusts everybody, and nowhere else either.
    """

    ca: str | None = None
    """Certificates (PEM) that are trusted for it, in place of the system's."""
    identity: str | None = field(default=None, repr=False)
    """The relay's own certificate, its chain, and its private key (PEM), for mutual TLS."""


class Request(NamedTuple):
    """One attempt, ready for the wire."""

    url: str
    lines: str
    """Headers as `core.headers.lines_of` makes them, without those that frame the message
    (Host, Content-Length)."""
    body: bytes
    connect_timeout_s: float = 5.0
    """For the name look-up, the connection and the TLS handshake together."""
    total_timeout_s: float = 15.0
    """For everything, from the first look-up to the last byte that counts."""
    method: str = "POST"
    networks: tuple[Network, ...] = ()
    """Opened for this endpoint, beside what is open for the whole relay."""
    tls: Tls | None = None
    """None: the system's trust store, and no certificate of our own."""

    @property
    def headers(self) -> Headers:
        """Name by name."""
        return pairs(self.lines)


class NotConnected(Exception):
    """There is no connection to send a request on."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure
        self.detail = detail


class Transport(Protocol):
    """Sends requests; safe to use from many tasks of one event loop."""

    async def send(self, request: Request) -> Answer:
        """Send `request` at most once and say what came back.

        * Nothing that the network or the receiver does raises: it is an
          `Answer` with a `Failure`.
        * As soon as the answer's head is there its status decides, whatever
          becomes of the body; no more than `BODY_BYTES_MAX` of that are read,
          and never decompressed.  `HEADER_BYTES_MAX` bounds the headers kept.
        * Redirects are answers, and are not followed.
        * Within `total_timeout_s` there is an answer, however slowly the
          receiver drips.
        * Every address is checked right before it is connected to.
        * A connection is used again only for requests with the same `networks`
          and the same `tls`.
        * Cancelling closes the connection: the request may have arrived, but
          its answer is never taken for another's.  If the head was there, what
          is raised (`asyncio.CancelledError`) has the `Answer` for its argument.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections; what is in flight fails."""
        ...

"""The request of one attempt: target, signed headers and body, and their wire format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.destinations.interface import Recipient, Request
from outbox.network.tls import Tls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox.core.delivery.endpoint import Endpoint
    from outbox.core.messages.message import Prepared
    from outbox.core.messages.signature import SigningKey
    from outbox.destinations.http.targets import Destination

CLOSE = "Connection: close\r\n"


def recipient_of(
    endpoint: Endpoint, on_unsolicited: Callable[[], object] | None = None
) -> Recipient:
    """Build the recipient of an endpoint's requests."""
    return Recipient(
        endpoint.url,
        endpoint.method,
        endpoint.connect_timeout_s,
        endpoint.timeout_s,
        endpoint.networks,
        Tls(endpoint.ca, endpoint.identity) if endpoint.ca or endpoint.identity else None,
        endpoint.id,
        on_unsolicited,
    )


def signed_request(
    recipient: Recipient,
    prepared: Prepared,
    number: int,
    timestamp: int,
    keys: Sequence[SigningKey],
    *,
    keep_alive: bool = False,
) -> Request:
    """Build the request of attempt `number` (from 1), signed at `timestamp` (epoch seconds).

    Args:
        keep_alive: whether the connection may carry other requests.  Requests beside deliveries
            share none with them, whatever their responses are.
    """
    return Request(recipient, prepared.attempt(number, timestamp, keys), prepared.body, keep_alive)


def encode_request(destination: Destination, request: Request) -> bytes:
    """Encode a request in HTTP/1.1 wire format (RFC 9112)."""
    head = (
        f"{destination.head}{request.lines}Accept-Encoding: identity\r\n"
        f"{'' if request.keep_alive else CLOSE}Content-Length: {len(request.body)}\r\n\r\n"
    )
    return head.encode() + request.body

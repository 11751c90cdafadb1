"""HTTP/1.1 request encoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox.destinations.http.targets import Destination
    from outbox.destinations.interface import Request

CLOSE = "Connection: close\r\n"


def encode_request(destination: Destination, request: Request) -> bytes:
    """Encode a request in HTTP/1.1 wire format (RFC 9112)."""
    head = (
        f"{destination.head}{request.lines}Accept-Encoding: identity\r\n"
        f"{'' if request.keep_alive else CLOSE}Content-Length: {len(request.body)}\r\n\r\n"
    )
    return head.encode() + request.body

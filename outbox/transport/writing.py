"""Requests as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox.transport.destinations import Destination
    from outbox.transport.port import Request


def written(destination: Destination, request: Request) -> bytes:
    """A request as it goes on the wire (RFC 9112).

    Raises:
        ValueError: a header would be more than one.
    """
    lines = "".join([f"{name}: {value}\r\n" for name, value in request.headers])
    count = len(request.headers)
    if lines.count("\n") != count or lines.count("\r") != count or "\0" in lines:
        raise ValueError("a header holds a line break")
    head = (
        f"{destination.head}{lines}Accept-Encoding: identity\r\n"
        f"Content-Length: {len(request.body)}\r\n\r\n"
    )
    return head.encode() + request.body

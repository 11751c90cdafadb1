"""Attempt results with the same texts for all clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.model.response import RESPONSE_BODY_BYTES_MAX, AttemptResult
from outbox.destinations.http.limits import HEADER_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox.core.model.response import Headers

CANCELLED = "the request was cancelled"
CONNECTION_CLOSED = "the connection was closed"
NO_RESPONSE = f"{CONNECTION_CLOSED} before a response"


def timeout_detail(timeout_s: float) -> str:
    return f"no complete response within {timeout_s:g} s"


def completed_result(
    status: int, elapsed_s: float, headers: Headers, body: bytes | bytearray, cut_by: str | None
) -> AttemptResult:
    """Build the result of a response whose head is complete.

    Args:
        cut_by: why the body is incomplete; None: it is complete, or `RESPONSE_BODY_BYTES_MAX` were
            read.
    """
    if cut_by is None and len(body) <= RESPONSE_BODY_BYTES_MAX:
        return AttemptResult(status, None, "", headers, bytes(body), elapsed_s)
    detail = "" if cut_by is None else f"incomplete body: {cut_by}"
    return AttemptResult.completed(
        status, elapsed_s, headers=headers, body=bytes(body), detail=detail
    )


def kept_headers(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Decode headers up to `HEADER_BYTES_MAX`."""
    found: list[tuple[str, str]] = []
    size = 0
    for name, value in raw:
        size += len(name) + len(value)
        if size > HEADER_BYTES_MAX:
            break
        # ISO 8859-1 decodes any byte (RFC 9110, 5.5).
        found.append((name.decode("latin-1"), value.decode("latin-1")))
    return tuple(found)

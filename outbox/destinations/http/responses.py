"""What came back, in the same words whichever client heard it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.model.response import BODY_BYTES_MAX, Answer
from outbox.destinations.http.limits import HEADER_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox.core.model.response import Headers

CANCELLED = "the request was called off"
CLOSED = "the transport is closed"
ENDED = "the connection was closed"
UNANSWERED = f"{ENDED} before an answer"


def out_of_time(timeout_s: float) -> str:
    """Why there is no answer, or no more of it."""
    return f"not answered within {timeout_s:g} s"


def answered(
    status: int, elapsed_s: float, headers: Headers, body: bytes | bytearray, cut_by: str | None
) -> Answer:
    """An answer whose head was there.

    Args:
        cut_by: what ended its body; None: it ended by itself, or as much as is wanted is there.
    """
    if cut_by is None and len(body) <= BODY_BYTES_MAX:
        return Answer(status, None, "", headers, bytes(body), elapsed_s)
    detail = "" if cut_by is None else f"the body was cut short: {cut_by}"
    return Answer.of(status, elapsed_s, headers=headers, body=bytes(body), detail=detail)


def kept(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers, as far as they are kept."""
    found: list[tuple[str, str]] = []
    size = 0
    for name, value in raw:
        size += len(name) + len(value)
        if size > HEADER_BYTES_MAX:
            break
        # ISO 8859-1 reads any byte (RFC 9110, 5.5).
        found.append((name.decode("latin-1"), value.decode("latin-1")))
    return tuple(found)

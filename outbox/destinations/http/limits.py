"""What a receiver may say, and how much of it is kept."""

from __future__ import annotations

from outbox.core.model.response import BODY_BYTES_MAX

HEADER_BYTES_MAX = 16 * 1024
"""How much of an answer's headers is kept, names and values together."""
HEAD_BYTES_MAX = 64 * 1024
"""For the heads of an answer and of all that came before it, together."""
HEADER_COUNT_MAX = 128
INTERIM_MAX = 32
"""So many answers with a status of 1xx are passed over."""
BODY_RAW_BYTES_MAX = 4 * BODY_BYTES_MAX
"""For a body with what it is wrapped in: chunks, their extensions, trailers."""

TOO_MANY_INTERIMS = f"more than {INTERIM_MAX} answers before the answer"
TOO_LARGE_HEAD = f"a head of over {HEAD_BYTES_MAX} bytes"
TOO_LARGE_WRAPPING = f"it takes over {BODY_RAW_BYTES_MAX} bytes to send"


def is_interim(status: int) -> bool:
    """Whether an answer comes before the answer and is passed over; 101 is an answer."""
    return 100 <= status <= 199 and status != 101

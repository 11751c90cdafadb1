"""Limits of responses: bytes read, bytes stored, headers, interim responses."""

from __future__ import annotations

from outbox.core.model.response import RESPONSE_BODY_BYTES_MAX

HEADER_BYTES_MAX = 16 * 1024
"""Stored bytes of response headers, names and values together."""
RESPONSE_HEAD_BYTES_MAX = 64 * 1024
"""Bytes of the response head and all interim heads together."""
HEADER_COUNT_MAX = 128
INTERIM_MAX = 32
"""Maximum number of interim (1xx) responses."""
BODY_RAW_BYTES_MAX = 2 * RESPONSE_BODY_BYTES_MAX
"""Bytes of a body with its framing: chunks, chunk extensions, trailers."""

TOO_MANY_INTERIMS = f"more than {INTERIM_MAX} interim responses"
TOO_LARGE_HEAD = f"response head larger than {RESPONSE_HEAD_BYTES_MAX} bytes"
TOO_LARGE_WRAPPING = f"body framing larger than {BODY_RAW_BYTES_MAX} bytes"


def is_interim(status: int) -> bool:
    """Whether a status is interim (RFC 9110, 15.2); 101 is final for a client without upgrade."""
    return 100 <= status <= 199 and status != 101

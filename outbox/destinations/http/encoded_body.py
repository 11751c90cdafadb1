"""Bodies of responses that are compressed, although each request has `Accept-Encoding: identity`.

The start of an error's body is decoded for the delivery log, before secrets are redacted.  Input
and output are bounded, and so are the ratio of a decompression bomb and the CPU time: at most half
a millisecond, for blocks that take time and have no output.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from outbox.core.model.redaction import KEPT_BODY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

ENCODED_BYTES_MAX = 4096
"""Bytes that are decoded: enough for the characters that are stored."""
NAMES_BYTES_MAX = 40
"""Bytes of `Content-Encoding` that are read; the known values are shorter."""
_FORMATS = {
    b"gzip": (zlib.MAX_WBITS + 16,),
    b"x-gzip": (zlib.MAX_WBITS + 16,),
    # Some servers send it without the header of zlib (RFC 9110, 8.4.1.2).
    b"deflate": (zlib.MAX_WBITS, -zlib.MAX_WBITS),
}


def readable_body(
    body: bytes | bytearray, encodings: Iterable[bytes], *, is_error: bool
) -> bytes | bytearray:
    """Return what is kept of a body: its decoded start, or a note that names its encoding.

    A body that is not in its encoding is kept as received.  Those of successes are not decoded,
    because no back-off limits their rate.

    Args:
        encodings: the values of `Content-Encoding`.
    """
    given = b", ".join(encodings)[:NAMES_BYTES_MAX].lower()
    names = [name for each in given.split(b",") if (name := each.strip()) not in (b"", b"identity")]
    if not names:
        return body
    if is_error and len(names) == 1 and names[0] in _FORMATS:
        decoded = (_inflate(body, wbits) for wbits in _FORMATS[names[0]])
        if found := next((each for each in decoded if each is not None), body):
            return found
    return b"(encoded: %b)" % b", ".join(names)


def _inflate(body: bytes | bytearray, wbits: int) -> bytes | None:
    """The start of a decoded body; None: it is not in this format."""
    try:
        return zlib.decompressobj(wbits).decompress(body[:ENCODED_BYTES_MAX], KEPT_BODY_BYTES)
    except zlib.error:
        return None

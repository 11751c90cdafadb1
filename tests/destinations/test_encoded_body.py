"""Compressed bodies of responses: their start is decoded, whatever an adversary sends."""

from __future__ import annotations

import gzip
import os
import zlib

from outbox.core.model.redaction import KEPT_BODY_BYTES
from outbox.destinations.http.encoded_body import ENCODED_BYTES_MAX, readable_body

TEXT = b'{"error": "no such order"}'
EMPTY_BLOCK = b"\x00\x00\x00\xff\xff"


def raw_deflate(text: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(text) + packer.flush()


def brake(blocks: int) -> bytes:
    """A body of blocks without output, and then the text."""
    return gzip.compress(b"")[:10] + EMPTY_BLOCK * blocks + raw_deflate(TEXT)


BODIES = {
    "gzip": (gzip.compress(TEXT), [b"gzip"], TEXT),
    "gzip by another name": (gzip.compress(TEXT), [b" X-GZip "], TEXT),
    "deflate": (zlib.compress(TEXT), [b"deflate"], TEXT),
    "deflate without a header": (raw_deflate(TEXT), [b"deflate"], TEXT),
    "gzip that was cut off": (gzip.compress(TEXT)[:-9], [b"gzip"], TEXT),
    "gzip with more behind it": (gzip.compress(TEXT) + b"x" * 9000, [b"gzip"], TEXT),
    "a text that only claims to be gzip": (TEXT, [b"gzip"], TEXT),
    "identity": (TEXT, [b"identity"], TEXT),
    "no encoding": (TEXT, [b"", b" , "], TEXT),
    "brotli": (b"\x8b\x0c\x80", [b"br"], b"(encoded: br)"),
    "gzip twice": (gzip.compress(gzip.compress(TEXT)), [b"gzip, gzip"], b"(encoded: gzip, gzip)"),
    "gzip in two headers": (gzip.compress(TEXT), [b"gzip", b"br"], b"(encoded: gzip, br)"),
    "a long name": (TEXT, [b"x" * 60_000], b"(encoded: %b)" % (b"x" * 40)),
    "a thousand names": (TEXT, [b"a"] * 30_000, b"(encoded: %b)" % b", ".join([b"a"] * 14)),
    "a bomb": (gzip.compress(b"x" * 10_000_000), [b"gzip"], b"x" * KEPT_BODY_BYTES),
    "a bomb in deflate": (zlib.compress(b"x" * 10_000_000), [b"deflate"], b"x" * KEPT_BODY_BYTES),
    "a few blocks without output": (brake(100), [b"gzip"], TEXT),
    # Each takes time: what follows them is not reached.
    "blocks without output": (brake(ENCODED_BYTES_MAX // 5), [b"gzip"], b"(encoded: gzip)"),
}


def test_the_start_of_an_error_is_decoded() -> None:
    found = {
        name: readable_body(body, encodings, is_error=True)
        for name, (body, encodings, _) in BODIES.items()
    }
    assert found == {name: kept for name, (_, _, kept) in BODIES.items()}


def test_what_is_stored_of_an_error_that_does_not_compress_is_decoded() -> None:
    text = os.urandom(3 * KEPT_BODY_BYTES).hex().encode()
    kept = readable_body(gzip.compress(text), [b"gzip"], is_error=True)
    assert text.startswith(kept)
    assert len(kept) > 2048


def test_a_success_is_not_decoded() -> None:
    """No back-off limits how many of them there are."""
    assert readable_body(gzip.compress(TEXT), [b"gzip"], is_error=False) == b"(encoded: gzip)"

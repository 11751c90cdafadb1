"""Decodes frames of the stream protocol with rstream's schema.

rstream's own decoder reads what is missing at the end of a frame as zeros: a list of 4,294,967,295
texts takes a frame of some bytes, and all memory.
"""

from __future__ import annotations

import io
from typing import cast

from rstream import schema
from rstream.constants import Key
from rstream.encoding import _decode_struct

_RESPONSE = 0x8000


def decode_frame(data: bytes) -> schema.Frame:
    """Decode a frame without its size.

    Raises:
        ValueError, KeyError: the frame has another layout.
    """
    key = int.from_bytes(data[:2])
    frame_type = schema.registry[bool(key & _RESPONSE), Key(key & ~_RESPONSE)]
    content = _Complete(data[4:])
    frame = _decode_struct(content, frame_type)
    if content.tell() != len(data) - 4:
        raise ValueError("the frame is longer than its content")
    return cast("schema.Frame", frame)


class _Complete(io.BytesIO):
    """Bytes of which never fewer are read than asked for."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if size is not None and len(data) < size:
            raise ValueError("the frame ends within a value")
        return data

"""Response protocol on aiohttp's parser, with limits.

In addition to aiohttp's protocol, it

* bounds the bytes of one response.  aiohttp bounds lines and their number, but endless
  interim responses, chunk extensions or trailers would keep it busy until the time-out;
* reports unsolicited data, and closes an idle connection that receives it.  aiohttp would treat
  it as the response to the next request, and acknowledge a delivery that never arrived;
* keeps the head of a response with a broken body.  If both arrive in one segment, aiohttp's
  parser fails as a whole and loses the status; otherwise the reader of the body is not
  notified and waits for its time-out.

It uses some private names of aiohttp; the conformance tests fail if they change.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.helpers import EMPTY_BODY_STATUS_CODES
from aiohttp.http import HttpProcessingError

from outbox.core.model.response import BODY_BYTES_MAX
from outbox.destinations.http.limits import (
    BODY_RAW_BYTES_MAX,
    HEAD_BYTES_MAX,
    HEADER_COUNT_MAX,
    INTERIM_MAX,
    TOO_LARGE_HEAD,
    TOO_LARGE_WRAPPING,
    TOO_MANY_INTERIMS,
    is_interim,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aiohttp import StreamReader
    from aiohttp.http import RawResponseMessage

_HEAD_END = b"\r\n\r\n"
_LINE_ENDS = b"\r\n"


class Protocol(ResponseHandler):
    """Reads one response at a time, within the limits."""

    used = False
    """Whether a request was sent on this connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._is_expecting = False
        self._left = HEAD_BYTES_MAX
        self._interims = 0
        self._body: StreamReader | None = None
        self._has_surplus = False
        # Bytes of the body, if it has no framing of its own.
        self._length: int | None = None
        self._on_unsolicited: Callable[[], object] | None = None

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent."""
        transport = self.transport
        return transport is not None and not transport.is_closing() and not self.should_close

    @property
    def readable(self) -> bool:
        """Whether the open socket has data or EOF that the loop has not read yet."""
        transport = self.transport
        assert transport is not None
        poll = select.poll()
        poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def expect_response(
        self, method: str, on_unsolicited: Callable[[], object] | None = None
    ) -> None:
        """Prepare for the response of a request that is sent now."""
        self.used = self._is_expecting = True
        self._left, self._body = HEAD_BYTES_MAX, None
        self._interims = 0
        self._has_surplus = bool(self._tail)  # Sent before the first request.
        self._on_unsolicited = on_unsolicited
        self.set_response_params(
            skip_payload=method == "HEAD",
            read_until_eof=True,
            auto_decompress=False,
            read_bufsize=BODY_BYTES_MAX,
            max_headers=HEADER_COUNT_MAX,
        )

    async def read_head(self) -> tuple[RawResponseMessage, StreamReader]:
        """Wait for the response head; returns it with the body stream.

        Raises:
            HttpProcessingError: the received bytes are not a valid response.
        """
        while True:
            message, body = await self.read()
            if not is_interim(message.code):
                return message, body

    def response_done(self) -> None:
        """Mark the response as complete: further data is unsolicited."""
        self._is_expecting = False
        # A second head, too many bytes for the length (the parser buffers an incomplete head), or
        # an error of the parser after the end of the body.
        received = BODY_RAW_BYTES_MAX - self._left
        if (
            self._has_surplus
            or (self._length is not None and received > self._length)
            or self.exception() is not None
        ):
            self.force_close()
            self._report_unsolicited()

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Parser callback for every message head."""
        if self._body is None:
            if not is_interim(data[0].code):
                self._left, self._body = BODY_RAW_BYTES_MAX, data[1]
                self._length = _body_length(data[0])
            elif self._interims < INTERIM_MAX:
                self._interims += 1
            else:
                self._fail(TOO_MANY_INTERIMS)
                return
        else:
            self._has_surplus = True
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        if self.used and not self._is_expecting and data:
            self.force_close()
            self._report_unsolicited()
            self.abort()
            return
        # Parse head by head, then the rest in one call.
        while self._is_expecting and self._body is None:
            end = data.find(_HEAD_END) + len(_HEAD_END)
            if end < len(_HEAD_END) or end == len(data):
                break
            self._parse(data[:end])
            data = data[end:]
            if self.exception() is not None:
                return
        body = self._body
        if body is not None and data:  # aiohttp calls it without data to resume.
            if len(data) > 1 and data[-1] in _LINE_ENDS:
                # The parser ignores line ends after a response: feed one at the end by itself.
                self._parse(data[:-1])
                if self.exception() is not None:
                    return
                data = data[-1:]
            self._has_surplus |= body.is_eof()
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        if data and self._left <= 0:
            return
        accepted = data[: self._left]
        self._left -= len(accepted)
        super().data_received(accepted)
        if data and self._left <= 0 and self.exception() is None:
            self._fail_too_large()
        error, payload = self.exception(), self._payload
        if error is not None and payload is not None and not payload.is_eof():
            # aiohttp does not notify a reader of the body, which would wait until the time-out.
            payload.set_exception(aiohttp.ClientPayloadError(str(error)))

    def _report_unsolicited(self) -> None:
        if self._on_unsolicited is not None:
            self._on_unsolicited()

    def _fail_too_large(self) -> None:
        """Stop reading and fail the head or the body."""
        self.force_close()
        if self._body is None:
            self._fail(TOO_LARGE_HEAD)
        elif self._body.total_bytes < BODY_BYTES_MAX and not self._body.is_eof():
            self._body.set_exception(aiohttp.ClientPayloadError(TOO_LARGE_WRAPPING))

    def _fail(self, reason: str) -> None:
        self._left = 0  # Ignore further data.
        self.set_exception(HttpProcessingError(message=reason))


def _body_length(message: RawResponseMessage) -> int | None:
    """The length of a body without framing; None: it is framed, or ends with the connection."""
    if message.code in EMPTY_BODY_STATUS_CODES:
        return 0
    length = message.headers.get("Content-Length", "")
    is_known = length.isascii() and length.isdigit() and not message.chunked
    return int(length) if is_known else None

"""One connection's incoming bytes: how many, and which belong to what.

What aiohttp's own protocol does not do:

* bound what a receiver may send for one answer, whatever it is made of.  Its
  parser bounds lines and their number, but an endless run of interim answers,
  chunk extensions or trailers would keep it busy until the time is out;
* close a kept connection on which the receiver said something while nobody had
  asked.  aiohttp would take that for the answer to the next request, and a
  delivery that never arrived would count as delivered;
* keep the head of an answer whose body is broken.  When both come in one
  segment, aiohttp's parser fails as a whole and the status is lost; when they
  do not, whoever reads the body is not told and waits for its time-out.

This leans on a few inner names of aiohttp; the conformance tests of the
transport fail if those ever change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
from aiohttp.client_proto import ResponseHandler
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

    from aiohttp import StreamReader
    from aiohttp.http import RawResponseMessage

_HEAD_END = b"\r\n\r\n"


class Protocol(ResponseHandler):
    """Reads one answer at a time, and no more of it than is wanted."""

    used = False
    """Whether a request was sent on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._asked = False
        self._left = HEAD_BYTES_MAX
        self._interims = 0
        self._body: StreamReader | None = None

    def ask(self, method: str) -> None:
        """Expect an answer to a request that is sent now."""
        self.used = self._asked = True
        self._left, self._body = HEAD_BYTES_MAX, None
        self._interims = 0
        self.set_response_params(
            skip_payload=method == "HEAD",
            read_until_eof=True,
            auto_decompress=False,
            read_bufsize=BODY_BYTES_MAX,
            max_headers=HEADER_COUNT_MAX,
        )

    async def answer(self) -> tuple[RawResponseMessage, StreamReader]:
        """The head of the answer, and its body to be read.

        Raises:
            HttpProcessingError: what came is no answer.
        """
        while True:
            message, body = await self.read()
            if not is_interim(message.code):
                return message, body

    def answered(self) -> None:
        """Expect nothing more: what still comes answers nothing."""
        self._asked = False

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Called by the parser with every head that it has read."""
        if self._body is None:
            if not is_interim(data[0].code):
                self._left, self._body = BODY_RAW_BYTES_MAX, data[1]
            elif self._interims < INTERIM_MAX:
                self._interims += 1
            else:
                self._give_up(TOO_MANY_INTERIMS)
                return
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        if self.used and not self._asked and data:
            self.force_close()
            self.abort()
            return
        # Head by head, and what comes after the last one at once.
        while self._asked and self._body is None:
            end = data.find(_HEAD_END) + len(_HEAD_END)
            if end < len(_HEAD_END) or end == len(data):
                break
            self._parse(data[:end])
            data = data[end:]
            if self.exception() is not None:
                return
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        if data and self._left <= 0:
            return
        wanted = data[: self._left]
        self._left -= len(wanted)
        super().data_received(wanted)
        if data and self._left <= 0 and self.exception() is None:
            self._enough()
        error, payload = self.exception(), self._payload
        if error is not None and payload is not None and not payload.is_eof():
            # aiohttp tells nobody who already reads the body, and so that
            # reader would wait for the rest until its time was out.
            payload.set_exception(aiohttp.ClientPayloadError(str(error)))

    def _enough(self) -> None:
        """Read no more, and tell whoever waits for more."""
        self.force_close()
        if self._body is None:
            self._give_up(TOO_LARGE_HEAD)
        elif self._body.total_bytes < BODY_BYTES_MAX and not self._body.is_eof():
            self._body.set_exception(aiohttp.ClientPayloadError(TOO_LARGE_WRAPPING))

    def _give_up(self, why: str) -> None:
        self._left = 0  # What still comes is not looked at.
        self.set_exception(HttpProcessingError(message=why))

"""Connections for the aiohttp client: guarded, and never a step behind.

Three things that aiohttp's own connector does not do:

* ask about the final address of every connection, whatever resolved it: a
  resolver is not even asked when the URL holds an address;
* throw away a kept connection on which the receiver said something while
  nobody had asked.  aiohttp would take that for the answer to the next
  request, and a delivery that never arrived would count as delivered;
* keep the head of an answer whose body is broken.  When both come in one
  segment, aiohttp's parser fails as a whole and the status is lost; when they
  do not, whoever reads the body is not told and waits for its time-out.

The last two lean on a few inner names of aiohttp; the conformance tests of the
transport fail if those ever change.
"""

from __future__ import annotations

import functools
import socket
from typing import TYPE_CHECKING, Any, cast

import aiohttp
from aiohttp.client_proto import ResponseHandler

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.connector import Connection

_HEAD_END = b"\r\n\r\n"
_HEADS_MAX = 8
"""More interim answers than this in one segment are not told apart."""


class EgressRefused(OSError):
    """The guard said no to an address; another one may still be tried."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Connector(aiohttp.TCPConnector):
    """A pool of connections to addresses for which `refusal` has no reason.

    `refusal(address, port=…)` is asked right before every connection.
    """

    def __init__(self, refusal: Callable[..., str | None], **options: Any) -> None:
        super().__init__(socket_factory=self._guarded_socket, **options)
        self._refusal = refusal
        protocol: type[ResponseHandler] = _Protocol
        self._factory = functools.partial(protocol, loop=self._loop)

    async def connect(self, *args: Any, **kwargs: Any) -> Connection:
        """A kept connection on which it is quiet, or a new one."""
        while True:
            connection = await super().connect(*args, **kwargs)
            protocol = cast("_Protocol | None", connection.protocol)
            if protocol is None or not protocol.used or not protocol.should_close:
                break
            connection.close()
        if protocol is not None:
            protocol.used = True
        return connection

    def _guarded_socket(self, info: Any) -> socket.socket:
        family, kind, protocol, _, address = info
        if (why := self._refusal(address[0], port=address[1])) is not None:
            raise EgressRefused(why)
        return socket.socket(family, kind, protocol)


class _Protocol(ResponseHandler):
    """Gives the parser what belongs to a head apart from what follows it."""

    used = False
    """Whether a request was sent on it."""

    def data_received(self, data: bytes) -> None:
        for _ in range(_HEADS_MAX):
            end = data.find(_HEAD_END) + len(_HEAD_END)
            if end < len(_HEAD_END) or end == len(data):
                break
            self._parse(data[:end])
            data = data[end:]
            if self.exception() is not None:
                return
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        error, payload = self.exception(), self._payload
        if error is not None and payload is not None and not payload.is_eof():
            # aiohttp tells nobody who already reads the body, and so that
            # reader would wait for the rest until its time was out.
            payload.set_exception(aiohttp.ClientPayloadError(str(error)))

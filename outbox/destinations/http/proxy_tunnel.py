"""CONNECT: what is said to a proxy before a receiver can be spoken to.

A proxy's answer is never taken for a receiver's: whatever it is, no request
was sent, so its status says nothing about the delivery.  Nothing of a request
reaches the proxy, and nothing that is said to it reaches a receiver.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from outbox.core.model.response import Failure
from outbox.destinations.interface import NotConnected

if TYPE_CHECKING:
    from outbox.web.proxy import Proxy

ANSWER_BYTES_MAX = 16 * 1024
_END = b"\r\n\r\n"
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: [^\r\n]*)?\r\n")
# How smokescreen says that it is the rules that refuse, and which.
_RULED = re.compile(rb"^X-Smokescreen-Error:[ \t]*([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_REFUSED = (403, 407)


class Tunnel(asyncio.Protocol):
    """A connection to a proxy, until it is one to the receiver."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer = bytearray()
        self._done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def open(self, proxy: Proxy, host: str, port: int) -> None:
        """Have the proxy connect to a host.

        Raises:
            NotConnected: it did not.
        """
        assert self._transport is not None
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        credentials = (
            f"Proxy-Authorization: {proxy.authorization}\r\n" if proxy.authorization else ""
        )
        self._transport.write(
            f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{credentials}\r\n".encode()
        )
        _check(await self._done)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if self._done.done():
            return
        if self._answer.find(_END) >= 0 or len(self._answer) > ANSWER_BYTES_MAX:
            self._done.set_result(bytes(self._answer))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(bytes(self._answer))


def _check(answer: bytes) -> None:
    head, end, rest = answer.partition(_END)
    status = _STATUS.match(head + b"\r\n")
    if not end or status is None:
        what = "ended the connection" if not answer else "answered with what is not HTTP"
        raise NotConnected(Failure.CONNECT, f"the proxy {what}")
    code = int(status[1])
    if 200 <= code <= 299:
        if rest:
            # The receiver speaks second, so these are nobody's words.
            raise NotConnected(Failure.CONNECT, "the proxy said more than its answer")
        return
    ruled = _RULED.search(head)
    if ruled is None:
        raise NotConnected(Failure.CONNECT, f"the proxy answered {code}")
    kind = Failure.EGRESS_REFUSED if code in _REFUSED else Failure.CONNECT
    why = ruled[1].decode("latin-1").strip()
    raise NotConnected(kind, f"the proxy answered {code}: {why}")

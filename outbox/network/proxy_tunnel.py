"""HTTP CONNECT tunnel through a proxy (RFC 9110, 9.3.6).

A proxy response is never treated as a receiver response: no request was sent, so its status
says nothing about the delivery.  The proxy does not see the request, and the receiver does
not see the proxy credentials.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, cast

from outbox.core.model.response import Failure
from outbox.network.errors import NotConnected

if TYPE_CHECKING:
    from outbox.web.proxy import Proxy

PROXY_RESPONSE_BYTES_MAX = 16 * 1024
_END = b"\r\n\r\n"
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: [^\r\n]*)?\r\n")
# smokescreen reports the rule that denied the request in this header.
_DENIAL = re.compile(rb"^X-Smokescreen-Error:[ \t]*([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_REFUSED = (403, 407)


class Tunnel(asyncio.Protocol):
    """Protocol of a proxy connection until the tunnel is open."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._response = bytearray()
        self._done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def open(self, proxy: Proxy, host: str, port: int) -> None:
        """Open a tunnel to a host.

        Raises:
            NotConnected: the proxy did not open it.
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
        # Not an instance of it: uvloop's transports are classes of their own.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._response += data
        if self._done.done():
            return
        if self._response.find(_END) >= 0 or len(self._response) > PROXY_RESPONSE_BYTES_MAX:
            self._done.set_result(bytes(self._response))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(bytes(self._response))


def _check(response: bytes) -> None:
    head, end, rest = response.partition(_END)
    status = _STATUS.match(head + b"\r\n")
    if not end or status is None:
        what = "closed the connection" if not response else "sent a response that is not HTTP"
        raise NotConnected(Failure.CONNECT, f"the proxy {what}")
    code = int(status[1])
    if 200 <= code <= 299:
        if rest:
            # TLS servers do not send first, so these bytes do not come from the receiver.
            raise NotConnected(Failure.CONNECT, "the proxy sent data after its response")
        return
    denial = _DENIAL.search(head)
    if denial is None:
        raise NotConnected(Failure.CONNECT, f"the proxy responded {code}")
    kind = Failure.EGRESS_REFUSED if code in _REFUSED else Failure.CONNECT
    reason = denial[1].decode("latin-1").strip()
    raise NotConnected(kind, f"the proxy responded {code}: {reason}")

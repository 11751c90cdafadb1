"""The transport on aiohttp's connections and parser.

aiohttp's session is passed by.  Two thirds of what it does for a request are
things that a sender of webhooks must not do (follow redirects, decompress
answers, keep cookies, read proxies from the environment, send again by itself
what may have arrived) or has done already (check the URL, make the headers);
they took longer than everything else that a delivery needs.  What is used of
aiohttp are its connector (names, addresses, TLS, the pool) and its parser.

Connections are kept for the next request only after an answer was read to its
end.  Every other one is closed: draining an endless body would cost more than
a handshake.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.http import HttpProcessingError
from yarl import URL

from outbox.core.answer import BODY_BYTES_MAX, Answer, Failure
from outbox.errors import UsageError
from outbox.transport.connector import Connector, EgressRefused
from outbox.transport.port import HEADER_BYTES_MAX

if TYPE_CHECKING:
    from aiohttp import StreamReader
    from aiohttp.abc import AbstractResolver
    from aiohttp.connector import Connection
    from aiohttp.http import RawResponseMessage

    from outbox.core.answer import Headers
    from outbox.transport.egress import EgressPolicy
    from outbox.transport.port import Request

IN_FLIGHT_MAX = 1000
KEEP_ALIVE_S = 15.0
HEADER_COUNT_MAX = 128
DESTINATIONS_MAX = 1024
"""So many URLs are remembered in the form that the connector wants."""


@dataclass(frozen=True, slots=True)
class _Destination:
    """A URL as it goes on the wire and to the connector."""

    connector: Connector
    request: aiohttp.ClientRequest
    """Never sent: it tells the connector where to connect."""
    head: str
    """The request line and Host."""


class AiohttpTransport:
    """A `Transport`; use it in the event loop that it was made in.

    At most `in_flight_max` requests are on the wire; a further `send` waits
    for its turn, and its time-outs start when that comes.  `tls` replaces the
    system's trust store, `resolver` the system's resolver, whose answers are
    kept for `dns_ttl_s`.
    """

    def __init__(
        self,
        policy: EgressPolicy,
        *,
        in_flight_max: int = IN_FLIGHT_MAX,
        tls: ssl.SSLContext | None = None,
        resolver: AbstractResolver | None = None,
        dns_ttl_s: float = 10.0,
    ) -> None:
        self._policy = policy
        self._turns = asyncio.Semaphore(in_flight_max)
        names = {"resolver": resolver, "ttl_dns_cache": dns_ttl_s}
        # A connector does not tell its socket factory whether TLS follows, so
        # there is one for each.
        self._connectors = {
            secure: Connector(
                partial(policy.refusal, tls=secure),
                limit=0,  # _turns bounds them, before any time-out starts.
                keepalive_timeout=KEEP_ALIVE_S,
                ssl=(tls or ssl.create_default_context()) if secure else True,
                **names,
            )
            for secure in (True, False)
        }
        self._destination = lru_cache(DESTINATIONS_MAX)(self._find_destination)
        self._connect_timeout = lru_cache(DESTINATIONS_MAX)(_connect_timeout)

    async def send(self, request: Request) -> Answer:
        """See `Transport.send`."""
        async with self._turns:
            return await self._send(request)

    async def aclose(self) -> None:
        """See `Transport.aclose`."""
        for connector in self._connectors.values():
            await connector.close()

    async def _send(self, request: Request) -> Answer:
        clock = asyncio.get_running_loop().time
        start = clock()
        connection: Connection | None = None
        message: RawResponseMessage | None = None
        body = bytearray()
        failure: Failure | None = None
        detail = ""
        try:
            self._policy.check_url(request.url, request.networks)
            async with asyncio.timeout(request.total_timeout_s):
                destination = self._destination(request.method, request.url)
                connection = await self._connect(destination, request.connect_timeout_s)
                message, payload = await _exchange(connection, destination, request)
                await _read(payload, body)
                if payload.at_eof() and not _unsent(connection):
                    connection.release()
        except Exception as error:
            failure, detail = _explain(error, request)
        finally:
            # Does nothing to a connection that went back to the pool.  It also
            # runs when this task is cancelled.
            if connection is not None:
                _close(connection)
        elapsed_s = clock() - start
        if message is None:
            return Answer.failed(failure or Failure.INTERNAL, detail, elapsed_s)
        return Answer.of(
            message.code,
            elapsed_s,
            headers=_headers(message),
            body=bytes(body),
            detail=f"the body was cut short: {detail}" if failure is not None else "",
        )

    def _find_destination(self, method: str, url: str) -> _Destination:
        request = aiohttp.ClientRequest(method, URL(url), loop=asyncio.get_running_loop())
        head = (
            f"{request.method} {request.url.raw_path_qs} HTTP/1.1\r\n"
            f"Host: {request.headers['Host']}\r\n"
        )
        return _Destination(self._connectors[request.is_ssl()], request, head)

    async def _connect(self, destination: _Destination, timeout_s: float) -> Connection:
        try:
            timeout = self._connect_timeout(timeout_s)
            return await destination.connector.connect(destination.request, [], timeout)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError from error


def _connect_timeout(seconds: float) -> aiohttp.ClientTimeout:
    # The total is timed elsewhere, because aiohttp rounds it to whole seconds.
    return aiohttp.ClientTimeout(connect=seconds)


async def _exchange(
    connection: Connection, destination: _Destination, request: Request
) -> tuple[RawResponseMessage, StreamReader]:
    """Write the request, and wait for the head of its answer."""
    protocol, transport = connection.protocol, connection.transport
    if protocol is None or transport is None:
        raise ConnectionResetError("the connection was closed before the request")
    protocol.set_response_params(
        skip_payload=request.method == "HEAD",
        read_until_eof=True,
        auto_decompress=False,
        read_bufsize=BODY_BYTES_MAX,
        max_headers=HEADER_COUNT_MAX,
    )
    # In one piece: two writes would be two packets.  What does not fit waits
    # in the transport, while an early answer can be read already.
    transport.write(_head(destination, request) + request.body)
    while True:
        message, payload = await protocol.read()
        # What comes before the answer is passed over; 101 is one.
        if not 100 <= message.code <= 199 or message.code == 101:
            return message, payload


def _head(destination: _Destination, request: Request) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in request.headers])
    count = len(request.headers)
    if lines.count("\n") != count or lines.count("\r") != count or "\0" in lines:
        raise ValueError("a header holds a line break")
    return (
        f"{destination.head}{lines}Accept-Encoding: identity\r\n"
        f"Content-Length: {len(request.body)}\r\n\r\n"
    ).encode()


async def _read(payload: StreamReader, body: bytearray) -> None:
    """Fill `body` as far as it may be read."""
    while len(body) < BODY_BYTES_MAX:
        chunk = await payload.readany()
        if not chunk:
            return
        body += chunk


def _close(connection: Connection) -> None:
    """Close it, without waiting for a receiver that does not read."""
    if _unsent(connection) and connection.transport is not None:
        connection.transport.abort()
    connection.close()


def _unsent(connection: Connection) -> int:
    """How many bytes of the request still wait to be sent."""
    transport = connection.transport
    return 0 if transport is None else transport.get_write_buffer_size()


def _headers(message: RawResponseMessage) -> Headers:
    kept: list[tuple[str, str]] = []
    size = 0
    for name, value in message.raw_headers:
        size += len(name) + len(value)
        if size > HEADER_BYTES_MAX:
            break
        # ISO 8859-1 reads any byte (RFC 9110, 5.5).
        kept.append((name.decode("latin-1"), value.decode("latin-1")))
    return tuple(kept)


def _why(error: OSError) -> str:
    """What the system says, without what asyncio puts in its place."""
    said = os.strerror(error.errno) if error.errno else str(error)
    return said[:1].lower() + said[1:]


def _explain(error: Exception, request: Request) -> tuple[Failure, str]:
    """Why there is no answer, or no more of it, in one line."""
    match error:
        case UsageError():
            return Failure.EGRESS_REFUSED, str(error)
        case aiohttp.ConnectionTimeoutError():
            return Failure.TIMEOUT, f"no connection within {request.connect_timeout_s:g} s"
        case TimeoutError():
            return Failure.TIMEOUT, f"not answered within {request.total_timeout_s:g} s"
        case aiohttp.ClientConnectorDNSError():
            return Failure.DNS, f"{error.host}: {error.os_error.strerror or error.os_error}"
        case aiohttp.ClientSSLError():
            return Failure.TLS, str(error)
        case aiohttp.ClientConnectorError() if isinstance(error.os_error, EgressRefused):
            return Failure.EGRESS_REFUSED, error.os_error.reason
        case aiohttp.ClientConnectorError():
            return Failure.CONNECT, f"{_why(error.os_error)} at {error.host}:{error.port}"
        case aiohttp.ClientOSError() if isinstance(error.__cause__, ssl.SSLError):
            # In TLS 1.3 a refused handshake shows at the first read.
            return Failure.TLS, str(error.__cause__)
        case aiohttp.ClientPayloadError() | HttpProcessingError():
            return Failure.PROTOCOL, getattr(error, "message", "") or str(error)
        case aiohttp.ServerDisconnectedError():
            return Failure.RESET, "the connection was closed before an answer"
        case aiohttp.ClientConnectionError() | ConnectionError():
            return Failure.RESET, getattr(error, "strerror", "") or str(error)
        case _:
            return Failure.INTERNAL, f"{type(error).__name__}: {error}"

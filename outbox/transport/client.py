"""The transport on aiohttp's connections and parser.

aiohttp's session is passed by.  Two thirds of what it does for a request are
things that a sender of webhooks must not do (follow redirects, decompress
answers, keep cookies, read proxies from the environment, send again by itself
what may have arrived) or has done already (check the URL, make the headers);
they took longer than everything else that a delivery needs.  What is used of
aiohttp are its pool of connections and its parser.

Connections are kept for the next request only after an answer was read to its
end.  Every other one is closed: draining an endless body would cost more than
a handshake.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.http import HttpProcessingError
from yarl import URL

from outbox.core.answer import BODY_BYTES_MAX, Answer, Failure
from outbox.errors import UsageError
from outbox.transport.connector import Connector, Target
from outbox.transport.contexts import SYSTEM_MAX, Contexts
from outbox.transport.port import HEADER_BYTES_MAX, NotConnected
from outbox.transport.resolving import Names
from outbox.transport.tls import reason

if TYPE_CHECKING:
    from aiohttp import StreamReader
    from aiohttp.connector import Connection
    from aiohttp.http import RawResponseMessage

    from outbox.core.answer import Headers
    from outbox.transport.egress import EgressPolicy, Network
    from outbox.transport.port import Request, Tls
    from outbox.transport.protocol import Protocol
    from outbox.transport.resolving import Resolver
    from outbox.web.proxy import Proxy

IN_FLIGHT_MAX = 1000
KEEP_ALIVE_S = 15.0
CANCELLED = "the request was called off"
DESTINATIONS_MAX = 1024
"""So many URLs are remembered in the form that the connector wants."""


@dataclass(frozen=True, slots=True)
class _Destination:
    """A URL as it goes to the connector and on the wire."""

    target: Target
    head: str
    """The request line and Host."""


class AiohttpTransport:
    """A `Transport`; use it in the event loop that it was made in.

    Args:
        proxy: connects to receivers outside of open networks.
        in_flight_max: so many requests are on the wire; a further `send` waits
            for its turn, and its time-outs start when that comes.
        tls: in place of the system's trust store, for endpoints without their own.
        resolver: in place of c-ares.
        keep_alive_s: an unused connection is kept so long; None: not at all.
        contexts_max: so many contexts are kept of endpoints that have an identity and no
            trust of their own.
    """

    def __init__(
        self,
        policy: EgressPolicy,
        *,
        proxy: Proxy | None = None,
        in_flight_max: int = IN_FLIGHT_MAX,
        tls: ssl.SSLContext | None = None,
        resolver: Resolver | None = None,
        keep_alive_s: float | None = KEEP_ALIVE_S,
        contexts_max: int = SYSTEM_MAX,
    ) -> None:
        self._policy = policy
        self._proxied = proxy is not None
        self._turns = asyncio.Semaphore(in_flight_max)
        self._resolver = resolver or Names()
        self._contexts = Contexts(tls, system_max=contexts_max)
        self._connector = Connector(
            policy, self._resolver, self._contexts, proxy, keep_alive_s=keep_alive_s
        )
        self._destination = lru_cache(DESTINATIONS_MAX)(self._find_destination)

    async def send(self, request: Request) -> Answer:
        """See `Transport.send`."""
        async with self._turns:
            return await self._send(request)

    async def aclose(self) -> None:
        """See `Transport.aclose`."""
        await self._connector.close()
        await self._resolver.aclose()
        self._contexts.close()

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
                destination = self._destination(
                    request.method, request.url, request.networks, request.tls
                )
                connection = await self._connector.open(
                    destination.target, request.connect_timeout_s
                )
                message, payload = await _exchange(connection, destination, request)
                await _read(payload, body)
                if payload.at_eof() and not _unsent(connection):
                    _protocol(connection).answered()
                    connection.release()
        except asyncio.CancelledError:
            if message is None:
                raise
            # Not of a class of its own, which `asyncio.timeout` of Python 3.11 does not know.
            raise asyncio.CancelledError(
                _answer(message, clock() - start, body, CANCELLED)
            ) from None
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
        return _answer(message, elapsed_s, body, None if failure is None else detail)

    def _find_destination(
        self, method: str, text: str, networks: tuple[Network, ...], tls: Tls | None
    ) -> _Destination:
        url = URL(text)
        host, port = url.raw_host, url.port
        assert host is not None
        assert port is not None
        secure = url.scheme == "https"
        target = Target(
            secure=secure,
            host=host,
            port=port,
            networks=networks,
            tls=tls if secure else None,
            by_proxy=self._proxied and self._policy.by_proxy(host, tls=secure, networks=networks),
        )
        head = f"{method} {url.raw_path_qs} HTTP/1.1\r\nHost: {url.host_port_subcomponent}\r\n"
        return _Destination(target, head)


async def _exchange(
    connection: Connection, destination: _Destination, request: Request
) -> tuple[RawResponseMessage, StreamReader]:
    """Write the request, and wait for the head of its answer."""
    protocol, transport = _protocol(connection), connection.transport
    if transport is None:
        raise ConnectionResetError("the connection was closed before the request")
    protocol.ask(request.method)
    # In one piece: two writes would be two packets.  What does not fit waits
    # in the transport, while an early answer can be read already.
    transport.write(_head(destination, request) + request.body)
    return await protocol.answer()


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


def _protocol(connection: Connection) -> Protocol:
    protocol = connection.protocol
    if protocol is None:
        raise ConnectionResetError("the connection was closed before the request")
    return protocol  # type: ignore[return-value]  # It came from our connector.


def _close(connection: Connection) -> None:
    """Close it, without waiting for a receiver that does not read."""
    if _unsent(connection) and connection.transport is not None:
        connection.transport.abort()
    connection.close()


def _unsent(connection: Connection) -> int:
    """How many bytes of the request still wait to be sent."""
    transport = connection.transport
    return 0 if transport is None else transport.get_write_buffer_size()


def _answer(
    message: RawResponseMessage, elapsed_s: float, body: bytearray, cut_by: str | None
) -> Answer:
    """What came back; `cut_by` says what ended its body, if it has not ended by itself."""
    return Answer.of(
        message.code,
        elapsed_s,
        headers=_headers(message),
        body=bytes(body),
        detail="" if cut_by is None else f"the body was cut short: {cut_by}",
    )


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


def _explain(error: Exception, request: Request) -> tuple[Failure, str]:
    """Why there is no answer, or no more of it, in one line."""
    match error:
        case NotConnected():
            return error.failure, error.detail
        case UsageError():
            return Failure.EGRESS_REFUSED, str(error)
        case TimeoutError():
            return Failure.TIMEOUT, f"not answered within {request.total_timeout_s:g} s"
        case aiohttp.ClientOSError() if isinstance(error.__cause__, ssl.SSLError):
            # In TLS 1.3 a refused handshake shows at the first read.
            return Failure.TLS, reason(error.__cause__)
        case aiohttp.ClientPayloadError() | HttpProcessingError():
            # What follows quotes what was received, and that may be what we sent.
            return Failure.PROTOCOL, (getattr(error, "message", "") or str(error)).partition(":")[0]
        case aiohttp.ServerDisconnectedError():
            return Failure.RESET, "the connection was closed before an answer"
        case aiohttp.ClientConnectionError() | ConnectionError():
            return Failure.RESET, getattr(error, "strerror", "") or str(error)
        case _:
            return Failure.INTERNAL, f"{type(error).__name__}: {error}"

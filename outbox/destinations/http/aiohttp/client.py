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
from time import monotonic
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.http import HttpProcessingError

from outbox.core.model.response import BODY_BYTES_MAX, Answer, Failure
from outbox.destinations.http.aiohttp.connector import Connector
from outbox.destinations.http.request_encoding import written
from outbox.destinations.http.responses import CANCELLED, UNANSWERED, answered, kept, out_of_time
from outbox.destinations.http.tls import reason
from outbox.destinations.interface import NotConnected

if TYPE_CHECKING:
    from aiohttp import StreamReader
    from aiohttp.connector import Connection
    from aiohttp.http import RawResponseMessage

    from outbox.destinations.http.aiohttp.protocol import Protocol
    from outbox.destinations.http.connector import Connecting
    from outbox.destinations.http.targets import Destination
    from outbox.destinations.interface import Request


class AiohttpClient:
    """A `Client`; use it in the event loop that it was made in.

    Args:
        keep_alive_s: an unused connection is kept so long; None: not at all.
    """

    def __init__(self, connecting: Connecting, keep_alive_s: float | None) -> None:
        self._connector = Connector(connecting, keep_alive_s=keep_alive_s)

    async def aclose(self) -> None:
        """See `Client.aclose`."""
        await self._connector.close()

    async def send(self, destination: Destination, request: Request) -> Answer:
        """See `Client.send`."""
        start = monotonic()
        connection: Connection | None = None
        message: RawResponseMessage | None = None
        body = bytearray()
        failure: Failure | None = None
        detail = ""
        try:
            async with asyncio.timeout(request.total_timeout_s):
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
                _answer(message, monotonic() - start, body, CANCELLED)
            ) from None
        except Exception as error:
            failure, detail = _explain(error, request)
        finally:
            # Does nothing to a connection that went back to the pool.  It also
            # runs when this task is cancelled.
            if connection is not None:
                _close(connection)
        elapsed_s = monotonic() - start
        if message is None:
            return Answer.failed(failure or Failure.INTERNAL, detail, elapsed_s)
        return _answer(message, elapsed_s, body, None if failure is None else detail)


async def _exchange(
    connection: Connection, destination: Destination, request: Request
) -> tuple[RawResponseMessage, StreamReader]:
    """Write the request, and wait for the head of its answer."""
    protocol, transport = _protocol(connection), connection.transport
    if transport is None:
        raise ConnectionResetError("the connection was closed before the request")
    data = written(destination, request)
    protocol.ask(request.method)
    # In one piece: two writes would be two packets.  What does not fit waits
    # in the transport, while an early answer can be read already.
    transport.write(data)
    return await protocol.answer()


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
    return answered(message.code, elapsed_s, kept(message.raw_headers), body, cut_by)


def _explain(error: Exception, request: Request) -> tuple[Failure, str]:
    """Why there is no answer, or no more of it, in one line."""
    match error:
        case NotConnected():
            return error.failure, error.detail
        case TimeoutError():
            return Failure.TIMEOUT, out_of_time(request.total_timeout_s)
        case aiohttp.ClientOSError() if isinstance(error.__cause__, ssl.SSLError):
            # In TLS 1.3 a refused handshake shows at the first read.
            return Failure.TLS, reason(error.__cause__)
        case aiohttp.ClientPayloadError() | HttpProcessingError():
            # What follows quotes what was received, and that may be what we sent.
            return Failure.PROTOCOL, (getattr(error, "message", "") or str(error)).partition(":")[0]
        case aiohttp.ServerDisconnectedError():
            return Failure.RESET, UNANSWERED
        case aiohttp.ClientConnectionError() | ConnectionError():
            return Failure.RESET, getattr(error, "strerror", "") or str(error)
        case _:
            return Failure.INTERNAL, f"{type(error).__name__}: {error}"

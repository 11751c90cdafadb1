"""HTTP client on aiohttp's connection pool and parser, without its session.

Two thirds of the session's work per request are things that a webhook sender must not do
(follow redirects, decompress responses, keep cookies, read proxies from the environment,
retry requests that may have arrived) or has already done (check the URL, build the headers);
they took longer than the rest of a delivery.

A connection is reused only after its response was read completely.  Others are closed:
draining an endless body costs more than a handshake.
"""

from __future__ import annotations

import asyncio
import ssl
from time import monotonic
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.http import HttpProcessingError

from outbox.core.model.response import BODY_BYTES_MAX, AttemptResult, Failure
from outbox.destinations.http.aiohttp.connector import Connector
from outbox.destinations.http.request_encoding import encode_request
from outbox.destinations.http.responses import (
    CANCELLED,
    NO_RESPONSE,
    completed_result,
    kept_headers,
    timeout_detail,
)
from outbox.destinations.http.tls import ssl_error_reason
from outbox.destinations.interface import NotConnected

if TYPE_CHECKING:
    from aiohttp import StreamReader
    from aiohttp.connector import Connection
    from aiohttp.http import RawResponseMessage

    from outbox.destinations.http.aiohttp.protocol import Protocol
    from outbox.destinations.http.connector import ConnectionOpener
    from outbox.destinations.http.targets import Destination
    from outbox.destinations.interface import Following, Request


class AiohttpClient:
    """A `Client`, bound to the event loop in which it was created.

    Args:
        keep_alive_s: idle time-out of pooled connections; None: no pooling.
    """

    def __init__(self, opener: ConnectionOpener, keep_alive_s: float | None) -> None:
        self._connector = Connector(opener, keep_alive_s=keep_alive_s)

    async def aclose(self) -> None:
        await self._connector.close()

    async def send(
        self,
        destination: Destination,
        request: Request,
        following: Following | None,
    ) -> AttemptResult:
        start = monotonic()
        connection: Connection | None = None
        message: RawResponseMessage | None = None
        body = bytearray()
        failure: Failure | None = None
        detail = ""
        try:
            async with asyncio.timeout(request.recipient.total_timeout_s):
                connection = await self._connector.open(
                    destination.target,
                    request.recipient.connect_timeout_s,
                    keep_alive=request.keep_alive,
                )
                message, payload = await _exchange(connection, destination, request)
                await _read(payload, body)
                if payload.at_eof() and not _unsent(connection):
                    _protocol(connection).response_done()
                    if request.keep_alive:
                        connection.release()
        except asyncio.CancelledError:
            if message is None:
                raise
            # Not a subclass: `asyncio.timeout` of Python 3.11 does not handle one.
            raise asyncio.CancelledError(
                _result(message, monotonic() - start, body, CANCELLED)
            ) from None
        except Exception as error:
            failure, detail = _explain(error, request)
        finally:
            # No effect on a released connection.  Also runs on cancellation.
            if connection is not None:
                _close(connection)
        elapsed_s = monotonic() - start
        if message is None:
            return AttemptResult.failed(failure or Failure.INTERNAL, detail, elapsed_s)
        return _result(message, elapsed_s, body, None if failure is None else detail)


async def _exchange(
    connection: Connection, destination: Destination, request: Request
) -> tuple[RawResponseMessage, StreamReader]:
    """Write the request and wait for the response head."""
    protocol, transport = _protocol(connection), connection.transport
    if transport is None:
        raise ConnectionResetError("the connection was closed before the request")
    data = encode_request(destination, request)
    protocol.expect_response(request.recipient.method, request.recipient.on_unsolicited)
    # One write: two would be two packets.  The transport buffers the rest, and an early
    # response can be read meanwhile.
    transport.write(data)
    return await protocol.read_head()


async def _read(payload: StreamReader, body: bytearray) -> None:
    """Read up to `BODY_BYTES_MAX` into `body`."""
    while len(body) < BODY_BYTES_MAX:
        chunk = await payload.readany()
        if not chunk:
            return
        body += chunk


def _protocol(connection: Connection) -> Protocol:
    protocol = connection.protocol
    if protocol is None:
        raise ConnectionResetError("the connection was closed before the request")
    return protocol  # type: ignore[return-value]  # Connector makes Protocol objects.


def _close(connection: Connection) -> None:
    """Close; abort if unsent data remains, so that a stalled receiver cannot delay it."""
    if _unsent(connection) and connection.transport is not None:
        connection.transport.abort()
    connection.close()


def _unsent(connection: Connection) -> int:
    """Return the number of unsent request bytes."""
    transport = connection.transport
    return 0 if transport is None else transport.get_write_buffer_size()


def _result(
    message: RawResponseMessage, elapsed_s: float, body: bytearray, cut_by: str | None
) -> AttemptResult:
    return completed_result(
        message.code, elapsed_s, kept_headers(message.raw_headers), body, cut_by
    )


def _explain(error: Exception, request: Request) -> tuple[Failure, str]:
    """Map an exception to a failure and its detail, in one line."""
    match error:
        case NotConnected():
            return error.failure, error.detail
        case TimeoutError():
            return Failure.TIMEOUT, timeout_detail(request.recipient.total_timeout_s)
        case aiohttp.ClientOSError() if isinstance(error.__cause__, ssl.SSLError):
            # TLS 1.3 reports a rejected client certificate at the first read.
            return Failure.TLS, ssl_error_reason(error.__cause__)
        case aiohttp.ClientPayloadError() | HttpProcessingError():
            # The rest of the message quotes received bytes, which may contain the request.
            return Failure.PROTOCOL, (getattr(error, "message", "") or str(error)).partition(":")[0]
        case aiohttp.ServerDisconnectedError():
            return Failure.RESET, NO_RESPONSE
        case aiohttp.ClientConnectionError() | ConnectionError():
            return Failure.RESET, getattr(error, "strerror", "") or str(error)
        case _:
            return Failure.INTERNAL, f"{type(error).__name__}: {error}"

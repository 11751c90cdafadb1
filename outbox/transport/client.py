"""The transport on aiohttp's client.

What aiohttp does by default and a sender of webhooks must not: follow
redirects, decompress answers (200 kB of gzip can be 200 MB), keep cookies,
read proxies from the environment, send an idempotent request again by itself
when a kept connection turns out dead, and stretch time-outs to whole seconds.

Connections are kept for the next request only after an answer was read to its
end.  Every other one is closed: draining an endless body would cost more than
a handshake.
"""

from __future__ import annotations

import asyncio
import io
import ssl
from typing import TYPE_CHECKING, Any

import aiohttp

from outbox.core.answer import BODY_BYTES_MAX, Answer, Failure
from outbox.errors import UsageError
from outbox.transport.connector import Connector, EgressRefused
from outbox.transport.port import HEADER_BYTES_MAX

if TYPE_CHECKING:
    from aiohttp.abc import AbstractResolver

    from outbox.core.answer import Headers
    from outbox.transport.egress import EgressPolicy
    from outbox.transport.port import Request

IN_FLIGHT_MAX = 1000
KEEP_ALIVE_S = 15.0
HEADER_COUNT_MAX = 128
WRITE_BYTES_MAX = 512 * 1024


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
        self._sessions = {
            "https": self._session(tls=True, ssl=tls or ssl.create_default_context(), **names),
            "http": self._session(tls=False, **names),
        }

    async def send(self, request: Request) -> Answer:
        """See `Transport.send`."""
        async with self._turns:
            return await self._send(request)

    async def aclose(self) -> None:
        """See `Transport.aclose`."""
        for session in self._sessions.values():
            await session.close()

    async def _send(self, request: Request) -> Answer:
        clock = asyncio.get_running_loop().time
        start = clock()
        response: aiohttp.ClientResponse | None = None
        body = bytearray()
        failure: Failure | None = None
        detail = ""
        try:
            self._policy.check_url(request.url)
            async with asyncio.timeout(request.total_timeout_s):
                response = await self._request(request)
                await _read(response, body)
        except Exception as error:
            failure, detail = _explain(error, request)
        finally:
            # Does nothing to a connection that went back to the pool.  It also
            # runs when this task is cancelled.
            if response is not None:
                response.close()
        elapsed_s = clock() - start
        if response is None:
            return Answer.failed(failure or Failure.INTERNAL, detail, elapsed_s)
        return Answer.of(
            response.status,
            elapsed_s,
            headers=_headers(response),
            body=bytes(body),
            detail=f"the body was cut short: {detail}" if failure is not None else "",
        )

    async def _request(self, request: Request) -> aiohttp.ClientResponse:
        scheme = "https" if request.url[:6].lower() == "https:" else "http"
        return await self._sessions[scheme].request(
            request.method,
            request.url,
            data=_payload(request.body),
            headers=[*request.headers, ("Accept-Encoding", "identity")],
            allow_redirects=False,
            # The total is timed here, because aiohttp rounds it to whole seconds.
            timeout=aiohttp.ClientTimeout(connect=request.connect_timeout_s),
        )

    def _session(self, *, tls: bool, **connector: Any) -> aiohttp.ClientSession:
        session = aiohttp.ClientSession(
            connector=Connector(
                lambda address, port: self._policy.refusal(address, port=port, tls=tls),
                limit=0,  # _turns bounds them, before any time-out starts.
                keepalive_timeout=KEEP_ALIVE_S,
                **connector,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            raise_for_status=False,
            read_bufsize=BODY_BYTES_MAX,
            max_headers=HEADER_COUNT_MAX,
            skip_auto_headers=("Accept", "Content-Type", "User-Agent"),
        )
        # With a method that HTTP calls idempotent, aiohttp would send again
        # what may have arrived; when to send again is for the lane to say.
        session._retry_connection = False
        return session


def _payload(body: bytes) -> bytes | io.BytesIO:
    """As a file, a large body is written in pieces and does not hold up the loop."""
    return body if len(body) <= WRITE_BYTES_MAX else io.BytesIO(body)


async def _read(response: aiohttp.ClientResponse, body: bytearray) -> None:
    """Fill `body` as far as it may be read; at its end the connection is free."""
    while len(body) < BODY_BYTES_MAX:
        chunk = await response.content.readany()
        if not chunk:
            return
        body += chunk


def _headers(response: aiohttp.ClientResponse) -> Headers:
    kept: list[tuple[str, str]] = []
    size = 0
    for name, value in response.raw_headers:
        size += len(name) + len(value)
        if size > HEADER_BYTES_MAX:
            break
        # ISO 8859-1 reads any byte (RFC 9110, 5.5).
        kept.append((name.decode("latin-1"), value.decode("latin-1")))
    return tuple(kept)


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
            return Failure.CONNECT, str(error.os_error.strerror or error.os_error)
        case aiohttp.ClientOSError() if isinstance(error.__cause__, ssl.SSLError):
            # In TLS 1.3 a refused handshake shows at the first read.
            return Failure.TLS, str(error.__cause__)
        case aiohttp.ClientPayloadError() | aiohttp.ClientResponseError():
            return Failure.PROTOCOL, getattr(error, "message", "") or str(error)
        case aiohttp.ServerDisconnectedError():
            return Failure.RESET, "the connection was closed before an answer"
        case aiohttp.ClientConnectionError() | ConnectionError():
            return Failure.RESET, getattr(error, "strerror", "") or str(error)
        case _:
            return Failure.INTERNAL, f"{type(error).__name__}: {error}"

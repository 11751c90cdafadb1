"""Requests in flight of a process, and the bytes that it holds for their clients.

A request counts against the limits of its token, or of its tenant, and of its address until the
last byte of its response is written.  A rate limit alone does not bound what is in flight: a client
can send its body slowly, or not read the response.

The bytes of bodies and responses share one budget, `IN_FLIGHT_BYTES_MAX`.  If there is no room, the
client with the most bytes loses its oldest connection, and if that is the client of the new
request, the request is refused.  So a client that does not read its responses takes the room from
itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

from aiohttp import web

from outbox.web.address import address_key
from outbox.web.serving import RESPONSE_READ_TIMEOUT_S
from outbox_api.limits import (
    ADDRESS_REQUESTS_MAX,
    IN_FLIGHT_BYTES_MAX,
    IN_FLIGHT_RETRY_S,
    MIB,
    RESPONSE_PART_BYTES,
    TOKEN_REQUESTS_MAX,
)
from outbox_api.middleware import problem_response
from outbox_api.problem import Problem, Refusal
from outbox_api.rate_limit import too_many_requests

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

    from outbox_api.rate_limit import Holder

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

UNKNOWN_ADDRESS = "unknown"
"""Key of clients without a known address."""
_SAFE_METHODS = ("GET", "HEAD")


class InFlight:
    """The requests in flight of a process, of all its listeners."""

    def __init__(self) -> None:
        self.requests: Counter[Holder] = Counter()
        self.bytes: Counter[Hashable] = Counter()
        """Bytes that are held, by client."""
        self._holders: dict[RequestInFlight, None] = {}
        """The requests that hold bytes, the oldest first."""

    def middleware(self) -> Any:
        """Create the outermost middleware, which writes responses and ends requests."""

        @web.middleware
        async def write_response(request: web.Request, handler: Handler) -> web.StreamResponse:
            in_flight = request[_KEY] = RequestInFlight(self, request)
            try:
                return await in_flight.write(await handler(request))
            finally:
                in_flight.end()

        return write_response

    def hold(self, request: RequestInFlight, count: int) -> None:
        """Hold that many bytes for a request, instead of those that it held before.

        Raises:
            Problem: there is no room, and no other client holds more bytes.
        """
        self.release(request)
        # Where larger payloads are allowed, one of them leaves room for others.
        count = min(count, IN_FLIGHT_BYTES_MAX // 2)
        while self.bytes.total() + count > IN_FLIGHT_BYTES_MAX:
            ((largest, most),) = self.bytes.most_common(1)
            if most <= self.bytes[request.client] + count:
                raise _too_many(
                    f"requests in flight have {IN_FLIGHT_BYTES_MAX // MIB} MiB of bodies and "
                    "responses, and no other client has more of them"
                )
            next(each for each in self._holders if each.client == largest).abort()
        if count:
            self._holders[request] = None
            self.bytes[request.client] += count
            request.held_bytes = count

    def release(self, request: RequestInFlight) -> None:
        """Release the bytes of a request."""
        self._holders.pop(request, None)
        self.bytes[request.client] -= request.held_bytes
        request.held_bytes = 0
        self.bytes = +self.bytes


class RequestInFlight:
    """A request in flight, until the last byte of its response is written."""

    def __init__(self, in_flight: InFlight, request: web.Request) -> None:
        self.client: Hashable = address_key(request.remote or UNKNOWN_ADDRESS)
        """Whose request it is: the address, or the holder when the token is known."""
        self.held_bytes = 0
        self._address = self.client
        self._counted: list[Holder] = []
        self._in_flight = in_flight
        self._request = request

    def count(self, holder: Holder) -> None:
        """Count the request of a token, or of a tenant's.

        Raises:
            Problem: the holder or the address has too many requests in flight.
        """
        keys = [holder, ("address", self._address)]
        maxima = TOKEN_REQUESTS_MAX, ADDRESS_REQUESTS_MAX
        for key, maximum in zip(keys, maxima, strict=True):
            if self._in_flight.requests[key] >= maximum:
                raise _too_many(f"this {key[0]} has {maximum} requests in flight")
        self._in_flight.requests.update(keys)
        self._counted, self.client = keys, holder

    def hold(self, count: int) -> None:
        """Hold bytes; see `InFlight.hold`."""
        self._in_flight.hold(self, count)

    async def write(self, response: web.StreamResponse) -> web.StreamResponse:
        """Write the response; returns when the kernel has taken all of it."""
        assert isinstance(response, web.Response)
        body = response.body or b""
        assert isinstance(body, bytes | bytearray)
        try:
            self.hold(len(body))
        except Problem as problem:
            if self._request.method not in _SAFE_METHODS:
                self.abort()  # A 429 would say that nothing was changed.
                return response
            response, body = problem_response(problem), b""
        try:
            async with asyncio.timeout(RESPONSE_READ_TIMEOUT_S):
                if self._request.method == "HEAD" or len(body) <= RESPONSE_PART_BYTES:
                    await response.prepare(self._request)
                    await response.write_eof()
                    return response
                return await self._write_parts(response, memoryview(body))
        except (ConnectionError, TimeoutError):
            self.abort()
        return response

    async def _write_parts(self, head: web.Response, body: memoryview) -> web.StreamResponse:
        response = web.StreamResponse(status=head.status, headers=head.headers)
        response.content_length = len(body)
        writer = await response.prepare(self._request)
        assert writer is not None
        for start in range(0, len(body), RESPONSE_PART_BYTES):
            await response.write(body[start : start + RESPONSE_PART_BYTES])
            await writer.drain()
        await response.write_eof()
        return response

    def abort(self) -> None:
        """Close the connection, with what its client has not read."""
        self._in_flight.release(self)
        if self._request.transport is not None:
            self._request.transport.abort()

    def end(self) -> None:
        """The response is written, or the client is gone."""
        self._in_flight.release(self)
        self._in_flight.requests.subtract(self._counted)
        self._in_flight.requests = +self._in_flight.requests


_KEY: web.RequestKey[RequestInFlight] = web.RequestKey("in_flight", RequestInFlight)


def request_in_flight(request: web.Request) -> RequestInFlight:
    """The request as it counts against the limits."""
    return request[_KEY]


def _too_many(reason: str) -> Problem:
    return too_many_requests(
        f"{reason}; wait for the responses, and read them", IN_FLIGHT_RETRY_S, Refusal.CONCURRENCY
    )

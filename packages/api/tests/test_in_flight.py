"""Requests in flight: how many one token and one address may have, and the bytes of all of them."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from aiohttp import web

from outbox.web.address import Address, parse_address
from outbox.web.serving import listen, serving
from outbox_api import in_flight
from outbox_api.in_flight import InFlight, RequestInFlight
from outbox_api.limits import (
    ADDRESS_REQUESTS_MAX,
    IN_FLIGHT_BYTES_MAX,
    MIB,
    TOKEN_REQUESTS_MAX,
)
from outbox_api.problem import Problem
from tests.support.api import make_token
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.api import Api
    from tests.support.postgres import Database

UNIT = IN_FLIGHT_BYTES_MAX // 32
BODY = bytes(range(256)) * (IN_FLIGHT_BYTES_MAX // 2 // 256)
"""More than the kernel takes for a client that does not read."""


class FakeTransport:
    """A connection that can be aborted."""

    def __init__(self) -> None:
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


class Client(RequestInFlight):
    """A request of an address, and of a token if one is given."""

    def __init__(
        self, requests: InFlight, token_id: int | None = None, address: str = "192.0.2.1"
    ) -> None:
        self.transport = FakeTransport()
        request = SimpleNamespace(remote=address, transport=self.transport)
        super().__init__(requests, cast("web.Request", request))
        if token_id is not None:
            self.count(("token", token_id))


def refusal(requests: InFlight, token_id: int, address: str = "192.0.2.1") -> str | None:
    try:
        Client(requests, token_id, address).end()
    except Problem as problem:
        return problem.detail
    return None


# ------------------------------------------------------------------ requests


def test_a_token_has_a_maximum_of_requests_in_flight() -> None:
    requests = InFlight()
    held = [Client(requests, 1) for _ in range(TOKEN_REQUESTS_MAX)]
    assert refusal(requests, 1) == (
        "this token has 64 requests in flight; wait for the responses, and read them; retry in 1 s"
    )
    assert refusal(requests, 2) is None
    held.pop().end()
    assert refusal(requests, 1) is None


def test_an_address_has_a_maximum_of_requests_with_any_tokens() -> None:
    requests = InFlight()
    held = [Client(requests, n, f"2001:db8::{n:x}") for n in range(ADDRESS_REQUESTS_MAX)]
    problem = refusal(requests, 999, "2001:db8::ffff")
    assert problem is not None
    assert problem.startswith("this address has 256 requests in flight")
    assert refusal(requests, 999, "2001:db8:0:1::1") is None
    for each in held:
        each.end()
    assert not requests.requests


# --------------------------------------------------------------------- bytes


def test_the_client_with_the_most_bytes_loses_its_oldest_connection() -> None:
    requests = InFlight()
    hostile = [Client(requests, 1) for _ in range(5)]
    small = Client(requests, 2)
    for each in hostile:
        each.hold(6 * UNIT)
    small.hold(UNIT)
    late = Client(requests, 3)
    late.hold(10 * UNIT)
    assert [each.transport.is_aborted for each in hostile] == [True, True, False, False, False]
    assert not small.transport.is_aborted
    held = {client[1]: held for client, held in requests.bytes.items()}
    assert held == {1: 18 * UNIT, 2: UNIT, 3: 10 * UNIT}
    for each in (*hostile, small, late):
        each.end()
    assert not requests.bytes


def test_a_client_with_the_most_bytes_is_refused_more() -> None:
    requests = InFlight()
    own = [Client(requests, 1) for _ in range(4)]
    for each in own:
        each.hold(8 * UNIT)
    with pytest.raises(Problem) as caught:
        Client(requests, 1).hold(1)
    assert caught.value.kind.status == 429
    assert int(caught.value.headers["Retry-After"]) >= 1
    assert not any(each.transport.is_aborted for each in own)
    own[0].hold(0)  # Its body is parsed.
    Client(requests, 1).hold(1)


def test_a_request_with_more_bytes_than_the_budget_counts_as_a_half_of_it() -> None:
    requests = InFlight()
    first, second = Client(requests, 1), Client(requests, 2)
    first.hold(10 * IN_FLIGHT_BYTES_MAX)
    second.hold(10 * IN_FLIGHT_BYTES_MAX)
    assert requests.bytes.total() == IN_FLIGHT_BYTES_MAX


# ----------------------------------------------------------------- responses


@asynccontextmanager
async def listening(requests: InFlight) -> AsyncIterator[Address]:
    """Serve a large response to anybody; the path is the token."""

    async def respond(request: web.Request) -> web.Response:
        in_flight.request_in_flight(request).count(("token", request.path))
        return web.Response(body=BODY, headers={"X-Kept": "1"})

    application = web.Application(middlewares=[requests.middleware()])
    application.router.add_get("/{token}", respond)
    application.router.add_post("/{token}", respond)
    async with serving(application, await listen(Address("127.0.0.1", 0))) as at:
        yield at


async def unread_request(
    at: Address, stack: AsyncExitStack, path: str, method: str = "GET"
) -> socket.socket:
    """A connection that sends a request, and does not read the response."""
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 * 1024)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (at.host, at.port))
    await loop.sock_sendall(client, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return client


async def read_all(client: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    loop, received = asyncio.get_running_loop(), b""
    async with asyncio.timeout(60):
        try:
            while part := await loop.sock_recv(client, MIB):
                received += part
        except ConnectionError:
            pass
    return received


@pytest.mark.system
async def test_a_request_is_in_flight_until_its_response_is_read() -> None:
    requests = InFlight()
    async with listening(requests) as at, AsyncExitStack() as stack:
        client = await unread_request(at, stack, "/a")
        await until(lambda: requests.bytes["token", "/a"] == len(BODY), what="the response")
        assert requests.requests["token", "/a"] == 1
        loop, head = asyncio.get_running_loop(), b""
        async with asyncio.timeout(60):
            while b"\r\n\r\n" not in head:
                head += await loop.sock_recv(client, 1024)
            head, _, body = head.partition(b"\r\n\r\n")
            assert b"X-Kept: 1" in head
            while len(body) < len(BODY):
                body += await loop.sock_recv(client, MIB)
        assert body == BODY
        await until(lambda: not requests.requests, what="the end of the request")
        assert not requests.bytes


@pytest.mark.system
async def test_a_client_that_does_not_read_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_flight, "RESPONSE_READ_TIMEOUT_S", 0.3)
    requests = InFlight()
    async with listening(requests) as at, AsyncExitStack() as stack:
        client = await unread_request(at, stack, "/a")
        await until(lambda: requests.bytes["token", "/a"] == len(BODY), what="the response")
        await until(lambda: not requests.requests, what="the connection to be closed")
        assert not requests.bytes
        assert len(await read_all(client)) < len(BODY)


@pytest.mark.system
async def test_unread_responses_of_one_client_make_room_for_those_of_others() -> None:
    requests = InFlight()
    async with listening(requests) as at, AsyncExitStack() as stack:
        hostile = []
        for _ in range(2):
            hostile.append(await unread_request(at, stack, "/hostile"))
            await until(lambda: requests.bytes["token", "/hostile"] == len(hostile) * len(BODY))
        # The third one of the same client is refused.
        more = await unread_request(at, stack, "/hostile")
        async with asyncio.timeout(20):
            assert b" 429 " in (await asyncio.get_running_loop().sock_recv(more, 100))
        user = await unread_request(at, stack, "/user")
        await until(
            lambda: requests.bytes["token", "/user"] == len(BODY), what="the response to the other"
        )
        assert requests.bytes["token", "/hostile"] == len(BODY)
        assert len(await read_all(hostile[0])) < len(BODY)
        user.close()
        await until(lambda: requests.bytes["token", "/user"] == 0, what="the end of the request")


@pytest.mark.system
async def test_a_client_that_is_gone_is_not_counted() -> None:
    requests = InFlight()
    async with listening(requests) as at, AsyncExitStack() as stack:
        client = await unread_request(at, stack, "/a")
        await until(lambda: requests.bytes["token", "/a"] == len(BODY), what="the response")
        client.close()
        await until(lambda: not requests.requests, what="the end of the request")
        assert not requests.bytes


@pytest.mark.system
async def test_pipelined_requests_are_one_in_flight() -> None:
    requests = InFlight()
    async with listening(requests) as at, AsyncExitStack() as stack:
        client = await unread_request(at, stack, "/a")
        text = b"GET /a HTTP/1.1\r\nHost: localhost\r\n\r\n"
        await asyncio.get_running_loop().sock_sendall(client, text * 50)
        await until(lambda: requests.bytes["token", "/a"] > 0, what="the response")
        assert requests.requests["token", "/a"] == 1
        assert requests.bytes["token", "/a"] == len(BODY)


@pytest.mark.system
async def test_a_head_request_has_the_length_and_no_body() -> None:
    requests = InFlight()
    async with listening(requests) as at:
        reader, writer = await asyncio.open_connection(at.host, at.port)
        writer.write(b"HEAD /a HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(20):
            response = await reader.read()
        writer.close()
    assert f"Content-Length: {len(BODY)}\r\n".encode() in response
    assert response.endswith(b"\r\n\r\n")


@pytest.mark.system
async def test_a_change_is_not_reported_as_refused_for_its_response() -> None:
    """Its client does not know the result, as after any lost connection."""
    requests = InFlight()
    async with listening(requests) as at, AsyncExitStack() as stack:
        for count in (1, 2):
            await unread_request(at, stack, "/a")
            await until(lambda count=count: requests.bytes["token", "/a"] == count * len(BODY))
        change = await unread_request(at, stack, "/a", "POST")
        assert await read_all(change) == b""


# -------------------------------------------------------------------- bodies


@pytest.mark.full
async def test_six_hundred_dripping_bodies_of_a_valid_token_do_not_keep_others_out(
    database: Database, client: Api
) -> None:
    hostile = await make_token(database, "hostile", ("publish",), tenant="acme")
    head = (
        f"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {hostile}\r\n"
        "Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n{"
    ).encode()
    at = parse_address(client.url.removeprefix("http://"))
    user = client.with_token(await make_token(database, "user"))
    writers: list[asyncio.StreamWriter] = []
    statuses: Counter[bytes] = Counter()

    async def drip() -> None:
        reader, writer = await asyncio.open_connection(at.host, at.port)
        writers.append(writer)
        writer.write(head)
        try:
            statuses[(await reader.readline())[9:12]] += 1
        except ConnectionError:
            statuses[b""] += 1

    try:
        async with asyncio.TaskGroup() as group:
            drips = [group.create_task(drip()) for _ in range(600)]
            await until(lambda: statuses.total() >= 600 - TOKEN_REQUESTS_MAX, what="the refusals")
            event: Any = {"type": "a.b", "payload": "x" * 50_000}
            for _ in range(20):
                assert (await user.get("/v1/me")).status == 200
                assert (await user.post("/v1/events", event)).status == 201
            for each in drips:
                each.cancel()
    finally:
        for writer in writers:
            writer.close()
    # Some were closed at the limit of connections, and the others were refused.
    assert set(statuses) <= {b"429", b""}
    assert statuses[b"429"] > 100

"""Listeners with hostile clients: no connection is held for ever, and no response can be framed."""

from __future__ import annotations

import asyncio
import io
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from outbox.web import health, serving
from outbox.web.address import Address
from tests.support.broken_requests import broken_requests, send_each
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.system

HERE = Address("127.0.0.1", 0)
LARGE = b"x" * (64 << 20)


async def _metrics(_: str) -> tuple[bytes, str]:
    return b"", "text/plain"


def application() -> web.Application:
    """The health listener with some failing routes."""

    async def broken(_: web.Request) -> web.Response:
        raise RuntimeError("the secret reason")

    async def slow(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def large(_: web.Request) -> web.Response:
        return web.Response(body=LARGE)

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    made = health.application(Address("0.0.0.0", 0), lambda: None, _metrics)  # noqa: S104 (any Host)
    made.router.add_get("/broken", broken)
    made.router.add_get("/slow", slow)
    made.router.add_get("/large", large)
    made.router.add_post("/echo", echo)
    return made


@asynccontextmanager
async def listening(connections_max: int = 512) -> AsyncIterator[Address]:
    sockets = await serving.listen(HERE)
    async with serving.serving(application(), sockets, connections_max=connections_max) as at:
        yield at


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[serving.Connections]:
    """The connections of the running servers, to inspect them."""
    made: list[serving.Connections] = []

    class Remembered(serving.Connections):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(serving, "Connections", Remembered)
    return made


class Client:
    """A hand-written connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, text: str) -> None:
        self.writer.write(text.encode())

    async def ended(self) -> bool:
        """Return whether the server has closed the connection."""
        try:
            async with asyncio.timeout(20):
                await self.reader.read()
        except ConnectionResetError:
            pass
        return True

    async def response(self) -> str:
        async with asyncio.timeout(20):
            head = await self.reader.readuntil(b"\r\n\r\n")
        return head.decode()


@asynccontextmanager
async def connected(at: Address) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(at.host, at.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("healthz", 200),
        ("readyz", 200),
        ("metrics", 200),
        ("", 200),
        ("nowhere", 404),
        ("broken", 500),
    ],
)
async def test_every_response_forbids_framing_and_caching(
    path: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as at, aiohttp.ClientSession() as session:
        async with session.get(at.url + path) as response:
            assert response.status == status
            assert serving.HEADERS.items() <= response.headers.items()
            assert "Set-Cookie" not in response.headers
            assert "secret reason" not in await response.text()
        async with session.post(at.url + "healthz", data=b"x") as response:
            assert response.status == 405
            assert serving.HEADERS.items() <= response.headers.items()


@pytest.mark.parametrize(
    "request_",
    [
        "NOT HTTP AT ALL\r\n\r\n",
        "GET /" + "a" * 9000 + " HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nX-Long: " + "a" * 9000 + "\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\n" + "X-A: b\r\n" * 200 + "\r\n",
    ],
    ids=["no HTTP", "a long path", "a long header", "many headers"],
)
async def test_a_malformed_request_is_refused_and_the_connection_closed(
    request_: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as at, connected(at) as client:
        client.send(request_)
        head = await client.response()
        assert head.startswith(("HTTP/1.1 400 ", "HTTP/1.0 400 "))
        for name, value in serving.HEADERS.items():
            assert f"{name}: {value}\r\n" in head
        assert await client.ended()


async def test_requests_that_are_not_http_are_logged_as_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line at once and one a minute: they cannot fill the log, and it has no byte of them."""
    caplog.set_level("DEBUG")
    requests = broken_requests("canarytoken", "canarypayload", "/echo")
    async with listening() as at:
        responses = await send_each(at.host, at.port, requests.values())
        refused = [each for each in responses if b" 400 " in each.partition(b"\r\n")[0]]
        assert len(refused) >= len(requests) - 2
        texts = [each.getMessage() for each in caplog.records if each.name != "asyncio"]
        assert texts == [f"not HTTP: 1 request at {at}"]
    assert [each.getMessage() for each in caplog.records if each.name == "outbox.web"] == [
        f"not HTTP: 1 request at {at}",
        # Also what follows a request for another protocol, after its response.
        f"not HTTP: {len(refused)} requests at {at}",
    ]
    assert "canary" not in caplog.text


@pytest.mark.parametrize(
    "request_",
    [
        "GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        "CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n",
    ],
    ids=["WebSocket", "CONNECT"],
)
async def test_data_after_a_request_for_another_protocol_are_bounded(
    request_: str, servers: list[serving.Connections]
) -> None:
    async with listening() as at, connected(at) as client:
        client.send(request_)
        await client.response()
        client.writer.write(b"x" * 10_000_000)
        assert await client.ended()
        await until(lambda: not servers[0].open, what="the connection to be closed")


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_may_follow_the_head_of_a_request_to_upgrade(
    servers: list[serving.Connections], protocol: str, chunked: bool
) -> None:
    """Some clients ask for HTTP/2 in this way by default."""
    async with listening() as at, connected(at) as client:
        client.send(
            "POST /echo HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\n"
            f"Upgrade: {protocol}\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
            + ("Transfer-Encoding: chunked\r\n\r\n" if chunked else "Content-Length: 1\r\n\r\n")
        )
        await until(lambda: any(each is serving.Awaited.BODY for _, each in servers[0].waiting))
        client.send("1\r\nx\r\n0\r\n\r\n" if chunked else "x")
        assert " 200 " in await client.response()
        assert await client.reader.readexactly(1) == b"x"


async def test_a_dripping_request_head_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "REQUEST_HEAD_TIMEOUT_S", 0.3)
    async with listening() as at, connected(at) as first, connected(at) as second:
        # One client sends nothing, and the other sends bytes all the time.
        ended = asyncio.ensure_future(second.ended())
        second.send("GET /healthz HTTP/1.1\r\n")

        async def drip() -> bool:
            if not ended.done():
                second.send("X")
            return ended.done()

        await until(drip, what="the connection to be ended")
        assert await first.ended()


async def test_a_dripping_second_request_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "REQUEST_HEAD_TIMEOUT_S", 0.3)
    async with listening() as at, connected(at) as client:
        for _ in range(2):
            client.send("GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await client.response()).startswith("HTTP/1.1 200 ")
            assert await client.reader.readexactly(3) == b"ok\n"
        client.send("GET /healthz HTTP/1.1\r\nHos")
        assert await client.ended()


async def test_a_client_that_does_not_read_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, servers: list[serving.Connections]
) -> None:
    monkeypatch.setattr(serving, "RESPONSE_READ_TIMEOUT_S", 0.3)
    reader = asyncio.StreamReader(limit=1)
    async with listening() as at:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(
            lambda: asyncio.StreamReaderProtocol(reader), at.host, at.port
        )
        transport.pause_reading()
        transport.write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        # The server must detect it; the test reads nothing before.
        await until(lambda: servers[0]._server.requests_count == 1, what="the request")
        await until(lambda: not servers[0].open, what="the connection to be ended")
        transport.abort()


async def test_a_new_connection_closes_one_with_an_unread_response(
    servers: list[serving.Connections],
) -> None:
    """Its transport is closed at once, with what it has not sent."""
    unread = socket.socket()
    unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    unread.setblocking(False)
    loop = asyncio.get_running_loop()
    async with listening(connections_max=1) as at, AsyncExitStack() as stack:
        stack.callback(unread.close)
        await loop.sock_connect(unread, (at.host, at.port))
        await loop.sock_sendall(unread, b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        await until(lambda: any(each is serving.Awaited.READING for _, each in servers[0].waiting))
        (hostile,) = servers[0].open
        await stack.enter_async_context(connected(at))
        await until(lambda: hostile not in servers[0].open, what="it to be closed")
        await until(lambda: hostile.transport is None, what="its transport to be closed")


async def test_a_pipelined_request_waits_until_the_response_before_it_is_read(
    servers: list[serving.Connections],
) -> None:
    reader = asyncio.StreamReader(limit=1)
    async with listening() as at:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(
            lambda: asyncio.StreamReaderProtocol(reader), at.host, at.port
        )
        transport.pause_reading()
        transport.write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n" * 3)
        await until(lambda: any(each is serving.Awaited.READING for _, each in servers[0].waiting))
        assert servers[0]._server.requests_count == 1
        transport.abort()
        await until(lambda: not servers[0].open, what="the connection to be closed")


async def test_many_connections_of_one_client_do_not_block_others() -> None:
    async with listening(connections_max=5) as at, connected(at) as user:
        user.send("GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await user.response()).startswith("HTTP/1.1 200 ")
        await user.reader.readexactly(3)
        idle = [await asyncio.open_connection(at.host, at.port) for _ in range(8)]
        async with connected(at) as newcomer:
            newcomer.send("GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await newcomer.response()).startswith("HTTP/1.1 200 ")
        # Connections without a request were closed first, oldest first.
        for reader, _ in idle[:4]:
            assert await Client(reader, idle[0][1]).ended()
        user.send("GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await user.response()).startswith("HTTP/1.1 200 ")
        for _, writer in idle:
            writer.close()


HALF_BODY = "GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\nx"
HALF_HEAD = "GET /healthz HTTP/1.1\r\nHost: "
WHOLE_REQUEST = "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNK = "POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    sampled(
        [
            ["", HALF_HEAD, HALF_BODY, WHOLE_REQUEST, CHUNK],
            [""],
            [HALF_HEAD],
            [HALF_BODY],
            [WHOLE_REQUEST],
            [WHOLE_REQUEST + HALF_HEAD],
            [CHUNK],
        ]
    ),
    ids=["all of these", "silence", "half a head", "half a body", "an idle client",
         "half a head later", "a body that a handler reads"],
)  # fmt: skip
async def test_six_hundred_half_requests_do_not_keep_other_clients_out(
    sent: list[str], servers: list[serving.Connections], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The rest of the bodies is awaited until the end of the test.
    monkeypatch.setattr(serving, "CLOSE_LINGER_S", 3600.0)
    async with listening() as at:
        hostile = []
        try:
            for n in range(600):
                _, writer = await asyncio.open_connection(at.host, at.port)
                hostile.append(writer)
                writer.write(sent[n % len(sent)].encode())
            await until(
                lambda: len(servers[0].open) <= serving.CLIENT_CONNECTIONS_MAX,
                what="the bound",
            )
            async with asyncio.TaskGroup() as group:
                for _ in range(10):
                    group.create_task(require_health(at))
        finally:
            for writer in hostile:
                writer.transport.abort()


async def require_health(at: Address) -> None:
    """Five requests on one connection."""
    async with connected(at) as client:
        for _ in range(5):
            client.send(WHOLE_REQUEST)
            assert (await client.response()).startswith("HTTP/1.1 200 ")
            assert await client.reader.readexactly(3) == b"ok\n"


async def test_a_client_that_holds_many_connections_takes_them_from_itself(
    monkeypatch: pytest.MonkeyPatch, servers: list[serving.Connections]
) -> None:
    monkeypatch.setattr(serving, "CLOSE_LINGER_S", 3600.0)
    async with listening(connections_max=6) as at, AsyncExitStack() as stack:
        # Idle for longer than anything, from another address.
        reader, writer = await asyncio.open_connection(
            at.host, at.port, local_addr=("127.0.0.2", 0)
        )
        user = Client(reader, writer)
        user.send(WHOLE_REQUEST)
        await user.response()
        await user.reader.readexactly(3)
        hostile = [await stack.enter_async_context(connected(at)) for _ in range(5)]
        for each in hostile:
            each.send(HALF_BODY)
            await each.response()
            await each.reader.readexactly(3)
        for victim in hostile[:3]:
            await stack.enter_async_context(connected(at))
            assert await victim.ended()
        user.send(WHOLE_REQUEST)
        assert (await user.response()).startswith("HTTP/1.1 200 ")
        writer.close()


async def test_a_refused_client_that_still_sends_sees_the_response() -> None:
    """Closing the connection at once would reset it."""
    async with (
        listening() as at,
        aiohttp.ClientSession() as session,
        session.post(at.url + "healthz", data=io.BytesIO(b"x" * 4_000_000)) as response,
    ):
        assert response.status == 405


async def test_the_newest_connection_is_closed_when_all_are_busy(
    servers: list[serving.Connections],
) -> None:
    def busy_connections() -> int:
        return sum(each.awaited is None for each in servers[0].open)

    async with listening(connections_max=2) as at, connected(at) as one, connected(at) as two:
        for each in (one, two):
            each.send("GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        await until(lambda: busy_connections() == 2, what="both to be at work")
        async with connected(at) as three:
            assert await three.ended()
        assert busy_connections() == 2

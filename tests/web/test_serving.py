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
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.system

HERE = Address("127.0.0.1", 0)
LARGE = b"x" * (64 << 20)
MEDIUM = b"x" * (20 << 10)
"""Less than a transport buffers before a handler waits for its client."""


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

    async def medium(_: web.Request) -> web.Response:
        return web.Response(body=MEDIUM)

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    made = health.application(Address("0.0.0.0", 0), lambda: None, _metrics)  # noqa: S104 (any Host)
    made.router.add_get("/broken", broken)
    made.router.add_get("/slow", slow)
    made.router.add_get("/large", large)
    made.router.add_get("/medium", medium)
    made.router.add_post("/echo", echo)
    return made


@asynccontextmanager
async def listening() -> AsyncIterator[Address]:
    async with serving.serving(application(), await serving.listen(HERE)) as at:
        yield at


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[serving._Server]:
    """The running servers, to inspect their connections."""
    made: list[serving._Server] = []

    class Remembered(serving._Server):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(serving, "_Server", Remembered)
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


@pytest.mark.parametrize(
    "request_",
    [
        "GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        "CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n",
    ],
    ids=["WebSocket", "CONNECT"],
)
async def test_no_request_is_read_after_one_for_another_protocol(request_: str) -> None:
    async with listening() as at, connected(at) as client:
        client.send(request_ + WHOLE_REQUEST)
        await client.response()
        async with asyncio.timeout(20):
            assert b"HTTP/1.1" not in await client.reader.read()


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_may_follow_the_head_of_a_request_to_upgrade(
    servers: list[serving._Server], protocol: str, chunked: bool
) -> None:
    """Some clients ask for HTTP/2 in this way by default.  Only a WebSocket ends the connection."""
    async with listening() as at, connected(at) as client:
        client.send(
            "POST /echo HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\n"
            f"Upgrade: {protocol}\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
            + ("Transfer-Encoding: chunked\r\n\r\n" if chunked else "Content-Length: 1\r\n\r\n")
        )
        await until(lambda: any(each is serving.Awaited.BODY for _, each in servers[0].waiting))
        client.send("1\r\nx\r\n0\r\n\r\n" if chunked else "x")
        head = await client.response()
        assert " 200 " in head
        assert await client.reader.readexactly(1) == b"x"
        assert ("Connection: close" in head) == (protocol == "websocket")
        if protocol == "websocket":
            assert await client.ended()
        else:
            client.send("GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            assert " 200 " in await client.response()


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

        await until(drip, 20, "the connection to be ended")
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
    monkeypatch: pytest.MonkeyPatch, servers: list[serving._Server]
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
        await until(lambda: servers[0].http.requests_count == 1, 20, "the request")
        await until(lambda: not servers[0].connections, 20, "the connection to be ended")
        transport.abort()


@pytest.mark.slow
@pytest.mark.parametrize("newcomer", [True, False])
async def test_a_response_that_is_never_read_does_not_keep_its_connection_open(
    newcomer: bool, monkeypatch: pytest.MonkeyPatch, servers: list[serving._Server]
) -> None:
    """A closed transport stays open until its buffer is sent, which may be never.

    It ends for a new connection, and after a time also without one.
    """
    monkeypatch.setattr(serving, "CLIENT_CONNECTIONS_MAX", 1)
    if not newcomer:
        # Longer than a busy machine takes between two of its requests.
        monkeypatch.setattr(serving, "REQUEST_HEAD_TIMEOUT_S", 2.0)
    unread = socket.socket()
    unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    unread.setblocking(False)
    loop = asyncio.get_running_loop()
    async with listening() as at, AsyncExitStack() as stack:
        stack.callback(unread.close)
        await loop.sock_connect(unread, (at.host, at.port))
        await until(lambda: servers[0].connections, 20, "the connection")
        (hostile,) = servers[0].connections.values()
        sent = 0

        async def get(header: str = "") -> None:
            nonlocal sent
            request = f"GET /medium HTTP/1.1\r\nHost: a\r\n{header}\r\n"
            await loop.sock_sendall(unread, request.encode())
            sent += 1
            await until(
                lambda: (
                    servers[0].http.requests_count == sent
                    and hostile.awaited is serving.Awaited.NEXT_REQUEST
                ),
                20,
                "the response",
            )

        while not hostile.transport.get_write_buffer_size():
            await get()
        await get("Connection: close\r\n")
        await until(hostile.transport.is_closing, 20, "the transport to be closed")
        assert hostile.http in servers[0].connections
        if newcomer:
            await stack.enter_async_context(connected(at))
        await until(lambda: hostile.http not in servers[0].connections, 20, "it to be ended")


async def test_many_connections_of_one_client_do_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "CLIENT_CONNECTIONS_MAX", 5)
    async with listening() as at, connected(at) as user:
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
    sent: list[str], servers: list[serving._Server], monkeypatch: pytest.MonkeyPatch
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
                lambda: len(servers[0].connections) <= serving.CLIENT_CONNECTIONS_MAX,
                20,
                "the bound",
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
    monkeypatch: pytest.MonkeyPatch, servers: list[serving._Server]
) -> None:
    monkeypatch.setattr(serving, "CLIENT_CONNECTIONS_MAX", 6)
    monkeypatch.setattr(serving, "CLOSE_LINGER_S", 3600.0)
    async with listening() as at, AsyncExitStack() as stack:
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


async def test_a_connection_that_cannot_be_served_does_not_end_the_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = [RuntimeError("unexpected"), OSError(24, "Too many open files")]

    class Failing(serving._Server):
        def __call__(self) -> serving._Connection:
            if failures:
                raise failures.pop()
            return super().__call__()

    monkeypatch.setattr(serving, "_Server", Failing)
    monkeypatch.setattr(serving, "ACCEPT_RETRY_S", 0.01)
    async with listening() as at:
        for _ in range(2):
            async with connected(at) as unlucky:
                assert await unlucky.ended()
        async with connected(at) as client:
            client.send("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert "200 OK" in await client.response()


async def test_the_newest_connection_is_closed_when_all_are_busy(
    monkeypatch: pytest.MonkeyPatch, servers: list[serving._Server]
) -> None:
    def busy_connections() -> int:
        return sum(each.awaited is None for each in servers[0].connections.values())

    monkeypatch.setattr(serving, "CLIENT_CONNECTIONS_MAX", 2)
    async with listening() as at, connected(at) as one, connected(at) as two:
        for each in (one, two):
            each.send("GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        await until(lambda: busy_connections() == 2, 20, "both to be at work")
        async with connected(at) as three:
            assert await three.ended()
        assert busy_connections() == 2

"""Our listeners among strangers: nobody holds a connection for ever, or frames an answer."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from outbox.web import health, serving
from outbox.web.address import Address
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HERE = Address("127.0.0.1", 0)
LARGE = b"x" * (64 << 20)


async def _metrics(_: str) -> tuple[bytes, str]:
    return b"", "text/plain"


def application() -> web.Application:
    """The health listener, with a few things that go wrong."""

    async def broken(_: web.Request) -> web.Response:
        raise RuntimeError("the secret reason")

    async def slow(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def large(_: web.Request) -> web.Response:
        return web.Response(body=LARGE)

    made = health.application(lambda: None, _metrics)
    made.router.add_get("/broken", broken)
    made.router.add_get("/slow", slow)
    made.router.add_get("/large", large)
    return made


@asynccontextmanager
async def listening() -> AsyncIterator[Address]:
    async with serving.serving(application(), HERE) as at:
        yield at


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[web.Server]:
    """What is serving, to be asked for its connections."""
    made: list[web.Server] = []

    class Remembered(serving._GuardedServer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(serving, "_GuardedServer", Remembered)
    return made


class Client:
    """A connection by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, text: str) -> None:
        self.writer.write(text.encode())

    async def ended(self) -> bool:
        """Whether the server has ended the connection."""
        try:
            async with asyncio.timeout(20):
                await self.reader.read()
        except ConnectionResetError:
            pass
        return True

    async def answer(self) -> str:
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
async def test_every_answer_has_the_headers_that_keep_it_from_being_framed_or_kept(
    path: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as at, aiohttp.ClientSession() as session:
        async with session.get(at.url + path) as answer:
            assert answer.status == status
            assert serving.HEADERS.items() <= answer.headers.items()
            assert "Set-Cookie" not in answer.headers
            assert "secret reason" not in await answer.text()
        async with session.post(at.url + "healthz", data=b"x") as answer:
            assert answer.status == 405
            assert serving.HEADERS.items() <= answer.headers.items()


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
async def test_what_cannot_be_read_is_refused_and_the_connection_ended(
    request_: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as at, connected(at) as client:
        client.send(request_)
        head = await client.answer()
        assert head.startswith(("HTTP/1.1 400 ", "HTTP/1.0 400 "))
        for name, value in serving.HEADERS.items():
            assert f"{name}: {value}\r\n" in head
        assert await client.ended()


async def test_a_head_that_comes_a_byte_at_a_time_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "HEAD_S", 0.3)
    async with listening() as at, connected(at) as first, connected(at) as second:
        # The one says nothing, and the other something all of the time.
        ended = asyncio.ensure_future(second.ended())
        second.send("GET /healthz HTTP/1.1\r\n")

        async def goes_on() -> bool:
            if not ended.done():
                second.send("X")
            return ended.done()

        await until(goes_on, 20, "the connection to be ended")
        assert await first.ended()


async def test_the_same_holds_for_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "HEAD_S", 0.3)
    async with listening() as at, connected(at) as client:
        for _ in range(2):
            client.send("GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await client.answer()).startswith("HTTP/1.1 200 ")
            assert await client.reader.readexactly(3) == b"ok\n"
        client.send("GET /healthz HTTP/1.1\r\nHos")
        assert await client.ended()


async def test_who_does_not_take_an_answer_is_let_go(
    monkeypatch: pytest.MonkeyPatch, servers: list[web.Server]
) -> None:
    monkeypatch.setattr(serving, "ANSWER_S", 0.3)
    reader = asyncio.StreamReader(limit=1)
    async with listening() as at:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(
            lambda: asyncio.StreamReaderProtocol(reader), at.host, at.port
        )
        transport.pause_reading()
        transport.write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        # It is the server's to notice; here nothing is read before it has.
        await until(lambda: servers[0].requests_count == 1, 20, "the request")
        await until(lambda: not servers[0].connections, 20, "the connection to be ended")
        transport.abort()


async def test_who_opens_many_connections_keeps_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "CONNECTIONS_MAX", 5)
    async with listening() as at, connected(at) as user:
        user.send("GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await user.answer()).startswith("HTTP/1.1 200 ")
        await user.reader.readexactly(3)
        idle = [await asyncio.open_connection(at.host, at.port) for _ in range(8)]
        async with connected(at) as newcomer:
            newcomer.send("GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await newcomer.answer()).startswith("HTTP/1.1 200 ")
        # Those that never asked went first, the oldest of them before the others.
        for reader, _ in idle[:4]:
            assert await Client(reader, idle[0][1]).ended()
        user.send("GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await user.answer()).startswith("HTTP/1.1 200 ")
        for _, writer in idle:
            writer.close()


async def test_where_all_connections_are_at_work_the_newest_goes(
    monkeypatch: pytest.MonkeyPatch, servers: list[web.Server]
) -> None:
    def at_work() -> int:
        return sum(each._request_in_progress for each in servers[0].connections)

    monkeypatch.setattr(serving, "CONNECTIONS_MAX", 2)
    async with listening() as at, connected(at) as one, connected(at) as two:
        for each in (one, two):
            each.send("GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        await until(lambda: at_work() == 2, 20, "both to be at work")
        async with connected(at) as three:
            assert await three.ended()
        assert at_work() == 2

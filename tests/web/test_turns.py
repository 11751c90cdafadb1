"""One piece of work per iteration of the event loop, also if many clients arrive at once."""

from __future__ import annotations

import asyncio
import io
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from outbox.web import serving
from outbox.web.turns import TimeShare, Turns
from tests.support.iterations import Iterations
from tests.support.waiting import until
from tests.web.test_serving import HERE, WHOLE_REQUEST, connected, listening, require_health

if TYPE_CHECKING:
    import socket

COUNT = 20
SMALL_S = 1e-9
"""Shorter than any piece of work."""


async def test_one_turn_is_given_per_iteration_in_the_order_of_asking() -> None:
    turns, given = Turns(asyncio.get_running_loop()), []

    async def wait(n: int) -> None:
        await turns.wait()
        given.append((iterations.count, n))

    async with Iterations() as iterations, asyncio.TaskGroup() as group:
        for n in range(COUNT):
            group.create_task(wait(n))
    assert [n for _, n in given] == list(range(COUNT))
    assert len({at for at, _ in given}) == COUNT


@pytest.mark.parametrize(("share_s", "iterations_count"), [(SMALL_S, COUNT), (60.0, 1)])
async def test_work_is_done_while_an_iteration_has_time(
    share_s: float, iterations_count: int
) -> None:
    share, done = TimeShare(asyncio.get_running_loop(), share_s), []
    async with Iterations() as iterations:
        for n in range(COUNT):
            share.run(lambda n=n: done.append((iterations.count, n)))
        await until(lambda: len(done) == COUNT, 20, "all work to be done")
    assert [n for _, n in done] == list(range(COUNT))
    assert len({at for at, _ in done}) == iterations_count


async def test_work_that_fails_does_not_stop_the_rest() -> None:
    loop, reported, done = asyncio.get_running_loop(), [], []
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    share = TimeShare(loop, SMALL_S)

    def fail() -> None:
        raise RuntimeError("a fault")

    share.run(lambda: None)
    for work in (fail, fail, lambda: done.append(1)):
        share.run(work)
    await until(lambda: bool(done), 20, "the last work to be done")
    assert [str(each) for each in reported] == ["a fault"] * 2


async def test_a_cancelled_task_is_given_no_turn() -> None:
    turns, given = Turns(asyncio.get_running_loop()), []

    async def wait(n: int) -> None:
        await turns.wait()
        given.append(n)

    tasks = [asyncio.ensure_future(wait(n)) for n in range(COUNT)]
    await asyncio.sleep(0)
    for task in tasks[1:-1]:
        task.cancel()
    await asyncio.wait(tasks)
    assert given == [0, COUNT - 1]
    # The next iteration has a turn again.
    await asyncio.wait_for(turns.wait(), 20)


@pytest.mark.system
async def test_what_many_clients_do_at_once_is_done_in_separate_iterations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Deliveries share the loop: they would wait for all of it."""
    accepted: list[int] = []
    begun: list[int] = []
    discarded: list[int] = []
    made, begin = serving._Connection.connection_made, web.UrlDispatcher.resolve
    read = aiohttp.StreamReader.readany

    def connection_made(*arguments: Any) -> None:
        accepted.append(iterations.count)
        made(*arguments)

    async def resolve(*arguments: Any) -> Any:
        begun.append(iterations.count)
        return await begin(*arguments)

    async def readany(*arguments: Any) -> bytes:
        discarded.append(iterations.count)
        return await read(*arguments)

    monkeypatch.setattr(serving._Connection, "connection_made", connection_made)
    monkeypatch.setattr(web.UrlDispatcher, "resolve", resolve)
    monkeypatch.setattr(aiohttp.StreamReader, "readany", readany)
    body = "x" * 100_000
    request = f"POST /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    async with Iterations() as iterations, listening() as at, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(at)) for _ in range(COUNT)]
        for client in clients:
            client.send(request)
        for client in clients:
            assert (await client.response()).startswith("HTTP/1.1 405 ")
        # The rest of the body was read: the connection is used again.
        for client in clients:
            client.send(WHOLE_REQUEST)
            await client.reader.readuntil(b"HTTP/1.1 200 ")
    assert len(set(accepted)) == len(accepted) == COUNT
    assert len(set(begun)) == len(begun) == 2 * COUNT
    assert len(set(discarded)) == len(discarded) >= COUNT


@pytest.mark.system
async def test_data_that_wait_for_a_turn_are_received_in_order() -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = web.Application()
    app.router.add_post("/", echo)

    async def require_echo(n: int) -> None:
        body = b"".join(b"%d %d\n" % (n, line) for line in range(50_000))
        async with session.post(at.url, data=io.BytesIO(body)) as response:
            assert await response.read() == body

    async with (
        serving.serving(app, await serving.listen(HERE)) as at,
        aiohttp.ClientSession() as session,
        asyncio.TaskGroup() as group,
    ):
        for n in range(COUNT):
            group.create_task(require_echo(n))


@pytest.mark.system
async def test_malformed_requests_are_refused_in_separate_iterations(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No handler sees them, but each is logged with its traceback."""
    monkeypatch.setattr(serving, "PARSING_S", SMALL_S)
    refused: list[int] = []
    handle_error = web.RequestHandler.handle_error

    def counted(*arguments: Any) -> web.StreamResponse:
        refused.append(iterations.count)
        return handle_error(*arguments)

    monkeypatch.setattr(web.RequestHandler, "handle_error", counted)
    async with Iterations() as iterations, listening() as at, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(at)) for _ in range(COUNT)]
        for client in clients:
            client.send("NOT HTTP AT ALL\r\n\r\n")
        for client in clients:
            assert " 400 " in await client.response()
    assert len(set(refused)) == len(refused) == COUNT


@pytest.mark.system
async def test_connections_are_accepted_again_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "ACCEPT_RETRY_S", 0.01)
    errors = [ConnectionAbortedError("gone"), OSError(24, "Too many open files")]
    loop = asyncio.get_running_loop()
    accept = type(loop).sock_accept

    async def failing(loop: Any, listener: socket.socket) -> Any:
        if errors:
            raise errors.pop(0)
        return await accept(loop, listener)

    monkeypatch.setattr(type(loop), "sock_accept", failing)
    async with listening() as at:
        await require_health(at)
    assert not errors

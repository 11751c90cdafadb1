"""Every server adapter gives the same responses over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any, get_args
from wsgiref.simple_server import WSGIRequestHandler, make_server

import aiohttp
import pytest
from aiohttp import web

from outbox.core.messages.signature import format_secret
from outbox.core.model.message_format import FormatName
from outbox.errors import UsageError
from outbox.receiver import AsyncReceiver, MemoryDatabase, Receiver
from outbox.receiver.adapters import asgi, wsgi
from outbox.receiver.adapters.aiohttp import handler
from tests.receiver.deliveries import OTHER, SECRET, delivery, signed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from outbox.receiver import Message

TEXT = format_secret(SECRET)
BYTES_MAX = 5000


class Quiet(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextlib.asynccontextmanager
async def serve_with_uvicorn(app: Any) -> AsyncIterator[str]:
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve(sockets=[listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True


async def shop(_: web.Request) -> web.Response:
    return web.Response(text="the shop")


@contextlib.asynccontextmanager
async def serve_with_aiohttp(receiver: Any) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1)
    app.router.add_route("*", "/hooks", handler(receiver))
    app.router.add_get("/", shop)
    runner = web.AppRunner(app)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def serve_with_wsgiref(app: Any) -> AsyncIterator[str]:
    server = make_server("127.0.0.1", 0, app, handler_class=Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        await asyncio.to_thread(server.shutdown)
        await asyncio.to_thread(thread.join)
        server.server_close()


def fastapi(receiver: Any) -> Any:
    from fastapi import FastAPI

    app = FastAPI()
    app.get("/")(lambda: "the shop")
    app.add_middleware(asgi.Middleware, receiver=receiver, path="/hooks")
    return serve_with_uvicorn(app)


def starlette_route(receiver: Any) -> Any:
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    there = Route("/", lambda _: PlainTextResponse("the shop"))
    return serve_with_uvicorn(Starlette(routes=[there, Route("/hooks", asgi.ASGI(receiver))]))


def alone(receiver: Any) -> Any:
    return serve_with_uvicorn(asgi.ASGI(receiver))


def flask(receiver: Any) -> Any:
    from flask import Flask

    app = Flask("shop")
    app.get("/")(lambda: "the shop")
    app.wsgi_app = wsgi.Middleware(app.wsgi_app, receiver, "/hooks")  # type: ignore[method-assign]
    return serve_with_wsgiref(app)


def django(receiver: Any) -> Any:
    import django
    from django.conf import settings
    from django.core.wsgi import get_wsgi_application
    from django.http import HttpResponse
    from django.urls import path

    if not settings.configured:
        settings.configure()
        django.setup()
    settings.ALLOWED_HOSTS = ["127.0.0.1"]
    settings.SECRET_KEY = "x"
    settings.ROOT_URLCONF = (path("", lambda _: HttpResponse("the shop")),)
    return serve_with_wsgiref(wsgi.Middleware(get_wsgi_application(), receiver, "/hooks"))


STACKS = {
    "aiohttp": (AsyncReceiver, serve_with_aiohttp),
    "aiohttp in threads": (Receiver, serve_with_aiohttp),
    "FastAPI": (AsyncReceiver, fastapi),
    "FastAPI in threads": (Receiver, fastapi),
    "Starlette": (AsyncReceiver, starlette_route),
    "ASGI alone": (AsyncReceiver, alone),
    "Flask": (Receiver, flask),
    "Django": (Receiver, django),
}


@pytest.mark.system
@pytest.mark.parametrize("stack", STACKS)
async def test_every_adapter_gives_the_same_responses(stack: str) -> None:
    kind, serve = STACKS[stack]
    receiver: Any = kind(TEXT, MemoryDatabase(), body_bytes_max=BYTES_MAX)
    came: list[int] = []

    @receiver.on("order.paid")
    def paid(message: Message, _: Any) -> None:
        if message.sequence == 9:
            raise LookupError
        came.append(message.sequence)

    async with serve(receiver) as url, aiohttp.ClientSession() as client:

        async def send(
            seq: int, change: Callable[[dict[str, str]], Any] = lambda _: None, **attempt: Any
        ) -> int:
            changes = {k: attempt.pop(k) for k in ("payload",) if k in attempt}
            headers, body = signed(delivery(seq, **changes), **attempt)
            plain = dict(headers)
            change(plain)
            async with client.post(f"{url}/hooks", data=body, headers=plain) as response:
                text = await response.text()
                assert text.endswith("\n")
                assert "\n" not in text[:-1]
                return response.status

        assert await send(1) == 200
        assert await send(1, attempt=2) == 200
        assert await send(2, secret=OTHER) == 401
        assert await send(2, lambda headers: headers.pop("webhook-id")) == 401
        assert await send(2, lambda headers: headers.update({"X-Sequence": "3"})) == 400
        assert await send(2, lambda headers: headers.update({"X-Lane": "über"})) == 400
        assert await send(2, payload=b'"%s"' % (b"x" * BYTES_MAX)) == 413
        assert await send(9) == 500
        assert await send(2) == 200
        for seq, name in enumerate(get_args(FormatName), 3):
            assert await send(seq, format_name=name) == 200, name
        async with client.get(f"{url}/hooks") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
        if stack != "ASGI alone":
            async with client.get(url) as response:
                assert "the shop" in await response.text()

        async def slowly() -> AsyncIterator[bytes]:
            for _ in range(BYTES_MAX // 1000 + 1):
                yield b" " * 1000

        # Without a Content-Length the size is known only after the body has arrived.
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with client.post(f"{url}/hooks", data=slowly()) as response:
                assert response.status in (411, 413)
    assert came == [1, 2, *range(3, 3 + len(get_args(FormatName)))]


async def test_a_failed_start_reports_its_reason() -> None:
    @contextlib.asynccontextmanager
    async def none() -> AsyncIterator[Any]:
        raise OSError("no database")
        yield

    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    await asgi.ASGI(AsyncReceiver(TEXT, none))({"type": "lifespan"}, receive, send)
    assert sent == [{"type": "lifespan.startup.failed", "message": "no database"}]


async def test_a_disconnected_client_gets_no_response() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    await asgi.ASGI(AsyncReceiver(TEXT, MemoryDatabase()))(scope, receive, send)
    assert sent == []


def test_wsgi_refuses_an_async_receiver() -> None:
    with pytest.raises(UsageError, match="use Receiver"):
        wsgi.WSGI(AsyncReceiver(TEXT, MemoryDatabase()))  # type: ignore[arg-type]

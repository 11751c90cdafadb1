"""ASGI adapter: FastAPI, Starlette, Litestar, or a standalone server.

app.add_middleware(Middleware, receiver=receiver, path="/hooks")   FastAPI, Starlette
app = Middleware(app, receiver, "/hooks")                         around any application: Litestar
Route("/hooks", ASGI(receiver))                                   a route of Starlette
uvicorn.run(ASGI(receiver))                                       standalone

`app.mount("/hooks", ASGI(receiver))` receives at `/hooks/` alone: Starlette redirects `/hooks`, and
a relay follows no redirect.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from outbox.receiver.adapters.path import ReceiverPath
from outbox.receiver.asynchronous import AsyncReceiver
from outbox.receiver.requests import Request, Response, not_post, too_large

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
    from typing import TypeAlias

    from outbox.receiver.synchronous import Receiver
    from outbox.receiver.verification import Headers

    Scope: TypeAlias = MutableMapping[str, Any]
    Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class ASGI:
    """ASGI application that receives deliveries at every path."""

    def __init__(self, receiver: AsyncReceiver | Receiver) -> None:
        self._receiver = receiver

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the server's lifespan events."""
        if scope["type"] == "lifespan":
            await _lifespan(self._receiver, receive, send)
        elif scope["type"] == "http":
            # Header names are ASCII; values may be any bytes, which fail verification if wrong.
            headers = [
                (name.decode("latin-1"), value.decode("utf-8", "surrogateescape"))
                for name, value in scope["headers"]
            ]
            with contextlib.suppress(_Disconnected):
                chunks = _chunks(receive)
                await _send(await respond(self._receiver, scope["method"], headers, chunks), send)
        else:
            await send({"type": "websocket.close"})


class Middleware:
    """Middleware that receives deliveries at one path and passes on all other requests.

    Args:
        path: the path, with or without the prefix below which a proxy or a mount has the
            application.  A slash at the end makes no difference, here and in requests.

    Raises:
        UsageError: the path is none.
    """

    def __init__(self, app: App, receiver: AsyncReceiver | Receiver, path: str) -> None:
        self._app = app
        self._receiver_app = ASGI(receiver)
        self._path = ReceiverPath(path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a delivery at the path, or pass the request on."""
        is_delivery = scope["type"] == "http" and self._path.matches(
            scope.get("root_path", ""), scope["path"]
        )
        await (self._receiver_app if is_delivery else self._app)(scope, receive, send)


async def respond(
    receiver: AsyncReceiver | Receiver, method: str, headers: Headers, chunks: AsyncIterator[bytes]
) -> Response:
    """Read and process a request in an event loop; a `Receiver` runs in a worker thread."""
    if method != "POST":
        return not_post()
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > receiver.body_bytes_max:
            return too_large(receiver.body_bytes_max)
    request = Request(method, headers, bytes(body))
    if isinstance(receiver, AsyncReceiver):
        return await receiver.handle(request)
    return await asyncio.to_thread(receiver.handle, request)


class _Disconnected(Exception):
    """The client disconnected before the end of its request."""


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _send(response: Response, send: Send) -> None:
    headers = [(name.lower().encode(), value.encode()) for name, value in response.all_headers]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})


async def _lifespan(receiver: AsyncReceiver | Receiver, receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            try:
                if isinstance(receiver, AsyncReceiver):
                    await receiver.start()
                else:
                    await asyncio.to_thread(receiver.start)
            except Exception as error:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            await send({"type": "lifespan.startup.complete"})
        else:
            await send({"type": "lifespan.shutdown.complete"})
            return

"""ASGI adapter: FastAPI, Starlette, Litestar, or a standalone server.

app.mount("/hooks", ASGI(receiver))                      mounted in an application
app.add_middleware(Middleware, receiver=receiver, path="/hooks")
uvicorn.run(ASGI(receiver))                              standalone
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from outbox.receiver.asynchronous import AsyncReceiver
from outbox.receiver.requests import Request, Response, not_post, too_large

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping
    from typing import TypeAlias

    from outbox.receiver.synchronous import Receiver

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
            response = await _respond(self._receiver, scope, receive)
            if response is not None:
                await _send(response, send)
        else:
            await send({"type": "websocket.close"})


class Middleware:
    """Middleware that receives deliveries at one path and passes on all other requests."""

    def __init__(self, app: App, receiver: AsyncReceiver | Receiver, path: str) -> None:
        self._app = app
        self._receiver_app = ASGI(receiver)
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a delivery at the path, or pass the request on."""
        is_delivery = scope["type"] == "http" and scope["path"] == self._path
        await (self._receiver_app if is_delivery else self._app)(scope, receive, send)


async def handle(receiver: AsyncReceiver | Receiver, request: Request) -> Response:
    """Process a request from an event loop; a `Receiver` runs in a worker thread."""
    if isinstance(receiver, AsyncReceiver):
        return await receiver.handle(request)
    return await asyncio.to_thread(receiver.handle, request)


async def _respond(
    receiver: AsyncReceiver | Receiver, scope: Scope, receive: Receive
) -> Response | None:
    """Read and process a request.  None: the client disconnected before its end."""
    if scope["method"] != "POST":
        return not_post()
    # Header names are ASCII; values may be any bytes, which fail verification if wrong.
    headers = [
        (name.decode("latin-1"), value.decode("utf-8", "surrogateescape"))
        for name, value in scope["headers"]
    ]
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > receiver.body_bytes_max:
            return too_large(receiver.body_bytes_max)
        if not message.get("more_body", False):
            return await handle(receiver, Request("POST", headers, bytes(body)))


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

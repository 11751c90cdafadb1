"""ASGI: FastAPI, Starlette, Litestar, or any server alone.

app.mount("/hooks", ASGI(receiver))                      as a part of an application
app.add_middleware(Middleware, receiver=receiver, path="/hooks")
uvicorn.run(ASGI(receiver))                              alone
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from outbox.receiver.asynchronous import AsyncReceiver
from outbox.receiver.requests import Answer, Request, not_post, too_large

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping
    from typing import TypeAlias

    from outbox.receiver.synchronous import Receiver

    Scope: TypeAlias = MutableMapping[str, Any]
    Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class ASGI:
    """An application that takes deliveries at every path."""

    def __init__(self, receiver: AsyncReceiver | Receiver) -> None:
        self._receiver = receiver

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or take part in the server's beginning and end."""
        if scope["type"] == "lifespan":
            await _lifespan(self._receiver, receive, send)
        elif scope["type"] == "http":
            answer = await _answer(self._receiver, scope, receive)
            if answer is not None:
                await _send(answer, send)
        else:
            await send({"type": "websocket.close"})


class Middleware:
    """An application with deliveries taken at one path, and the rest as it was."""

    def __init__(self, app: App, receiver: AsyncReceiver | Receiver, path: str) -> None:
        self._app = app
        self._deliveries = ASGI(receiver)
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what was sent to the path, and pass on the rest."""
        is_ours = scope["type"] == "http" and scope["path"] == self._path
        await (self._deliveries if is_ours else self._app)(scope, receive, send)


async def handle(receiver: AsyncReceiver | Receiver, request: Request) -> Answer:
    """Process a request on a loop, in a thread if the receiver works in threads."""
    if isinstance(receiver, AsyncReceiver):
        return await receiver.handle(request)
    return await asyncio.to_thread(receiver.handle, request)


async def _answer(
    receiver: AsyncReceiver | Receiver, scope: Scope, receive: Receive
) -> Answer | None:
    """What to answer; None when nobody is there any more to be answered."""
    if scope["method"] != "POST":
        return not_post()
    # Header names are ASCII; values may be anything, and a signature tells.
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


async def _send(answer: Answer, send: Send) -> None:
    headers = [(name.lower().encode(), value.encode()) for name, value in answer.all_headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


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

"""aiohttp: `app.router.add_post("/hooks", handler(receiver))`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from outbox.receiver.adapters.asgi import handle
from outbox.receiver.requests import Answer, Request, not_post, too_large

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from outbox.receiver.asynchronous import AsyncReceiver
    from outbox.receiver.synchronous import Receiver


def handler(
    receiver: AsyncReceiver | Receiver,
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A handler that takes deliveries.

    It reads the body itself, so that the application's `client_max_size` does not matter.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        return _response(await _answer(receiver, request))

    return answer


async def _answer(receiver: AsyncReceiver | Receiver, request: web.Request) -> Answer:
    if request.method != "POST":
        return not_post()
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > receiver.body_bytes_max:
            return too_large(receiver.body_bytes_max)
    # A request's headers may hold one of them twice.
    headers = tuple(request.headers.items())
    return await handle(receiver, Request("POST", headers, bytes(body)))


def _response(answer: Answer) -> web.Response:
    return web.Response(status=answer.status, headers=dict(answer.all_headers), body=answer.body)

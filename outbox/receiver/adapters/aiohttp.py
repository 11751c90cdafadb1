"""aiohttp adapter: `app.router.add_post("/hooks", handler(receiver))`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from outbox.receiver.adapters.asgi import handle
from outbox.receiver.requests import Request, Response, not_post, too_large

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from outbox.receiver.asynchronous import AsyncReceiver
    from outbox.receiver.synchronous import Receiver


def handler(
    receiver: AsyncReceiver | Receiver,
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a request handler for an aiohttp route.

    It reads the body itself, so the application's `client_max_size` does not apply.
    """

    async def handle_request(request: web.Request) -> web.StreamResponse:
        return _response(await _respond(receiver, request))

    return handle_request


async def _respond(receiver: AsyncReceiver | Receiver, request: web.Request) -> Response:
    if request.method != "POST":
        return not_post()
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > receiver.body_bytes_max:
            return too_large(receiver.body_bytes_max)
    # Pairs preserve repeated headers, which verification refuses.
    headers = tuple(request.headers.items())
    return await handle(receiver, Request("POST", headers, bytes(body)))


def _response(response: Response) -> web.Response:
    return web.Response(
        status=response.status, headers=dict(response.all_headers), body=response.body
    )

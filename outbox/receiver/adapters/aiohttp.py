"""aiohttp adapter: `app.router.add_post("/hooks", handler(receiver))`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from outbox.receiver.adapters.asgi import respond

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
        # Pairs preserve repeated headers, which verification refuses.
        headers = tuple(request.headers.items())
        chunks = request.content.iter_any()
        response = await respond(receiver, request.method, headers, aiter(chunks))
        return web.Response(
            status=response.status, headers=dict(response.all_headers), body=response.body
        )

    return handle_request

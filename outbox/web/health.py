"""The health listener: for whoever supervises the process, and for Prometheus.

It has an address of its own, asks nobody who they are, and tells no secrets.  A
receiver that fails is no reason to be unhealthy or not ready: it would have the relay
restarted, or taken out of service, for somebody else's fault.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ACCEPT_CHARS_MAX = 1000
PATHS = """\
/healthz   200 as long as the process answers
/readyz    200 while it reaches its database and follows the cursor, otherwise 503 and why
/metrics   for Prometheus
"""


def application(
    why_not_ready: Callable[[], str | None],
    metrics: Callable[[str], Awaitable[tuple[bytes, str]]],
) -> web.Application:
    """The listener's application.

    Args:
        why_not_ready: in one line; None: it is ready.
        metrics: given the Accept header, the text and its content type.
    """
    # One at a time, also when whoever asked has hung up: who asks meanwhile is told the
    # same, and the deliveries do not wait for many.
    looks: dict[str, asyncio.Task[tuple[bytes, str]]] = {}

    async def look(accept: str) -> tuple[bytes, str]:
        try:
            return await metrics(accept)
        finally:
            del looks[accept]

    async def healthz(_: web.Request) -> web.Response:
        return _text(200, "ok\n")

    async def readyz(_: web.Request) -> web.Response:
        why = why_not_ready()
        return _text(200, "ready\n") if why is None else _text(503, f"not ready: {why}\n")

    async def measured(request: web.Request) -> web.Response:
        accept = request.headers.get("Accept", "")[:ACCEPT_CHARS_MAX]
        while looks and accept not in looks:
            await asyncio.wait(looks.values())
        if accept not in looks:
            looks[accept] = asyncio.ensure_future(look(accept))
        text, content_type = await asyncio.shield(looks[accept])
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def paths(_: web.Request) -> web.Response:
        return _text(200, PATHS)

    made = web.Application(client_max_size=1)
    made.router.add_get("/", paths)
    made.router.add_get("/healthz", healthz)
    made.router.add_get("/readyz", readyz)
    made.router.add_get("/metrics", measured)
    return made


def _text(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text)

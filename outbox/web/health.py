"""Health listener: liveness and readiness probes, and Prometheus metrics.

It has its own address, needs no authentication, and exposes no secrets; on loopback, a web
page that resolves its own name to it gets nothing.  A failing
receiver does not affect health or readiness: restarting the relay, or taking it out
of service, would not repair the receiver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from outbox.web.loopback_hosts import WRONG_HOST, is_loopback, is_loopback_header

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from outbox.web.address import Address

HEALTH_CONNECTIONS_MAX = 64
"""Connections of the listener.  Deliveries wait while the data of all of them are parsed."""
ACCEPT_CHARS_MAX = 1000
PATHS = """\
/healthz   200 while the process responds
/readyz    200 while the relay reaches its database, events can be sequenced and no plug-in of an
           active endpoint is missing, else 503 and why
/metrics   metrics in the Prometheus format
"""


def application(
    address: Address,
    unready_reason: Callable[[], str | None],
    metrics: Callable[[str], Awaitable[tuple[bytes, str]]],
    warning: Callable[[], str | None] = lambda: None,
) -> web.Application:
    """Build the aiohttp application of the health listener.

    Args:
        address: where it listens; on loopback, requests for other hosts get 421.
        unready_reason: returns one line with the reason, or None if the relay is ready.
        metrics: takes the Accept header, returns the body and its content type; it bounds the
            cost of frequent calls.
        warning: returns one line with what needs an operator although the relay is ready, or None.
    """

    async def healthz(_: web.Request) -> web.Response:
        return _text(200, "ok\n")

    async def readyz(_: web.Request) -> web.Response:
        reason = unready_reason()
        if reason is not None:
            return _text(503, f"not ready: {reason}\n")
        return _text(200, f"ready; warning: {found}\n" if (found := warning()) else "ready\n")

    async def serve_metrics(request: web.Request) -> web.Response:
        accept = request.headers.get("Accept", "")[:ACCEPT_CHARS_MAX]
        text, content_type = await metrics(accept)
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def paths(_: web.Request) -> web.Response:
        return _text(200, PATHS)

    guarded = is_loopback(address.host)

    @web.middleware
    async def check_host(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        # Browsers send a Host; probes of HTTP/1.0 may have none.
        host = request.headers.get("Host")
        if guarded and host is not None and not is_loopback_header(host):
            return _text(421, f"{WRONG_HOST}\n")
        return await handler(request)

    app = web.Application(client_max_size=1, middlewares=[check_host])
    app.router.add_get("/", paths)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", serve_metrics)
    return app


def _text(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text)

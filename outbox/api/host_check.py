"""Host header check: protection against DNS rebinding.

A hostile web page can resolve its own name to 127.0.0.1 and send requests to a local
listener as same-origin.  Requests need a token that such a page does not have, so this is
defense in depth.  Only a listener on loopback knows its valid names; other listeners accept
any Host, because a proxy in front of them decides.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any

from aiohttp import web
from yarl import URL

from outbox.api.problem import Problem, ProblemKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from outbox.web.address import Address

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_loopback(host: str) -> bool:
    """Whether a host is loopback."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_middleware(address: Address) -> Any:
    """Create a middleware that rejects foreign Host headers on loopback listeners."""
    guarded = is_loopback(address.host)

    @web.middleware
    async def check_host(request: web.Request, handler: Handler) -> web.StreamResponse:
        if guarded and not _is_loopback_host(request.headers.get("Host", "")):
            raise Problem(
                ProblemKind.WRONG_HOST,
                "this listener is on loopback: use localhost or 127.0.0.1, or configure the proxy "
                "to send Host: localhost",
            )
        return await handler(request)

    return check_host


def _is_loopback_host(host: str) -> bool:
    try:
        name = URL(f"http://{host}").host
    except ValueError:
        return False
    return name is not None and is_loopback(name)

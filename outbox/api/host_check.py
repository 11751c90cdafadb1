"""Which Host headers are taken: a guard against DNS rebinding.

A web page from elsewhere can give its own name the address 127.0.0.1, and then talk to
what listens there as if that were its own server.  Requests here carry a token that
such a page does not have, so this is the second lock.  It costs nothing where the
names of this server are known, which is on loopback; elsewhere it may be reached by
any name, and whoever binds there has more in front of it.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any

from aiohttp import web
from yarl import URL

from outbox.api.problem import Kind, Problem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from outbox.web.address import Address

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine for itself."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def hold_to_host(address: Address) -> Any:
    """A middleware that refuses requests for other hosts than this one."""
    guarded = is_loopback(address.host)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if guarded and not _is_here(request.headers.get("Host", "")):
            raise Problem(
                Kind.WRONG_HOST,
                "this listens on loopback: ask for localhost or 127.0.0.1, or let the proxy in "
                "front of it send Host: localhost",
            )
        return await handler(request)

    return guard


def _is_here(host: str) -> bool:
    try:
        name = URL(f"http://{host}").host
    except ValueError:
        return False
    return name is not None and is_loopback(name)

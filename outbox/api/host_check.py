"""Host header check: protection against DNS rebinding.

A hostile web page can resolve its own name to 127.0.0.1 and send requests to a local
listener as same-origin.  Requests need a token that such a page does not have, so this is
defense in depth.  Only a listener on loopback knows its valid names; other listeners accept
any Host, because a proxy in front of them decides.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Any

from aiohttp import web

from outbox.api.problem import Problem, ProblemKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from outbox.web.address import Address

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# uri-host [":" port] (RFC 9110, section 7.2), without the characters of registered names that
# no host name has.  A URL parser would accept what surrounds a host in a URL, such as user
# information or a path.
_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:]+)\]|(?P<name>[0-9A-Za-z.-]+))(?::[0-9]{1,5})?")


def is_loopback(host: str) -> bool:
    """Whether a host is loopback."""
    if host.lower().removesuffix(".") == "localhost":
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
    found = _HOST.fullmatch(host)
    return found is not None and is_loopback(found["address"] or found["name"])

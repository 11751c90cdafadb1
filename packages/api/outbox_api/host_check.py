"""Host header check of the API; see `outbox.web.loopback_hosts`.

Requests need a token that a hostile page does not have, so this is defense in depth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from outbox.web.loopback_hosts import WRONG_HOST, is_loopback, is_loopback_header
from outbox_api.problem import Problem, ProblemKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from outbox.web.address import Address

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def host_middleware(address: Address) -> Any:
    """Create a middleware that rejects foreign Host headers on loopback listeners."""
    guarded = is_loopback(address.host)

    @web.middleware
    async def check_host(request: web.Request, handler: Handler) -> web.StreamResponse:
        if guarded and not is_loopback_header(request.headers.get("Host", "")):
            raise Problem(ProblemKind.WRONG_HOST, WRONG_HOST)
        return await handler(request)

    return check_host

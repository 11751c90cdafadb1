"""Request runs for transports of tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from outbox.core.model.response import AttemptResult
    from outbox.destinations.interface import Following, Request


async def send_run(
    send: Callable[[Request], Awaitable[AttemptResult]],
    request: Request,
    following: Following | None,
    before_write: Callable[[], object] | None,
) -> AttemptResult:
    """Send a request and those that follow it, as the HTTP client does."""
    assert following is None or request.keep_alive, "a run without connection reuse"
    follows = False
    while True:
        if before_write is not None:
            before_write()
        if follows and following is not None:
            following.sent()
        response = await send(request)
        if following is None or response.failure is not None:
            return response
        after = following.follow(response)
        if after is None:
            return response
        assert after.keep_alive, "a request of a run without connection reuse"
        request, follows = after, True

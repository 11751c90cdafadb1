"""HTTP client for tests of a running receiver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp

from outbox.receiver.verification import pairs_of

if TYPE_CHECKING:
    from outbox.receiver.requests import Request

POST_TIMEOUT_S = 15.0


async def send(url: str, request: Request, *, timeout_s: float = POST_TIMEOUT_S) -> int:
    """Send a request and return the response status.

    Args:
        url: the receiver's URL.
        request: method, headers and body.
        timeout_s: total time-out, in seconds.

    Raises:
        aiohttp.ClientError: connection refused or broken.
        TimeoutError: no response within `timeout_s`.
    """
    pairs = pairs_of(request.headers)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.request(
            request.method, url, data=request.body, headers=pairs, allow_redirects=False
        ) as response,
    ):
        await response.read()
        return response.status

"""Sending a request over HTTP, for tests of whole servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp

from outbox.receiver.verification import pairs_of

if TYPE_CHECKING:
    from outbox.receiver.requests import Request

TIMEOUT_S = 15.0


async def send(url: str, request: Request, *, timeout_s: float = TIMEOUT_S) -> int:
    """Post it, and return the status that came back.

    Raises:
        aiohttp.ClientError: nobody is there, or the connection broke.
        TimeoutError: there was no answer in time.
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

"""Passing deliveries on, as they are, to another receiver."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp

from outbox.core.signature import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, sign

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

TIMEOUT_S = 14.0
"""Less than the relay waits, so that it gets an answer."""
UNREACHABLE = 502
LATE = 504
_NO_ANSWER = {
    UNREACHABLE: "the receiver behind cannot be reached, or answered 502",
    LATE: f"the receiver behind did not answer within {TIMEOUT_S:g} s, or answered 504",
}
HOPS = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding"}
"""Headers of one connection, not of the delivery."""


def behind(status: int) -> str:
    """What a status of `forwarding` that is no 2xx means."""
    return _NO_ANSWER.get(status, f"the receiver behind answered {status}")


@asynccontextmanager
async def forwarding(
    url: str, secret: bytes | None
) -> AsyncIterator[Callable[[Mapping[str, str], bytes], Awaitable[int]]]:
    """A function that passes a delivery on and returns the status of the answer.

    Args:
        secret: deliveries are signed with it anew, because every endpoint of a
            run has a secret of its own; None: they stay signed as they are.
    """
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, auto_decompress=False
    ) as session:

        async def forward(headers: Mapping[str, str], body: bytes) -> int:
            sent = {name: value for name, value in headers.items() if name.lower() not in HOPS}
            if secret is not None:
                now = int(time.time())
                sent[TIMESTAMP_HEADER] = str(now)
                sent[SIGNATURE_HEADER] = sign(secret, sent[ID_HEADER], now, body)
            try:
                async with session.post(
                    url, data=body, headers=sent, allow_redirects=False
                ) as answer:
                    return answer.status
            except TimeoutError:
                return LATE
            except aiohttp.ClientError:
                return UNREACHABLE

        yield forward

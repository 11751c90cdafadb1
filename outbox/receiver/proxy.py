"""Proxy that forwards deliveries unchanged to another receiver."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from outbox.core.messages.batch import accepted_through
from outbox.core.messages.signature import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, sign

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from outbox.receiver.message import Message

UPSTREAM_TIMEOUT_S = 14.0
"""Time-out of the upstream receiver.  It is below the relay's time-out of 15 s, so that the relay
gets a response."""
UNREACHABLE = 502
TIMED_OUT = 504
_NO_RESPONSE = {
    UNREACHABLE: "the upstream receiver cannot be reached, or responded 502",
    TIMED_OUT: f"the upstream receiver did not respond within {UPSTREAM_TIMEOUT_S:g} s, "
    "or responded 504",
}
HOP_HEADERS = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding"}
"""Hop-by-hop headers (RFC 9110, 7.6.1) and those that the client sets itself."""


@dataclass(frozen=True, slots=True)
class ProxiedResponse:
    """The upstream receiver's response to a forwarded request."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx; X-Accepted-Through may still limit it to a part."""
        return 200 <= self.status < 300

    def accepted_count(self, messages: Sequence[Message]) -> int:
        """Count the deliveries of a request that were accepted."""
        first, last = messages[0].sequence, messages[-1].sequence
        through = accepted_through(self.headers, first, last)
        if through is not None:
            return min(through, last - (not self.is_success)) - first + 1
        return len(messages) if self.is_success else 0


def describe_status(status: int) -> str:
    """Describe a status that is not 2xx in words."""
    return _NO_RESPONSE.get(status, f"the upstream receiver responded {status}")


@asynccontextmanager
async def open_proxy(
    url: str, secret: bytes | None
) -> AsyncIterator[Callable[[Mapping[str, str], bytes], Awaitable[ProxiedResponse]]]:
    """Open an HTTP client; yields a function that forwards a request.

    Args:
        url: the upstream receiver's URL.
        secret: signs forwarded deliveries again, because every endpoint of a chaos run
            has its own secret; None keeps the original signature.
    """
    timeout = aiohttp.ClientTimeout(total=UPSTREAM_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, auto_decompress=False
    ) as session:

        async def forward(headers: Mapping[str, str], body: bytes) -> ProxiedResponse:
            sent = {
                name: value for name, value in headers.items() if name.lower() not in HOP_HEADERS
            }
            if secret is not None:
                now = int(time.time())
                sent[TIMESTAMP_HEADER] = str(now)
                sent[SIGNATURE_HEADER] = sign(secret, sent[ID_HEADER], now, body)
            try:
                async with session.post(
                    url, data=body, headers=sent, allow_redirects=False
                ) as response:
                    return ProxiedResponse(response.status, tuple(response.headers.items()))
            except TimeoutError:
                return ProxiedResponse(TIMED_OUT)
            except aiohttp.ClientError:
                return ProxiedResponse(UNREACHABLE)

        yield forward

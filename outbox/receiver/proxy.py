"""Passing deliveries on, as they are, to another receiver."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from outbox.core.delivery.batch import accepted_through
from outbox.core.delivery.signature import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, sign

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from outbox.receiver.message import Message

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


@dataclass(frozen=True, slots=True)
class Passed:
    """What the receiver behind made of a request."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def is_success(self) -> bool:
        """Whether it took what it got, or a part of it."""
        return 200 <= self.status < 300

    def taken(self, messages: Sequence[Message]) -> int:
        """How many deliveries it took of those that it was sent."""
        first, last = messages[0].sequence, messages[-1].sequence
        through = accepted_through(self.headers, first, last)
        if through is not None:
            return min(through, last - (not self.is_success)) - first + 1
        return len(messages) if self.is_success else 0


def behind(status: int) -> str:
    """What a status of `forwarding` that is no 2xx means."""
    return _NO_ANSWER.get(status, f"the receiver behind answered {status}")


@asynccontextmanager
async def forwarding(
    url: str, secret: bytes | None
) -> AsyncIterator[Callable[[Mapping[str, str], bytes], Awaitable[Passed]]]:
    """A function that passes a request on and returns what came back.

    Args:
        secret: deliveries are signed with it anew, because every endpoint of a
            run has a secret of its own; None: they stay signed as they are.
    """
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, auto_decompress=False
    ) as session:

        async def forward(headers: Mapping[str, str], body: bytes) -> Passed:
            sent = {name: value for name, value in headers.items() if name.lower() not in HOPS}
            if secret is not None:
                now = int(time.time())
                sent[TIMESTAMP_HEADER] = str(now)
                sent[SIGNATURE_HEADER] = sign(secret, sent[ID_HEADER], now, body)
            try:
                async with session.post(
                    url, data=body, headers=sent, allow_redirects=False
                ) as answer:
                    return Passed(answer.status, tuple(answer.headers.items()))
            except TimeoutError:
                return Passed(LATE)
            except aiohttp.ClientError:
                return Passed(UNREACHABLE)

        yield forward

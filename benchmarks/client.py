"""A bare client: the same POSTs as the relay's, without the relay.

With aiohttp, or with the relay's own transport. Either at full speed with a fixed concurrency, or
at a fixed rate, with the latency of each request.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import aclosing, asynccontextmanager
from ipaddress import ip_network
from typing import TYPE_CHECKING
from uuid import uuid4

import aiohttp

from benchmarks.receiver import new_event_loop, say
from outbox.core.messages.message import build
from outbox.core.model.delivery import Delivery
from outbox.core.model.headers import format_lines
from outbox.core.model.ids import lane_name
from outbox.destinations.http.transport import HttpTransport
from outbox.destinations.interface import Recipient, Request
from outbox.network.egress import EgressPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from typing import TypeAlias

    Post: TypeAlias = Callable[[], Awaitable[None]]


def sample(payload_bytes: int) -> tuple[dict[str, str], bytes]:
    """Return headers and body as the relay creates them for an event of this benchmark."""
    endpoint_id = uuid4()
    frame = len(b'{"n": 12345, "filler": ""}')
    delivery = Delivery(
        endpoint_id=endpoint_id,
        lane=lane_name(endpoint_id, 1, 17),
        seq=12345,
        batch=7,
        outbox_id=123456,
        event_id=uuid4(),
        type="order.paid",
        tenant=None,
        key="order-12345",
        published_at=time.time(),
        expires_at=None,
        payload=b'{"n": 12345, "filler": "%b"}' % (b"x" * max(payload_bytes - frame, 0)),
        headers=None,
    )
    headers, body = build(
        delivery, previous_seq=12344, attempt=1, timestamp=int(time.time()), keys=[b"s" * 32]
    )
    return dict(headers), body


@asynccontextmanager
async def aiohttp_post(url: str, payload_bytes: int) -> AsyncIterator[Post]:
    """POST with aiohttp, configured like the relay: no connection limit, no cookies."""
    headers, body = sample(payload_bytes)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:

        async def post() -> None:
            async with session.post(url, data=body, headers=headers) as response:
                await response.read()

        yield post


@asynccontextmanager
async def own_post(url: str, payload_bytes: int) -> AsyncIterator[Post]:
    """POST with the relay's own transport."""
    headers, body = sample(payload_bytes)
    request = Request(Recipient(url), format_lines(tuple(headers.items())), body)
    transport = HttpTransport(EgressPolicy((ip_network("127.0.0.0/8"),)))
    async with aclosing(transport):

        async def post() -> None:
            response = await transport.send(request)
            if response.status is None:
                raise RuntimeError(f"{response.failure}: {response.detail}")

        yield post


POSTS = {"aiohttp": aiohttp_post, "outbox": own_post}


class Client:
    """Sends the same body repeatedly."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self._left = 0

    async def flat_out(self, requests: int, concurrency: int) -> None:
        self._left = requests
        await asyncio.gather(*(self._work() for _ in range(concurrency)))

    async def _work(self) -> None:
        while self._left > 0:
            self._left -= 1
            await self.post()

    async def paced(self, requests: int, per_s: float) -> list[float]:
        """Return the latency of each request in seconds."""
        clock = asyncio.get_running_loop().time
        took_s: list[float] = []

        async def one() -> None:
            started = clock()
            await self.post()
            took_s.append(clock() - started)

        await asyncio.gather(*(one() for _ in range(4)))  # Open connections and warm up the code.
        took_s.clear()
        say({"ready": True})
        await asyncio.to_thread(sys.stdin.readline)
        started = clock()
        async with asyncio.TaskGroup() as tasks:
            for n in range(requests):
                await asyncio.sleep(started + n / per_s - clock())
                tasks.create_task(one())
        return took_s


async def run(given: argparse.Namespace) -> None:
    async with POSTS[given.transport](given.url, given.payload_bytes) as post:
        client = Client(post)
        if given.per_s:
            say({"took_s": await client.paced(given.requests, given.per_s)})
        else:
            await client.flat_out(given.requests, given.concurrency)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--per-s", type=float, help="Fixed rate; default: full speed.")
    parser.add_argument("--payload-bytes", type=int, default=200)
    parser.add_argument("--transport", choices=POSTS, default="aiohttp")
    parser.add_argument("--quick-loop", action="store_true", help="Use uvloop, if installed.")
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=new_event_loop if given.quick_loop else None) as runner:
        runner.run(run(given))


if __name__ == "__main__":
    main()

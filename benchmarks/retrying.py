"""A client that retries each delivery individually, like an in-memory job queue.

Deliveries are created evenly over the outage; each is tried immediately, and after a failure again
when its back-off has passed, regardless of the others. At most 64 are in flight, over the relay's
own transport, and the back-off uses the relay's own arithmetic.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
import sys
from dataclasses import replace
from ipaddress import ip_network

from benchmarks.client import sample
from benchmarks.receiver import new_event_loop, say
from outbox.core.model.headers import format_lines
from outbox.core.model.retry_policy import RetryPolicy
from outbox.destinations.http.transport import HttpTransport
from outbox.destinations.interface import Recipient, Request
from outbox.network.egress import EgressPolicy

TICK_S = 0.002
PAYLOAD_BYTES = 200
FACTOR, CAP = 2.0, 12.0
"""The factor of the delay per attempt, and the cap as a multiple of the first delay."""


def policies(base_s: float) -> dict[str, RetryPolicy]:
    """The three retry policies, by name."""
    jitter = RetryPolicy(base_s=base_s, factor=FACTOR, cap_s=CAP * base_s)
    return {
        "fixed interval": replace(jitter, factor=1.0, jitter="none"),
        "plain exponential": replace(jitter, jitter="none"),
        "full jitter": jitter,
    }


class Retrying:
    """The deliveries, and the due time of each."""

    def __init__(self, outbound: HttpTransport, url: str, policy: RetryPolicy) -> None:
        headers, body = sample(PAYLOAD_BYTES)
        self._request = Request(Recipient(url), format_lines(tuple(headers.items())), body)
        self._outbound = outbound
        self._policy = policy
        # The due time and the number of attempts of each delivery.
        self._later: list[tuple[float, int]] = []
        self._due: asyncio.Queue[int] = asyncio.Queue()
        self._left = 0

    async def run(self, events: int, seconds: float, at_a_time: int) -> None:
        """Run until every delivery has succeeded."""
        now = asyncio.get_running_loop().time()
        self._left = events
        self._later = [(now + seconds * n / events, 0) for n in range(events)]
        workers = [asyncio.create_task(self._work()) for _ in range(at_a_time)]
        while self._left:
            self._start_due()
            await asyncio.sleep(TICK_S)
        for worker in workers:
            worker.cancel()

    def _start_due(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._later and self._later[0][0] <= now:
            self._due.put_nowait(heapq.heappop(self._later)[1])

    async def _work(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            attempts = await self._due.get() + 1
            response = await self._outbound.send(self._request)
            if response.status is not None and 200 <= response.status < 300:
                self._left -= 1
                continue
            delay_s = self._policy.delay_s(attempts, random.random())
            heapq.heappush(self._later, (clock() + delay_s, attempts))


async def run(given: argparse.Namespace) -> None:
    outbound = HttpTransport(EgressPolicy([ip_network("127.0.0.0/8")]))
    try:
        retrying = Retrying(outbound, given.url, policies(given.base_s)[given.how])
        say({"ready": True})
        await asyncio.to_thread(sys.stdin.readline)
        await retrying.run(given.events, given.seconds, given.at_a_time)
    finally:
        await outbound.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--how", choices=policies(1.0), required=True)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument(
        "--seconds", type=float, required=True, help="The period in which deliveries are created."
    )
    parser.add_argument("--base-s", type=float, required=True)
    parser.add_argument("--at-a-time", type=int, required=True)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

"""A bare loop of a broker's client library, which appends in the relay's safe form.

Each append names the message before it, and one append of a lane is in flight at a time.  There is
no relay, no database and no log.  Prints messages and CPU microseconds per second.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING
from uuid import uuid4

import nats
import orjson
import redis.asyncio
from redis.asyncio import BlockingConnectionPool

from benchmarks.receiver import new_event_loop, say
from outbox_brokers.redis.script import BODY, SCRIPT
from outbox_brokers.redis.target import parse_url

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any

BODY_BYTES = 430
"""About that of the relay's envelope around the benchmark's payload."""
CONNECTIONS = 4


def headers(lane: str, sequence: int) -> dict[str, str]:
    """The metadata of a message."""
    return {
        "content-type": "application/json",
        "x-delivery": str(uuid4()),
        "x-event": "order.paid",
        "x-event-id": str(uuid4()),
        "x-lane": lane,
        "x-sequence": str(sequence),
        "x-previous-sequence": str(sequence - 1),
    }


async def into_redis(url: str) -> Callable[[str, int, int], Awaitable[None]]:
    """Appends by the relay's script."""
    target, body = parse_url(url), b"x" * BODY_BYTES
    pool = BlockingConnectionPool(
        host=target.host, port=target.port, max_connections=CONNECTIONS, timeout=None
    )
    client = redis.asyncio.Redis(connection_pool=pool)
    digest = await client.script_load(SCRIPT)

    async def call(lane: str, *given: Any) -> Any:
        keys = target.stream_key(lane), target.fence_key(lane)
        # The epoch, the opening, and the owner.
        return await client.evalsha(digest, 2, *keys, 1, 1, f"bare/{lane}", *given)

    async def append(lane: str, after: int, count: int) -> None:
        if after == 0:
            opened = await call(lane, "")
            assert opened[0] == b"OPEN", opened
        given: list[Any] = [after]
        for sequence in range(after + 1, after + count + 1):
            fields = headers(lane, sequence)
            given += (sequence, 2 * len(fields) + 2)
            for pair in fields.items():
                given += pair
            given += (BODY, body)
        response = await call(lane, *given)
        assert response == [b"STORED"], response

    return append


async def into_nats(url: str) -> Callable[[str, int, int], Awaitable[None]]:
    """Single messages, each with the expected sequence of the one before."""
    address, _, subject = url.rpartition("/")
    client = await nats.connect(address)
    body = b"x" * BODY_BYTES
    last: dict[str, str] = {}

    async def append(lane: str, after: int, count: int) -> None:
        for sequence in range(after + 1, after + count + 1):
            expected = {
                "Nats-Expected-Last-Subject-Sequence": last.get(lane, "0"),
                "Nats-Expected-Last-Subject-Sequence-Subject": f"{subject}.{lane}.*",
            }
            response = await client.request(
                f"{subject}.{lane}.m", body, timeout=30, headers=headers(lane, sequence) | expected
            )
            last[lane] = str(_sequence(response.data))

    return append


def _sequence(data: bytes) -> int:
    response = orjson.loads(data)
    assert "error" not in response, response
    return int(response["seq"])


async def run(url: str, messages: int, lanes: int, together: int) -> None:
    """Append to all lanes at the same time, and print the rate."""
    connect = into_nats if url.startswith("nats") else into_redis
    append = await connect(url)
    share = messages // lanes
    began_at, cpu_s = time.perf_counter(), time.process_time()

    async def fill(lane: str) -> None:
        for after in range(0, share, together):
            await append(lane, after, min(together, share - after))

    async with asyncio.TaskGroup() as tasks:
        for number in range(lanes):
            tasks.create_task(fill(f"bare-{number}"))
    elapsed_s, cpu_s = time.perf_counter() - began_at, time.process_time() - cpu_s
    sent = share * lanes
    say({"per_s": sent / elapsed_s, "cpu_us": cpu_s / sent * 1e6})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    for name in ("messages", "lanes", "together"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run(given.url, given.messages, given.lanes, given.together))


if __name__ == "__main__":
    main()

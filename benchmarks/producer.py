"""A producer: transactions with a small domain write and an event.

Either at full speed for some seconds, or at a fixed rate; then it reports when each COMMIT was sent
and how long it took.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from typing import Any

import asyncpg

from benchmarks.receiver import new_event_loop, say

WHAT = ("domain", "event", "event-alone", "notify")
ACCOUNTS = 10_000
FILLER = "x" * 170

# One statement each, so that the client costs little.
DOMAIN_WRITE = "UPDATE account SET balance = balance + 1 WHERE id = $1"
PUBLISH_ALONE = f"""
INSERT INTO relay.outbox (type, key, payload)
VALUES ('order.paid', 'order-' || $1::int,
        jsonb_build_object('n', $1::int, 'filler', '{FILLER}'))
"""
PUBLISH = f"WITH domain AS ({DOMAIN_WRITE}) {PUBLISH_ALONE.replace('$1', '$2')}"
NOTIFY = f"WITH domain AS ({DOMAIN_WRITE}) SELECT pg_notify('bench', $2::int::text)"


class Writer:
    """The transactions of one connection."""

    def __init__(self, connection: asyncpg.Connection[Any]) -> None:
        self._db = connection

    async def transaction(self, n: int, what: str) -> tuple[int, int]:
        """Return when COMMIT was sent and when it completed (monotonic ns)."""
        db = self._db
        account = random.randint(1, ACCOUNTS)
        await db.execute("BEGIN")
        match what:
            case "notify":
                await db.execute(NOTIFY, account, n)
            case "event":
                await db.execute(PUBLISH, account, n)
            case "event-alone":
                await db.execute(PUBLISH_ALONE, n)
            case _:
                await db.execute(DOMAIN_WRITE, account)
        sent_at = time.monotonic_ns()
        await db.execute("COMMIT")
        return sent_at, time.monotonic_ns()


async def flat_out(writers: list[Writer], what: str, seconds: float) -> float:
    """Return the commits per second."""
    done = 0
    started = time.monotonic()

    async def work(writer: Writer) -> None:
        nonlocal done
        while time.monotonic() < started + seconds:
            await writer.transaction(done, what)
            done += 1

    await asyncio.gather(*map(work, writers))
    return done / (time.monotonic() - started)


async def paced(
    writers: list[Writer], what: str, events: int, per_s: float
) -> dict[str, dict[int, int]]:
    """Return by event when COMMIT was sent, and how many nanoseconds it took."""
    clock = asyncio.get_running_loop().time
    free: asyncio.Queue[Writer] = asyncio.Queue()
    for writer in writers:
        free.put_nowait(writer)
    sent_at: dict[int, int] = {}
    took_ns: dict[int, int] = {}

    async def one(n: int) -> None:
        writer = await free.get()
        sent_at[n], committed_at = await writer.transaction(n, what)
        took_ns[n] = committed_at - sent_at[n]
        free.put_nowait(writer)

    started = clock()
    async with asyncio.TaskGroup() as tasks:
        for n in range(events):
            # At random intervals, or the producer would synchronise with the relay's timers.
            await asyncio.sleep(started + (n + random.random()) / per_s - clock())
            tasks.create_task(one(n))
    return {"sent_at": sent_at, "took_ns": took_ns}


async def run(given: argparse.Namespace) -> None:
    connections = [await asyncpg.connect(given.dsn) for _ in range(given.writers)]
    writers = [Writer(connection) for connection in connections]
    if given.per_s:
        for writer in writers:
            await writer.transaction(0, "domain")  # Warm up code and statements.
        say({"ready": True})
        sys.stdin.readline()
        found = await paced(writers, given.what, given.events, given.per_s)
        say({name: {str(n): ns for n, ns in by_n.items()} for name, by_n in found.items()})
    else:
        say({"per_s": await flat_out(writers, given.what, given.seconds)})
    for connection in connections:
        await connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dsn")
    parser.add_argument("--what", choices=WHAT, required=True)
    parser.add_argument("--writers", type=int, required=True)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--per-s", type=float, help="Fixed rate; default: full speed.")
    parser.add_argument("--events", type=int)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

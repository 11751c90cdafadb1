"""A producer for any queue: a domain write and an enqueue statement in one transaction.

Its only argument is JSON: the database, the statement of the queue's own client with its values,
the number of transactions and their rate per second, and how many jobs each enqueues. Where the
values contain the sample's number, each transaction has its own.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from typing import Any

import asyncpg
import orjson

from benchmarks.producer import ACCOUNTS, DOMAIN_WRITE, Writer, paced
from benchmarks.receiver import new_event_loop, say

WRITERS = 8


class Enqueuer(Writer):
    """The transactions of one connection."""

    def __init__(
        self,
        connection: asyncpg.Connection[Any],
        statement: str,
        values: str,
        number: str,
        copies: int,
    ) -> None:
        super().__init__(connection)
        self._copies = copies
        self._statement = statement
        self._values = values
        self._number = number

    async def transaction(self, n: int, _: str) -> tuple[int, int]:
        """Return when COMMIT was sent and when it completed (monotonic ns)."""
        db = self._db
        await db.execute("BEGIN")
        await db.execute(DOMAIN_WRITE, random.randint(1, ACCOUNTS))
        values = orjson.loads(self._values.replace(self._number, str(n)))
        for _copy in range(self._copies):
            await db.execute(self._statement, *values)
        sent_at = time.monotonic_ns()
        await db.execute("COMMIT")
        return sent_at, time.monotonic_ns()


async def run(asked: dict[str, Any]) -> None:
    writers: list[Writer] = []
    values = orjson.dumps(asked["values"]).decode()
    for _ in range(WRITERS):
        connection = await asyncpg.connect(asked["dsn"])
        # JSON has neither bytes nor intervals: they are text and microseconds.
        await connection.set_type_codec(
            "bytea", schema="pg_catalog", encoder=str.encode, decoder=bytes, format="binary"
        )
        await connection.set_type_codec(
            "interval",
            schema="pg_catalog",
            encoder=lambda microseconds: (0, 0, microseconds),
            decoder=tuple,
            format="tuple",
        )
        writers.append(
            Enqueuer(connection, asked["statement"], values, asked["number"], asked["copies"])
        )
    say({"ready": True})
    sys.stdin.readline()
    found = await paced(writers, "", asked["events"], asked["per_s"])
    say({name: {str(n): ns for n, ns in by_n.items()} for name, by_n in found.items()})


def main() -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run(orjson.loads(sys.argv[1])))


if __name__ == "__main__":
    main()

"""A flood of NOTIFY on the relay's channels, by a role that may connect and do nothing else.

The rate is fixed, ten times what the relay listens to, so that the flood takes little of the
machine itself. Half of the notifications have the form of another replica's. The process prints a
line when it has begun, and ends when it is terminated.
"""

from __future__ import annotations

import asyncio
import sys
import time

import asyncpg

from benchmarks.receiver import say
from outbox.relay.cluster.listener import FLOOD_PER_S
from outbox.store.channels import OWNERS_SUFFIX
from tests.support.postgres import SCHEMA

PER_S = 10 * FLOOD_PER_S
EVERY_S = 0.05
FLOOD = f"""
SELECT count(pg_notify(channel, '1-2 3:' || n))
  FROM generate_series($1::bigint, $2::bigint - 1) n,
       (VALUES ('{SCHEMA}'), ('{SCHEMA}{OWNERS_SUFFIX}')) c(channel)
"""


async def run(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    sent, began_at = 0, time.monotonic()
    while True:
        due = int((time.monotonic() - began_at + EVERY_S) * PER_S / 2)
        await connection.execute(FLOOD, sent, due)
        if not sent:
            say({"began": True})
        sent = due
        await asyncio.sleep(EVERY_S)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))

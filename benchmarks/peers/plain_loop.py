"""A hand-written loop: select the oldest unsent event, POST it, mark it, and repeat."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg

from benchmarks.peers.asked import posting

if TYPE_CHECKING:
    from benchmarks.peers.asked import Asked

TABLE = """
CREATE TABLE queue (id bigserial PRIMARY KEY, body text NOT NULL, sent_at timestamptz);
CREATE INDEX ON queue (id) WHERE sent_at IS NULL
"""
BACKLOG = "INSERT INTO queue (body) SELECT $1 FROM generate_series(1, $2::int)"
ENQUEUE = "INSERT INTO queue (body) VALUES ($1)"
OLDEST = "SELECT id, body FROM queue WHERE sent_at IS NULL ORDER BY id LIMIT 1"
MARK = "UPDATE queue SET sent_at = now() WHERE id = $1"


async def work(asked: Asked) -> None:
    connection = await asyncpg.connect(asked.dsn)
    await connection.execute(TABLE)
    await connection.execute(BACKLOG, asked.body, asked.jobs)
    oldest = await connection.prepare(OLDEST)
    await asked.ready(ENQUEUE, [asked.body])
    async with posting(asked.url, connections=1) as post:
        while True:
            row = await oldest.fetchrow()
            if row is None:
                await asyncio.sleep(asked.mode["poll_s"])
                continue
            await post(row["body"].encode())
            await connection.execute(MARK, row["id"])

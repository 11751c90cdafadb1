"""The least that a durable row for each delivery costs: no order, no signature, no retry.

It reads pages of jobs by id, POSTs 64 at a time, and inserts one row for each delivery in groups
of 20 ms. A job whose id became visible late would be lost, so nobody could use it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg

from benchmarks.peers.asked import posting

if TYPE_CHECKING:
    from benchmarks.peers.asked import Asked

TABLES = """
CREATE TABLE queue (id bigserial PRIMARY KEY, body text NOT NULL);
CREATE TABLE delivered (id bigint PRIMARY KEY)
"""
BACKLOG = "INSERT INTO queue (body) SELECT $1 FROM generate_series(1, $2::int)"
ENQUEUE = "INSERT INTO queue (body) VALUES ($1)"
PAGE_ROWS = 1000
PAGE = f"SELECT id, body FROM queue WHERE id > $1 ORDER BY id LIMIT {PAGE_ROWS}"
WRITE = "INSERT INTO delivered SELECT unnest($1::bigint[])"
GROUP_S = 0.02


async def work(asked: Asked) -> None:
    reading = await asyncpg.connect(asked.dsn)
    writing = await asyncpg.connect(asked.dsn)
    await reading.execute(TABLES)
    await reading.execute(BACKLOG, asked.body, asked.jobs)
    page = await reading.prepare(PAGE)
    await asked.ready(ENQUEUE, [asked.body])
    connections = asked.mode["connections"]
    jobs: asyncio.Queue[tuple[int, str]] = asyncio.Queue(PAGE_ROWS)
    delivered: list[int] = []

    async def read() -> None:
        last = 0
        while True:
            for job in await page.fetch(last):
                last = job["id"]
                await jobs.put((last, job["body"]))
            if jobs.empty():
                await asyncio.sleep(asked.mode["poll_s"])

    async def write() -> None:
        while True:
            await asyncio.sleep(GROUP_S)
            if delivered:
                group = delivered.copy()
                delivered.clear()
                await writing.execute(WRITE, group)

    async with posting(asked.url, connections) as post, asyncio.TaskGroup() as tasks:

        async def deliver() -> None:
            while True:
                number, body = await jobs.get()
                await post(body.encode())
                delivered.append(number)

        tasks.create_task(read())
        tasks.create_task(write())
        for _ in range(connections):
            tasks.create_task(deliver())

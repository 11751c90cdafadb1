"""PgQueuer: managers that each take a batch by SKIP LOCKED, and a task for every job."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.queries import Queries

from benchmarks.peers.asked import Asked, posting

if TYPE_CHECKING:
    from pgqueuer.models import Job

NAME = "deliver"
AT_ONCE = 2000  # Jobs for each statement that puts the backlog in.


async def work(asked: Asked) -> None:
    # As the documentation has it: a connection for each manager, a pool for producers.
    pool = await asyncpg.create_pool(asked.dsn, min_size=1)
    queries = Queries(AsyncpgPoolDriver(pool))
    await queries.install()
    await queries.optimize_autovacuum()
    body = asked.body.encode()
    for put in range(0, asked.jobs, AT_ONCE):
        jobs = min(AT_ONCE, asked.jobs - put)
        await queries.enqueue([NAME] * jobs, [body] * jobs, [0] * jobs)
    # What `Queries.enqueue` sends for one: priority, name, payload, delay in microseconds, no
    # key that keeps a second one away, and headers as JSON.
    values = [[0], [NAME], [asked.body], [0], [None], ["null"]]
    await asked.ready(queries.qbq.build_enqueue_query(), values)
    connections = asked.mode["connections"]
    async with posting(asked.url, connections) as post, asyncio.TaskGroup() as tasks:

        async def deliver(job: Job) -> None:
            await post(job.payload)

        for _ in range(asked.mode["managers"]):
            manager = PgQueuer(AsyncpgDriver(await asyncpg.connect(asked.dsn)))
            manager.entrypoint(NAME)(deliver)
            tasks.create_task(manager.run(batch_size=asked.mode["batch_size"]))

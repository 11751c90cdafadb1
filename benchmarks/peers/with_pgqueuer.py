"""PgQueuer: managers that each fetch a batch by SKIP LOCKED, and one task per job."""

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
AT_ONCE = 2000  # Jobs per statement that writes the backlog.


async def work(asked: Asked) -> None:
    # As in its documentation: a connection per manager, and a pool for producers.
    pool = await asyncpg.create_pool(asked.dsn, min_size=1)
    queries = Queries(AsyncpgPoolDriver(pool))
    await queries.install()
    await queries.optimize_autovacuum()
    body = asked.body.encode()
    for put in range(0, asked.jobs, AT_ONCE):
        jobs = min(AT_ONCE, asked.jobs - put)
        await queries.enqueue([NAME] * jobs, [body] * jobs, [0] * jobs)
    # The statement of `Queries.enqueue` for one job: priority, name, payload, delay in
    # microseconds, no deduplication key, and headers as JSON.
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

"""procrastinate: one worker with concurrent jobs, each fetched and finished individually."""

from __future__ import annotations

from procrastinate import App, PsycopgConnector

from benchmarks.peers.asked import Asked, posting

NAME = "deliver"
AT_ONCE = 1000  # Jobs per statement that writes the backlog.
# The statement of the client itself.
ENQUEUE = f"""
SELECT procrastinate_defer_jobs_v1(ARRAY[
    ROW('default', '{NAME}', 0, NULL, NULL, jsonb_build_object('body', $1::text), NULL)
    ::procrastinate_job_to_defer_v1])
"""


async def work(asked: Asked) -> None:
    concurrency, pooled = asked.mode["concurrency"], asked.mode["pooled"]
    app = App(connector=PsycopgConnector(conninfo=asked.dsn, min_size=pooled, max_size=pooled))
    async with app.open_async(), posting(asked.url, concurrency) as post:

        async def deliver(body: str) -> None:
            await post(body.encode())

        task = app.task(name=NAME)(deliver)
        await app.schema_manager.apply_schema_async()
        for put in range(0, asked.jobs, AT_ONCE):
            jobs = min(AT_ONCE, asked.jobs - put)
            await task.batch_defer_async(*({"body": asked.body} for _ in range(jobs)))
        await asked.ready(ENQUEUE, [asked.body])
        await app.run_worker_async(
            concurrency=concurrency,
            delete_jobs=asked.mode["delete_jobs"],
            install_signal_handlers=False,
        )

"""Following a replay job to its end."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import warn
from outbox.cli.output import count, emit_json
from outbox.operations import replay_jobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncpg import Connection

    from outbox.operations.replay_jobs import Job

LOOK_S = 0.5

wait_option = click.option(
    "--wait/--detach",
    default=None,
    help="Stay until it has ended, or not; default: stay in a terminal.",
)
rate_option = click.option(
    "--rate",
    "rate_per_s",
    metavar="N",
    type=click.FloatRange(0, 1e6, min_open=True),
    help="At most so many deliveries per second.",
)


async def follow(
    connection: Connection[Any], schema: str, job_id: int, *, wait: bool | None, as_json: bool
) -> Job | None:
    """Stay with a job until it has ended; None: nobody is to wait for it.

    Ctrl-C leaves it to the relay, and says how to abort it.
    """
    terminal = sys.stdout is not None and sys.stdout.isatty() and not as_json
    if wait is False or (wait is None and not terminal):
        return None
    if wait is None and not await replay_jobs.any_relay(connection):
        warn("no relay is alive: it begins when one is")
        return None
    try:
        if terminal:
            return await _with_a_bar(connection, schema, job_id)
        return await _ended(connection, schema, job_id, lambda _: None)
    except asyncio.CancelledError:
        warn(f"replay job {job_id} goes on; to abort it: outbox replay abort {job_id}")
        raise


async def _ended(
    connection: Connection[Any], schema: str, job_id: int, show: Callable[[Job], None]
) -> Job:
    while True:
        job = await replay_jobs.get(connection, schema, job_id)
        show(job)
        if job.state != "running":
            return job
        await asyncio.sleep(LOOK_S)


async def _with_a_bar(connection: Connection[Any], schema: str, job_id: int) -> Job:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[taken]} deliveries"),
    )
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(f"replay job {job_id}", total=1.0, taken=0)

        def show(job: Job) -> None:
            bar.update(task, completed=job.share, taken=job.taken)

        return await _ended(connection, schema, job_id, show)


def tell(job: Job, *, as_json: bool) -> None:
    """How a job ended; exit 1 if that was before its time."""
    if as_json:
        emit_json(job)
    else:
        click.echo(f"replay job {job.id} is {job.state}: {count(job.taken, 'delivery')}")
        if text := stopped(job):
            click.echo(f"it ended early at {text}")
    if job.state == "aborted" or job.stopped:
        raise click.exceptions.Exit(1)


_STOPPED = {
    "disabled": "disabled meanwhile",
    "removed": "removed meanwhile",
    "unsubscribed": "to be removed",
}


def stopped(job: Job) -> str:
    """Where it ended before its time, in words."""
    return ", ".join(f"{count(n, 'endpoint')} {_STOPPED[why]}" for why, n in job.stopped.items())

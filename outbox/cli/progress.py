"""Options and progress display of replay jobs."""

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

    from outbox.operations.replay_jobs import ReplayJob

POLL_INTERVAL_S = 0.5

wait_option = click.option(
    "--wait/--detach",
    default=None,
    help="Wait until the replay has ended; default: wait on a terminal.",
)
rate_option = click.option(
    "--rate",
    "rate_per_s",
    metavar="N",
    type=click.FloatRange(0, 1e6, min_open=True),
    help="Maximum deliveries per second.",
)


async def follow(
    connection: Connection[Any], schema: str, job_id: int, *, wait: bool | None, as_json: bool
) -> ReplayJob | None:
    """Wait until a job has ended, and return it; None if the command does not wait.

    Ctrl-C stops waiting, not the job, and prints the command that aborts it.
    """
    terminal = sys.stdout is not None and sys.stdout.isatty() and not as_json
    if wait is False or (wait is None and not terminal):
        return None
    if wait is None and not await replay_jobs.has_live_relay(connection):
        warn("no relay is running: the replay starts when one does")
        return None
    try:
        if terminal:
            return await _with_a_bar(connection, schema, job_id)
        return await _ended(connection, schema, job_id, lambda _: None)
    except asyncio.CancelledError:
        warn(f"replay job {job_id} continues; to abort it: outbox replay abort {job_id}")
        raise


async def _ended(
    connection: Connection[Any], schema: str, job_id: int, show: Callable[[ReplayJob], None]
) -> ReplayJob:
    while True:
        job = await replay_jobs.get_job(connection, schema, job_id)
        show(job)
        if job.state != "running":
            return job
        await asyncio.sleep(POLL_INTERVAL_S)


async def _with_a_bar(connection: Connection[Any], schema: str, job_id: int) -> ReplayJob:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[taken]} deliveries"),
    )
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(f"replay job {job_id}", total=1.0, taken=0)

        def show(job: ReplayJob) -> None:
            bar.update(task, completed=job.share, taken=job.taken)

        return await _ended(connection, schema, job_id, show)


def print_result(job: ReplayJob, *, as_json: bool) -> None:
    """Print the result of a job; exit with 1 if it was aborted or incomplete."""
    if as_json:
        emit_json(job)
    else:
        click.echo(f"replay job {job.id} is {job.state}: {count(job.taken, 'delivery')}")
        if text := describe_stopped(job):
            click.echo(f"incomplete: {text}")
    if job.state == "aborted" or job.stopped:
        raise click.exceptions.Exit(1)


_STOPPED = {
    "disabled": "disabled during the replay",
    "removed": "removed during the replay",
    "unsubscribed": "being removed",
}


def describe_stopped(job: ReplayJob) -> str:
    """The endpoints where the replay ended early, and why."""
    return ", ".join(
        f"{count(n, 'endpoint')} {_STOPPED[reason]}" for reason, n in job.stopped.items()
    )

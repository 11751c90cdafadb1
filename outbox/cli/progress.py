"""Progress bars and confirmations on a terminal; running a replay and following its job."""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import click

from outbox.cli.common import run_connected, warn
from outbox.cli.output import echo, emit_json
from outbox.core.model.text import count, safe
from outbox.errors import UsageError
from outbox.operations.replays import jobs as replay_jobs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.operations.replays.jobs import ReplayJob

T = TypeVar("T")

PROGRESS_POLL_S = 0.5

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


def require_terminal(otherwise: str) -> None:
    """Require that a question can be asked.

    Raises:
        UsageError: stdin or stderr is no terminal; the message is `otherwise`.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(otherwise)


def confirm(question: str, refused: str = "nothing was changed") -> None:
    """Ask a question on stderr.

    Raises:
        UsageError: it was declined; the message is `refused`.
    """
    if not click.confirm(safe(question), err=True):
        raise UsageError(refused)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if it is a terminal; yields its update, from done and total."""
    if not sys.stderr.isatty():
        yield lambda _, __: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, total=total, completed=done)


def run_replay(
    settings: Settings,
    start: Callable[[Connection[Any]], Awaitable[tuple[T, int | None]]],
    show: Callable[[T], None],
    *,
    wait: bool | None,
    as_json: bool,
) -> None:
    """Start a replay, wait for its job if wanted, and print the result.

    Args:
        start: returns its report, and the id of the job; None: there is none.
        show: prints the report; with `as_json` it is printed unless the command waits.
        wait: whether to wait until it has ended; None: if stdout is a terminal.
    """

    async def start_and_follow(connection: Connection[Any]) -> tuple[T, ReplayJob | None]:
        report, job_id = await start(connection)
        if not as_json:
            show(report)
        if job_id is None:
            return report, None
        schema = settings.schema_name
        return report, await _follow(connection, schema, job_id, wait=wait, as_json=as_json)

    report, job = run_connected(settings, start_and_follow)
    if job is not None:
        _print_result(job, as_json=as_json)
    elif as_json:
        emit_json(report)


async def _follow(
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
        with _job_bar(job_id) if terminal else nullcontext(lambda _: None) as show:
            while True:
                job = await replay_jobs.get_job(connection, schema, job_id)
                show(job)
                if job.state != "running":
                    return job
                await asyncio.sleep(PROGRESS_POLL_S)
    except asyncio.CancelledError:
        warn(f"replay job {job_id} continues; to abort it: outbox replay abort {job_id}")
        raise


@contextmanager
def _job_bar(job_id: int) -> Iterator[Callable[[ReplayJob], None]]:
    """Show a progress bar; yields the function that updates it."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[taken]} deliveries"),
    )
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(f"replay job {job_id}", total=1.0, taken=0)
        yield lambda job: bar.update(task, completed=job.share, taken=job.taken)


def _print_result(job: ReplayJob, *, as_json: bool) -> None:
    """Print the result of a job; exit with 1 if it was aborted or incomplete."""
    if as_json:
        emit_json(job)
    else:
        echo(f"replay job {job.id} is {job.state}: {count(job.taken, 'delivery')}")
        if text := describe_stopped(job):
            echo(f"incomplete: {text}")
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

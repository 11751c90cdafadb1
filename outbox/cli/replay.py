"""`outbox replay`: send history again; and list, show, abort what is being replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli import moments, progress
from outbox.cli.common import (
    actor,
    database,
    json_option,
    limit_option,
    run_async,
    settings_options,
    tell_more,
)
from outbox.cli.main import Group
from outbox.cli.output import count, emit_json, emit_pairs, emit_table
from outbox.operations import backfill, dead_letter_filter, replay_jobs
from outbox.operations.backfill import Backfill
from outbox.operations.views.replays import planned

if TYPE_CHECKING:
    from outbox.cli.moments import When
    from outbox.config import Settings
    from outbox.operations.replay_jobs import Job

ID_MAX = 2**63 - 1

job_argument = click.argument("job_id", metavar="JOB", type=click.IntRange(1, ID_MAX))


@click.group(
    "replay",
    cls=Group,
    invoke_without_command=True,
    epilog="""\b
Examples:
  outbox replay --endpoint billing --since 2h --dry-run
  outbox replay --endpoint billing --since 2026-01-31T12:00Z --type "order.*" --rate 50
  outbox replay list
  outbox replay abort 7

Dead letters are sent again by: outbox dead replay
""",
)
@click.option("--endpoint", metavar="NAME", help="To this endpoint.")
@moments.options("published")
@click.option(
    "--type",
    "types",
    metavar="PATTERN",
    multiple=True,
    help="Only those of its types that match this, too; may be given several times.",
)
@progress.rate_option
@click.option("--dry-run", is_flag=True, help="Only say how many there are.")
@progress.wait_option
@json_option
@settings_options
@click.pass_context
def command(
    ctx: click.Context,
    settings: Settings,
    endpoint: str | None,
    since: When | None,
    until: When | None,
    types: tuple[str, ...],
    rate_per_s: float | None,
    dry_run: bool,
    wait: bool | None,
    as_json: bool,
) -> None:
    """Send an endpoint its history: what it should have got, from some time on.

    In the order in which it was published, at the end of the endpoint's lanes, by
    the subscription that it has now, and no faster than live events allow. Every
    delivery has a number and an X-Delivery of its own, and says "backfill" in its
    body: receivers take it as new. What is not published yet comes live.
    """
    if ctx.invoked_subcommand is not None:
        return
    if endpoint is None or since is None:
        raise click.UsageError("say --endpoint NAME and --since TIME, or list, show or abort", ctx)

    async def go() -> None:
        schema = settings.schema_name
        async with database(settings) as connection:
            now = await dead_letter_filter.now(connection)
            first = moments.moment(since, now)
            assert first is not None
            asked = Backfill(endpoint, first, moments.moment(until, now), types)
            if dry_run:
                deliveries = await backfill.plan(connection, schema, asked)
                _tell_plan(asked, deliveries, as_json)
                return
            job_id = await backfill.ask(
                connection, schema, asked, actor=actor(), rate_per_s=rate_per_s
            )
            if not as_json:
                click.echo(f"replay job {job_id} began; see: outbox replay show {job_id}")
            job = await progress.follow(connection, schema, job_id, wait=wait, as_json=as_json)
            if job is not None:
                progress.tell(job, as_json=as_json)
            elif as_json:
                emit_json({"job": job_id})

    run_async(go())


def _tell_plan(asked: Backfill, deliveries: int, as_json: bool) -> None:
    if as_json:
        emit_json(planned(asked, deliveries))
    else:
        click.echo(f"would make {count(deliveries, 'delivery')}; nothing was done")


@command.command(
    "list",
    epilog="""\b
Examples:
  outbox replay list
  outbox replay list --state all --json
""",
)
@click.option(
    "--state",
    type=click.Choice([*replay_jobs.STATES, "all"]),
    default="running",
    show_default=True,
    help="Only in this state.",
)
@limit_option
@click.option("--after", type=click.IntRange(0, ID_MAX), default=0, help="Only jobs above this.")
@json_option
@settings_options
def list_(settings: Settings, state: str, limit: int, after: int, as_json: bool) -> None:
    """List replay jobs, oldest first: of dead letters, of history, and of lanes."""
    states = (
        replay_jobs.STATES if state == "all" else tuple(s for s in replay_jobs.STATES if s == state)
    )

    async def go() -> None:
        async with database(settings) as connection:
            rows = await replay_jobs.page(
                connection, settings.schema_name, states=states, limit=limit + 1, after=after
            )
        rows, more = rows[:limit], len(rows) > limit
        if more:
            tell_more(rows[-1].id)
        if as_json:
            emit_json(rows)
            return
        emit_table(
            ["job", "kind", "state", "selection", "deliveries", "done", "asked at", "by"],
            [
                [j.id, j.kind, j.state, _selection(j), j.taken, _share(j), j.asked_at, j.asked_by]
                for j in rows
            ],
            "no replay jobs",
        )

    run_async(go())


@command.command(
    epilog="""\b
Example:
  outbox replay show 7 --json
"""
)
@job_argument
@json_option
@settings_options
def show(settings: Settings, job_id: int, as_json: bool) -> None:
    """Show how far a replay job is."""

    async def go() -> Job:
        async with database(settings) as connection:
            return await replay_jobs.get(connection, settings.schema_name, job_id)

    job = run_async(go())
    if as_json:
        emit_json(job)
    else:
        emit_pairs(_pairs(job))


@command.command(
    epilog="""\b
Example:
  outbox replay abort 7
"""
)
@job_argument
@json_option
@settings_options
def abort(settings: Settings, job_id: int, as_json: bool) -> None:
    """Take nothing more of a replay job.

    What is in lanes already, which is little, is delivered. Dead letters that were
    not taken stay dead letters.
    """

    async def go() -> Job:
        async with database(settings) as connection:
            return await replay_jobs.abort(connection, settings.schema_name, job_id, actor=actor())

    job = run_async(go())
    if as_json:
        emit_json(job)
    else:
        click.echo(f"aborted replay job {job.id} after {count(job.taken, 'delivery')}")


_COUNTED = {
    "dead": "numbers of dead letters",
    "history": "ids of events",
    "lane": "numbers of the lane",
}


def _selection(job: Job) -> str:
    """What was asked for, in the words of the command line if it was asked for there."""
    if job.kind == "lane":
        return f"numbers {job.from_sequence} to {job.to_sequence} of lane {job.lane}"
    said: list[tuple[str, Any]] = [
        ("endpoint", job.endpoint),
        *(("type", each) for each in job.types or ()),
        ("tenant", job.tenant),
        ("reason", job.reason),
        ("since", job.since and f"{job.since.astimezone():%Y-%m-%dT%H:%M:%S%z}"),
        ("until", job.until and f"{job.until.astimezone():%Y-%m-%dT%H:%M:%S%z}"),
    ]
    return " ".join(f"--{name} {value}" for name, value in said if value)


def _share(job: Job) -> str:
    return f"{100 * job.share:.0f}%"


def _pairs(job: Job) -> list[tuple[str, Any]]:
    what = _COUNTED[job.kind]
    pairs: list[tuple[str, Any]] = [
        ("job", job.id),
        ("kind", job.kind),
        ("state", job.state),
        ("selection", _selection(job) or None),
        ("rate", None if job.rate_per_s is None else f"{job.rate_per_s:g}/s"),
        ("asked", job.asked_at),
        ("by", job.asked_by),
        ("ended", job.ended_at),
        ("endpoints", f"{job.endpoints}, {job.open} not done"),
        ("deliveries", job.taken),
        ("done", f"{_share(job)}: {job.done} of {job.all} {what}"),
    ]
    if job.erased:
        pairs.append(("left alone", f"{job.erased} erased"))
    if text := progress.stopped(job):
        pairs.append(("ended early", text))
    return pairs

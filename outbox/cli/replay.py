"""`outbox replay`: replay past events (backfill); list, show and abort replay jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli import progress
from outbox.cli.common import (
    actor,
    before_id_option,
    json_option,
    limit_option,
    note_next_page,
    print_result,
    run_connected,
    run_operation,
    settings_options,
)
from outbox.cli.filter_options import time_options
from outbox.cli.group import Group
from outbox.cli.output import echo, emit_json, emit_pairs, emit_table
from outbox.core.model.text import count
from outbox.operations.criteria import Criteria
from outbox.operations.replays import backfill
from outbox.operations.replays import jobs as replay_jobs
from outbox.operations.replays.chosen import find_chosen
from outbox.operations.rows import ID_MAX

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.operations.criteria import When
    from outbox.operations.replays.backfill import BackfillPlan
    from outbox.operations.replays.jobs import ReplayJob

job_argument = click.argument("job_id", metavar="JOB", type=click.IntRange(1, ID_MAX))


_COUNTED = {"dead": "dead-lettered deliveries", "history": "event ids"}


def _flags(job: ReplayJob) -> str:
    """The selection of a job, as flags of the command line."""
    flags: list[tuple[str, Any]] = [
        ("endpoint", job.endpoint),
        *(("type", each) for each in job.types or ()),
        ("tenant", job.tenant),
        ("reason", job.reason),
        ("since", job.since and f"{job.since.astimezone():%Y-%m-%dT%H:%M:%S%z}"),
        ("until", job.until and f"{job.until.astimezone():%Y-%m-%dT%H:%M:%S%z}"),
    ]
    text = " ".join(f"--{name} {value}" for name, value in flags if value)
    return text if job.events is None else f"{text}, {count(job.events, 'chosen event')}"


def _state(job: ReplayJob) -> str:
    """Its state; "delivering" if all its deliveries are in their lanes, and some are pending."""
    queued = job.state == "running" and 0 < job.all <= job.done
    return "delivering" if queued else job.state


def _share(job: ReplayJob) -> str:
    return f"{100 * job.share:.0f}%"


def _show_list(rows: list[ReplayJob]) -> None:
    state = click.get_current_context().params["state"]
    emit_table(
        ["job", "kind", "state", "selection", "deliveries", "done", "requested at", "by"],
        [
            (j.id, j.kind, _state(j), _flags(j), j.taken, _share(j), j.requested_at, j.requested_by)
            for j in rows
        ],
        "no replay jobs" if state == "all" else f"no {state} replay jobs",
    )


def _show_started(job: ReplayJob) -> None:
    echo(f"replay job {job.id} started; see: outbox replay show {job.id}")


def _show_aborted(job: ReplayJob) -> None:
    echo(f"aborted replay job {job.id} after {count(job.taken, 'delivery')}")


def _show(job: ReplayJob) -> None:
    what = _COUNTED[job.kind]
    pairs: list[tuple[str, Any]] = [
        ("job", job.id),
        ("kind", job.kind),
        ("state", _state(job)),
        ("selection", _flags(job) or None),
        ("rate", None if job.rate_per_s is None else f"{job.rate_per_s:g}/s"),
        ("requested", job.requested_at),
        ("by", job.requested_by),
        ("ended", job.ended_at),
        ("endpoints", f"{job.endpoints}, {job.open} in progress"),
        ("deliveries", job.taken),
        ("done", f"{_share(job)}: {job.done} of {job.all} {what}"),
    ]
    if job.erased:
        pairs.append(("skipped", f"{job.erased} erased"))
    if text := progress.describe_stopped(job):
        pairs.append(("ended early", text))
    emit_pairs(pairs)


@click.group(
    "replay",
    cls=Group,
    invoke_without_command=True,
    epilog="""\b
Examples:
  outbox replay --endpoint billing --since 2h --dry-run
  outbox replay --endpoint billing --since 2026-01-31T12:00Z --type "order.*" --rate 50
  outbox replay --endpoint billing --event 2c38a0a4-1216-4a73-93bd-713c3f7ee0e5
  outbox replay --endpoint billing --key order-7
  outbox replay list
  outbox replay abort 7

To replay dead letters: outbox dead replay
""",
)
@click.option("--endpoint", metavar="NAME", help="The endpoint that receives the events.")
@time_options("published")
@click.option(
    "--type",
    "types",
    metavar="PATTERN",
    multiple=True,
    help="Only subscribed types that also match this; repeatable.",
)
@click.option("--tenant", metavar="NAME", help="Only events of this tenant.")
@click.option(
    "--event",
    "events",
    metavar="ID",
    multiple=True,
    help="Only this event: an event id, X-Delivery, idempotency key or outbox id; repeatable.",
)
@click.option("--key", metavar="KEY", help="Only the events with this ordering key.")
@progress.rate_option
@click.option("--dry-run", is_flag=True, help="Only count them; change nothing.")
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
    tenant: str | None,
    events: tuple[str, ...],
    key: str | None,
    rate_per_s: float | None,
    dry_run: bool,
    wait: bool | None,
    as_json: bool,
) -> None:
    """Send past events to an endpoint: those since some time, or chosen ones.

    The events are selected by the endpoint's current subscription, and appended to
    its lanes in the order of publication. Live events have priority. Every delivery
    has a new sequence number and a new X-Delivery, so receivers process it as a new
    one, even if they have processed the event before; its body has the field
    "backfill".
    """
    if ctx.invoked_subcommand is not None:
        return
    if endpoint is None or (since is None and not events and key is None):
        raise click.UsageError(
            "give --endpoint NAME and one of --since TIME, --event ID or --key KEY; or a command: "
            "list, show or abort",
            ctx,
        )

    history = Criteria(endpoint, types, tenant=tenant, since=since, until=until)
    schema = settings.schema_name

    async def choose(connection: Connection[Any]) -> list[int] | None:
        return await find_chosen(connection, schema, history, events=events, key=key)

    async def plan_it(connection: Connection[Any]) -> BackfillPlan:
        chosen = await choose(connection)
        return await backfill.plan_backfill(connection, schema, history, outbox_ids=chosen)

    if dry_run:
        plan = run_connected(settings, plan_it)
        if as_json:
            emit_json(plan)
        else:
            deliveries = count(plan.deliveries, "delivery")
            echo(f"would create {deliveries}; nothing was changed")
        return

    async def start(connection: Connection[Any]) -> tuple[ReplayJob, int]:
        job_id = await backfill.request_backfill(
            connection,
            schema,
            history,
            actor=actor(),
            rate_per_s=rate_per_s,
            outbox_ids=await choose(connection),
        )
        return await replay_jobs.get_job(connection, schema, job_id), job_id

    progress.run_replay(settings, start, _show_started, wait=wait, as_json=as_json)


@command.command(
    "list",
    epilog="""\b
Examples:
  outbox replay list
  outbox replay list --state running --json
""",
)
@click.option(
    "--state",
    type=click.Choice([*replay_jobs.STATES, "all"]),
    default="all",
    show_default=True,
    help="Only jobs in this state.",
)
@limit_option
@before_id_option("--after", "JOB", "Only jobs listed after this one (paging).")
@print_result(_show_list)
def list_(settings: Settings, state: str, limit: int, after: int) -> list[ReplayJob]:
    """List replay jobs (of dead letters and past events), newest first."""
    states = [each for each in replay_jobs.STATES if state in (each, "all")]
    rows = run_operation(settings, replay_jobs.list_jobs, states=states, limit=limit, before=after)
    return note_next_page(rows, lambda row: row.id)


@command.command(
    epilog="""\b
Example:
  outbox replay show 7 --json
"""
)
@job_argument
@print_result(_show)
def show(settings: Settings, job_id: int) -> ReplayJob:
    """Show the progress of a replay job."""
    return run_operation(settings, replay_jobs.get_job, job_id)


@command.command(
    epilog="""\b
Example:
  outbox replay abort 7
"""
)
@job_argument
@print_result(_show_aborted)
def abort(settings: Settings, job_id: int) -> ReplayJob:
    """Cancel a replay job.

    The few deliveries that are already in their lanes are still sent. The other dead
    letters stay dead letters.
    """
    return run_operation(settings, replay_jobs.abort_job, job_id, actor=actor())

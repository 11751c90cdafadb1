"""`outbox schedule list, show`: looking changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import (
    database,
    json_option,
    limit_option,
    run_async,
    settings_options,
    tell_more,
)
from outbox.cli.output import age, clock_time, count, emit_json, emit_pairs, emit_table
from outbox.cli.schedule.group import command
from outbox.core.model import duration
from outbox.operations import schedules
from outbox.operations.views import schedules as views

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.schedules import Future, Schedule

_COLUMNS = ("name", "cron", "zone", "type", "state", "next run", "in", "last run")


@command.command(
    "list",
    epilog="""\b
Examples:
  outbox schedule list
  outbox schedule list --json | jq '.schedules[] | select(.state == "paused")'
""",
)
@limit_option
@click.option("--after", metavar="NAME", help="Only names behind this one, by their bytes.")
@json_option
@settings_options
def list_(settings: Settings, limit: int, after: str | None, as_json: bool) -> None:
    """List schedules by name, and say which events wait for their time.

    Such events are published with a time of their own: outbox publish --at.
    """

    async def go() -> None:
        async with database(settings) as connection:
            rows = await schedules.page(
                connection, settings.schema_name, limit=limit + 1, after=after
            )
            future = await schedules.future(connection, settings.schema_name)
        rows, more = rows[:limit], len(rows) > limit
        if more:
            tell_more(rows[-1].name)
        if as_json:
            waiting = {"events": future.events, "first_at": future.first_at}
            listed = [views.schedule(row, of_many=True) for row in rows]
            emit_json({"schedules": listed, "future_events": waiting})
            return
        emit_table(
            _COLUMNS,
            [_row(row) for row in rows],
            "no schedules; add one with: outbox schedule add NAME CRON --type TYPE",
        )
        click.echo(_waiting(future))

    run_async(go())


@command.command(
    epilog="""\b
Example:
  outbox schedule show nightly
"""
)
@click.argument("name")
@json_option
@settings_options
def show(settings: Settings, name: str, as_json: bool) -> None:
    """Show a schedule with its event and its next runs."""

    async def go() -> None:
        async with database(settings) as connection:
            found = await schedules.get(connection, settings.schema_name, name)
        if as_json:
            emit_json(views.schedule(found))
            return
        paused = None if found.state == "active" else found
        emit_pairs(
            [
                ("name", found.name),
                ("cron", f"{found.cron} in {found.timezone}"),
                ("state", found.state),
                ("since", paused and paused.state_at),
                ("by", paused and paused.state_by),
                ("why", paused and paused.state_why),
                ("next runs", _next_runs(found)),
                ("last tick", found.last_at),
                ("last run", found.last_run_at),
                ("last event", found.last_event),
                ("missed ticks", _misfire(found)),
                ("overlap", found.overlap),
                ("type", found.type),
                ("key", found.key),
                ("tenant", found.tenant),
                ("headers", found.headers),
                ("payload", found.payload),
                ("added", found.created_at),
            ]
        )

    run_async(go())


def _row(schedule: Schedule) -> tuple[Any, ...]:
    next_at = schedule.next_at
    in_s = None if next_at is None else (next_at - schedule.now).total_seconds()
    return (
        schedule.name,
        schedule.cron,
        schedule.timezone,
        schedule.type,
        schedule.state,
        None if next_at is None else clock_time(schedule.next_runs(1)[0]),
        _in(schedule, in_s),
        schedule.last_run_at,
    )


def _in(schedule: Schedule, in_s: float | None) -> Any:
    """How long it is until the next run."""
    if schedule.waits:
        return "waits"
    return "due" if in_s is not None and in_s <= 0 else age(in_s)


def _next_runs(schedule: Schedule) -> str | None:
    if schedule.waits and schedule.last_run_at is not None:
        run = clock_time(schedule.last_run_at)
        return f"when the run of {run} has ended, see: outbox trace {schedule.last_event}"
    return ", ".join(map(clock_time, schedule.next_runs())) or None


def _waiting(future: Future) -> str:
    """Which events wait for their time, in a sentence."""
    if future.first_at is None:
        return "no event waits for its time"
    many = future.events > schedules.COUNT_MAX
    events = f"more than {schedules.COUNT_MAX} events" if many else count(future.events, "event")
    in_s = (future.first_at - future.now).total_seconds()
    when = "is due" if in_s <= 0 else f"comes in {age(in_s)}"
    wait = "waits for its time" if future.events == 1 else "wait for their time"
    return f"{events} {wait}; the first {when}"


def _misfire(schedule: Schedule) -> str:
    grace = duration.exact(schedule.grace_s)
    return {
        "skip": f"left out, unless at most {grace} late",
        "once": "the newest stands for all",
        "all": "each is published",
    }[schedule.misfire]

"""Read-only commands: `outbox schedule list` and `show`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import (
    limit_option,
    note_next_page,
    print_result,
    run_connected,
    run_operation,
)
from outbox.cli.output import age, clock_time, echo, emit_pairs, emit_table
from outbox.cli.schedule.group import command
from outbox.core.model import duration
from outbox.core.model.text import count
from outbox.operations.schedules import queries as schedules

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.operations.schedules.queries import FutureEvents, ListedSchedule, Schedule

_COLUMNS = ("name", "cron", "zone", "type", "state", "next run", "in", "last run")


def _show_list(listing: dict[str, Any]) -> None:
    emit_table(
        _COLUMNS,
        [_row(row) for row in listing["schedules"]],
        "no schedules; add one with: outbox schedule add NAME CRON --type TYPE",
    )
    echo(_waiting(listing["future_events"]))


def _show(schedule: Schedule) -> None:
    paused = None if schedule.state == "active" else schedule
    emit_pairs(
        [
            ("name", schedule.name),
            ("cron", f"{schedule.cron} in {schedule.timezone}"),
            ("state", schedule.state),
            ("since", paused and paused.state_at),
            ("by", paused and paused.state_by),
            ("comment", paused and paused.state_comment),
            ("next runs", _next_runs(schedule)),
            ("last due", schedule.last_at),
            ("last run", schedule.last_run_at),
            ("last event", schedule.last_event),
            ("missed runs", _misfire(schedule)),
            ("overlap", schedule.overlap),
            ("type", schedule.type),
            ("key", schedule.key),
            ("tenant", schedule.tenant),
            ("headers", schedule.headers),
            ("payload", schedule.payload),
            ("added", schedule.created_at),
        ]
    )


@command.command(
    "list",
    epilog="""\b
Examples:
  outbox schedule list
  outbox schedule list --json | jq '.schedules[] | select(.state == "paused")'
""",
)
@limit_option
@click.option("--after", metavar="NAME", help="Only names after this one, in byte order (paging).")
@print_result(_show_list)
def list_(settings: Settings, limit: int, after: str | None) -> dict[str, Any]:
    """List schedules by name, and count delayed events.

    Delayed events are published with outbox publish --at.
    """

    async def read_page(connection: Connection[Any]) -> dict[str, Any]:
        schema = settings.schema_name
        rows = await schedules.list_schedules(connection, schema, limit=limit, after=after)
        future = await schedules.count_future_events(connection, schema)
        return {
            "schedules": note_next_page(rows, lambda row: row.name),
            "future_events": future,
        }

    return run_connected(settings, read_page)


@command.command(
    epilog="""\b
Example:
  outbox schedule show nightly
"""
)
@click.argument("name")
@print_result(_show)
def show(settings: Settings, name: str) -> Schedule:
    """Show a schedule with its event and its next runs."""
    return run_operation(settings, schedules.get_schedule, name)


def _row(schedule: ListedSchedule) -> tuple[Any, ...]:
    next_at = schedule.next_at
    in_s = None if next_at is None else (next_at - schedule.now).total_seconds()
    return (
        schedule.name,
        schedule.cron,
        schedule.timezone,
        schedule.type,
        schedule.state,
        None if next_at is None else clock_time(schedule.next_runs[0]),
        _in(schedule, in_s),
        schedule.last_run_at,
    )


def _in(schedule: ListedSchedule, in_s: float | None) -> Any:
    """The time until the next run."""
    if schedule.waits:
        return "waits"
    return "due" if in_s is not None and in_s <= 0 else age(in_s)


def _next_runs(schedule: Schedule) -> str | None:
    if schedule.waits and schedule.last_run_at is not None:
        run = clock_time(schedule.last_run_at)
        return f"after the run of {run} has ended; see: outbox trace {schedule.last_event}"
    return ", ".join(map(clock_time, schedule.next_runs)) or None


def _waiting(future: FutureEvents) -> str:
    """A sentence on the number of delayed events and the first of them."""
    if future.first_at is None:
        return "no delayed events"
    many = future.events > schedules.FUTURE_COUNT_MAX
    events = (
        f"more than {schedules.FUTURE_COUNT_MAX} events" if many else count(future.events, "event")
    )
    in_s = (future.first_at - future.now).total_seconds()
    when = "is due" if in_s <= 0 else f"is due in {age(in_s)}"
    return f"{events} delayed; the first {when}"


def _misfire(schedule: Schedule) -> str:
    grace = duration.exact(schedule.grace_s)
    return {
        "skip": f"skipped if more than {grace} late",
        "once": "only the most recent one is published",
        "all": "each is published",
    }[schedule.misfire]

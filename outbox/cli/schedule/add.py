"""`outbox schedule add`: create or replace a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import actor, duration_s, print_result, run_operation
from outbox.cli.output import clock_time, echo
from outbox.cli.publish import parse_headers, read_payload
from outbox.cli.schedule.group import command
from outbox.operations.schedules import changes as schedule_changes

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.schedules.queries import Schedule


def _show_added(schedule: Schedule) -> None:
    name = schedule.name
    if not schedule.next_runs:
        echo(f'schedule "{name}" is still paused; resume it with: outbox schedule resume {name}')
        return
    first, *later = map(clock_time, schedule.next_runs)
    echo(f'schedule "{name}" runs at {first}, then at {", ".join(later)}')


@command.command(
    epilog="""\b
Examples:
  outbox schedule add nightly @daily --type report.due --timezone Europe/Berlin
  outbox schedule add sync "*/15 8-17 * * MON-FRI" --type sync.asked --overlap wait
  outbox schedule add invoices "0 9 L * *" --type invoices.due --misfire all --payload '{"n": 1}'

\b
CRON has five fields: minute, hour, day of month, month and day of week (L: the
last day, MON#1: the first Monday), or is @hourly, @daily, @weekly, @monthly or
@yearly. On daylight-saving changes, a skipped time of day runs right after the
change, and a repeated one runs once; a * for minutes or hours follows elapsed time.

\b
Missed runs, whose time passed while no relay was running (--misfire):
  once   publish the most recent one
  all    publish each of them
  skip   publish only those that are at most --grace late
"""
)
@click.argument("name")
@click.argument("cron")
@click.option(
    "--type", "type_", required=True, metavar="TYPE", help="Type of the published events."
)
@click.option(
    "--timezone",
    default="UTC",
    show_default=True,
    metavar="ZONE",
    help="Time zone, such as Europe/Berlin.",
)
@click.option(
    "--payload", metavar="JSON", default="{}", help="Payload of the events; - reads stdin."
)
@click.option(
    "--key", metavar="KEY", help="Ordering key: events with the same key keep their order."
)
@click.option("--tenant", metavar="TENANT", help="Tenant of the events.")
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    help="Header of the events; repeatable.",
)
@click.option(
    "--misfire",
    type=click.Choice(["skip", "once", "all"]),
    default="once",
    show_default=True,
    help="Which missed runs are published.",
)
@click.option(
    "--grace",
    type=duration_s,
    default="60s",
    show_default=True,
    metavar="TIME",
    help="With --misfire skip: maximum delay of a run.",
)
@click.option(
    "--overlap",
    type=click.Choice(["allow", "wait"]),
    default="allow",
    show_default=True,
    help="wait: a run starts after the previous one was delivered or dead-lettered.",
)
@click.option("--replace", is_flag=True, help="Replace an existing schedule of this name.")
@print_result(_show_added)
def add(
    settings: Settings,
    name: str,
    cron: str,
    type_: str,
    timezone: str,
    payload: str,
    key: str | None,
    tenant: str | None,
    headers: tuple[str, ...],
    misfire: Any,
    grace: float,
    overlap: Any,
    replace: bool,
) -> Schedule:
    """Publish an event of --type on the schedule CRON."""
    from outbox.core.schedules.schedule import ScheduleSettings

    schedule_settings = ScheduleSettings(
        name=name,
        cron=cron,
        timezone=timezone,
        type=type_,
        payload=read_payload(payload),
        key=key,
        tenant=tenant,
        headers=parse_headers(headers),
        misfire=misfire,
        grace_s=grace,
        overlap=overlap,
    )
    return run_operation(
        settings, schedule_changes.add_schedule, schedule_settings, actor=actor(), replace=replace
    )

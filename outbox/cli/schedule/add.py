"""`outbox schedule add`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import (
    actor,
    database,
    duration_s,
    json_option,
    run_async,
    settings_options,
)
from outbox.cli.output import clock_time, emit_json
from outbox.cli.publish import parse_headers, read_payload
from outbox.cli.schedule.group import command
from outbox.operations import schedule_changes
from outbox.operations.views import schedules as views

if TYPE_CHECKING:
    from outbox.config import Settings


@command.command(
    epilog="""\b
Examples:
  outbox schedule add nightly @daily --type report.due --timezone Europe/Berlin
  outbox schedule add sync "*/15 8-17 * * MON-FRI" --type sync.asked --overlap wait
  outbox schedule add invoices "0 9 L * *" --type invoices.due --misfire all --payload '{"n": 1}'

\b
CRON has five fields: minute, hour, day of month, month, day of week (L: the
last one, MON#1: the first Monday), or is one of @hourly, @daily, @weekly,
@monthly and @yearly.  When clocks are set, a time of day that is skipped fires
when they have been set, and one that comes twice fires once; a * for minutes
or hours goes by the time that passes.

\b
Ticks whose time went by while no relay ran (--misfire):
  once   the newest is published, for all of them
  all    each is published
  skip   those that are at most --grace old are published
"""
)
@click.argument("name")
@click.argument("cron")
@click.option("--type", "type_", required=True, metavar="TYPE", help="Of the events.")
@click.option(
    "--timezone", default="UTC", show_default=True, metavar="ZONE", help="Such as Europe/Berlin."
)
@click.option("--payload", metavar="JSON", default="{}", help="The events' data; - reads stdin.")
@click.option("--key", metavar="KEY", help="Events with the same key keep their order.")
@click.option("--tenant", metavar="TENANT", help="Only for this tenant's endpoints.")
@click.option(
    "--header", "headers", multiple=True, metavar="NAME=VALUE", help="Sent along; repeatable."
)
@click.option(
    "--misfire",
    type=click.Choice(["skip", "once", "all"]),
    default="once",
    show_default=True,
    help="What becomes of ticks that were missed.",
)
@click.option(
    "--grace",
    type=duration_s,
    default="60s",
    show_default=True,
    metavar="TIME",
    help="With --misfire skip: how late a tick may be.",
)
@click.option(
    "--overlap",
    type=click.Choice(["allow", "wait"]),
    default="allow",
    show_default=True,
    help="wait: the next run only after the last one was delivered or given up.",
)
@click.option("--replace", is_flag=True, help="Change the one of this name, if there is one.")
@json_option
@settings_options
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
    as_json: bool,
) -> None:
    """Publish an event of --type whenever CRON says so."""
    from outbox.core.schedules.schedule import ScheduleSettings

    wanted = ScheduleSettings(
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

    async def go() -> None:
        async with database(settings) as connection:
            added = await schedule_changes.add(
                connection, settings.schema_name, wanted, actor=actor(), replace=replace
            )
        if as_json:
            emit_json(views.schedule(added))
            return
        runs = added.next_runs()
        if not runs:
            click.echo(f'schedule "{name}" stays paused; go on with: outbox schedule resume {name}')
            return
        first, *later = map(clock_time, runs)
        click.echo(f'schedule "{name}" runs at {first}, then at {", ".join(later)}')

    run_async(go())

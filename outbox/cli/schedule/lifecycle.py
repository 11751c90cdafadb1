"""`outbox schedule pause`, `resume`, `remove` and `run-now`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import actor, json_option, run_operation, settings_options
from outbox.cli.output import clock_time, emit_json
from outbox.cli.schedule.group import command
from outbox.operations import schedule_changes

if TYPE_CHECKING:
    from outbox.config import Settings

comment_option = click.option(
    "--comment", metavar="TEXT", help="Reason, stored with the state and in the journal."
)


@command.command(
    epilog="""\b
Example:
  outbox schedule pause nightly sync --comment "the archive is being moved"
"""
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@comment_option
@json_option
@settings_options
def pause(settings: Settings, names: tuple[str, ...], comment: str | None, as_json: bool) -> None:
    """Pause schedules; runs that are due while paused are skipped."""
    paused = run_operation(
        settings, schedule_changes.pause_schedules, names, actor=actor(), comment=comment
    )
    if as_json:
        emit_json(paused)
        return
    for each in paused:
        click.echo(f'schedule "{each.name}" is paused')


@command.command(
    epilog="""\b
Example:
  outbox schedule resume nightly
"""
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@comment_option
@json_option
@settings_options
def resume(settings: Settings, names: tuple[str, ...], comment: str | None, as_json: bool) -> None:
    """Resume schedules with their next run."""
    resumed = run_operation(
        settings, schedule_changes.resume_schedules, names, actor=actor(), comment=comment
    )
    if as_json:
        emit_json(resumed)
        return
    for each in resumed:
        click.echo(f'resumed schedule "{each.name}"; next run at {clock_time(each.next_runs[0])}')


@command.command(
    epilog="""\b
Example:
  outbox schedule remove nightly
"""
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@json_option
@settings_options
def remove(settings: Settings, names: tuple[str, ...], as_json: bool) -> None:
    """Remove schedules; events that are already published are still delivered."""
    run_operation(settings, schedule_changes.remove_schedules, names, actor=actor())
    if as_json:
        emit_json({"removed": list(dict.fromkeys(names))})
        return
    for name in dict.fromkeys(names):
        click.echo(f'removed schedule "{name}"')


@command.command(
    "run-now",
    epilog="""\b
Example:
  outbox schedule run-now nightly
""",
)
@click.argument("name")
@json_option
@settings_options
def run_now(settings: Settings, name: str, as_json: bool) -> None:
    """Publish a schedule's event now, even if the schedule is paused.

    Its regular runs do not change. Receivers get the header X-Schedule-Run: by-hand.
    """
    event_id = run_operation(settings, schedule_changes.run_schedule_now, name, actor=actor())
    if as_json:
        emit_json({"id": event_id})
    else:
        click.echo(f"published {event_id}")

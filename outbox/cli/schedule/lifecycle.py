"""`outbox schedule pause`, `resume`, `remove` and `run-now`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import actor, comment_option, names_argument, print_result, run_operation
from outbox.cli.output import clock_time, echo
from outbox.cli.schedule.group import command
from outbox.operations.schedules import changes as schedule_changes

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.schedules.changes import RemovedSchedule, ScheduleRun
    from outbox.operations.schedules.queries import Schedule


def _show_paused(schedules: list[Schedule]) -> None:
    for each in schedules:
        echo(f'schedule "{each.name}" is paused')


def _show_resumed(schedules: list[Schedule]) -> None:
    for each in schedules:
        echo(f'resumed schedule "{each.name}"; next run at {clock_time(each.next_runs[0])}')


def _show_removed(schedules: list[RemovedSchedule]) -> None:
    for each in schedules:
        echo(f'removed schedule "{each.removed}"')


def _show_run(run: ScheduleRun) -> None:
    echo(f"published {run.id}")


@command.command(
    epilog="""\b
Example:
  outbox schedule pause nightly sync --comment "the archive is being moved"
"""
)
@names_argument
@comment_option
@print_result(_show_paused)
def pause(settings: Settings, names: tuple[str, ...], comment: str | None) -> list[Schedule]:
    """Pause schedules; runs that are due while paused are skipped."""
    return run_operation(
        settings, schedule_changes.pause_schedules, names, actor=actor(), comment=comment
    )


@command.command(
    epilog="""\b
Example:
  outbox schedule resume nightly
"""
)
@names_argument
@comment_option
@print_result(_show_resumed)
def resume(settings: Settings, names: tuple[str, ...], comment: str | None) -> list[Schedule]:
    """Resume schedules with their next run."""
    return run_operation(
        settings, schedule_changes.resume_schedules, names, actor=actor(), comment=comment
    )


@command.command(
    epilog="""\b
Example:
  outbox schedule remove nightly
"""
)
@names_argument
@print_result(_show_removed)
def remove(settings: Settings, names: tuple[str, ...]) -> list[RemovedSchedule]:
    """Remove schedules; events that are already published are still delivered."""
    return run_operation(settings, schedule_changes.remove_schedules, names, actor=actor())


@command.command(
    "run-now",
    epilog="""\b
Example:
  outbox schedule run-now nightly
""",
)
@click.argument("name")
@print_result(_show_run)
def run_now(settings: Settings, name: str) -> ScheduleRun:
    """Publish a schedule's event now, even if the schedule is paused.

    Its regular runs do not change. Receivers get the header X-Schedule-Run: by-hand.
    """
    return run_operation(settings, schedule_changes.run_schedule_now, name, actor=actor())

"""The command group `outbox schedule`."""

from __future__ import annotations

import click

from outbox.cli.group import Group


@click.group("schedule", cls=Group)
def command() -> None:
    """Publish events on a cron schedule.

    The relays publish each run exactly once. The database's clock decides when a run
    is due.
    """

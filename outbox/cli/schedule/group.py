"""The group that the commands below `outbox schedule` join."""

from __future__ import annotations

import click

from outbox.cli.main import Group


@click.group("schedule", cls=Group)
def command() -> None:
    """Publish events by the clock, again and again.

    A relay publishes them, each tick once, however many relays run.  The
    database's clock decides.
    """

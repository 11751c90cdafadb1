"""The command group `outbox endpoint`."""

from __future__ import annotations

import click

from outbox.cli.main import Group


@click.group("endpoint", cls=Group)
def command() -> None:
    """Add, change, pause, test and remove endpoints, the destinations of events."""

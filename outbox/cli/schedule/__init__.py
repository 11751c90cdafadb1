"""`outbox schedule`: publish events on a cron schedule."""

from __future__ import annotations

from outbox.cli.schedule import add, lifecycle, show
from outbox.cli.schedule.group import command

__all__ = ["add", "command", "lifecycle", "show"]

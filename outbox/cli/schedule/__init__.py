"""`outbox schedule`: events by the clock."""

from __future__ import annotations

from outbox.cli.schedule import add, look, state
from outbox.cli.schedule.group import command

__all__ = ["add", "command", "look", "state"]

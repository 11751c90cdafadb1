"""`outbox adopt`: move in from another outbox table."""

from __future__ import annotations

from outbox_adopt.cli import begin, checks, compare, cut_over, end
from outbox_adopt.cli.group import command

__all__ = ["begin", "checks", "command", "compare", "cut_over", "end"]

"""`outbox adopt`: move in from another outbox table."""

from __future__ import annotations

from outbox.cli.adopt import begin, checks, cut_over, end
from outbox.cli.adopt.group import command

__all__ = ["begin", "checks", "command", "cut_over", "end"]

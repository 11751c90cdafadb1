"""How erasing is told to programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.operations.erase import Erased


def erased(done: Erased, *, dry_run: bool) -> dict[str, Any]:
    """What was erased, or would be."""
    return {
        "dry_run": dry_run,
        "events": done.events,
        "future_events": done.future_events,
        "dead_letters": done.dead_letters,
        "answers": None if dry_run else done.answers,
        "schedules": done.schedules,
    }

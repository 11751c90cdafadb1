"""JSON form of an erasure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.operations.erase import ErasureResult


def erased(done: ErasureResult, *, dry_run: bool) -> dict[str, Any]:
    """JSON form of the counts."""
    return {
        "dry_run": dry_run,
        "events": done.events,
        "future_events": done.future_events,
        "dead_letters": done.dead_letters,
        "responses": None if dry_run else done.responses,
        "schedules": done.schedules,
    }

"""JSON form of an erasure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.operations.erase import ErasureResult


def erasure_report(result: ErasureResult, *, dry_run: bool) -> dict[str, Any]:
    """JSON form of the counts."""
    return {
        "dry_run": dry_run,
        "events": result.events,
        "future_events": result.future_events,
        "dead_letters": result.dead_letters,
        "responses": None if dry_run else result.responses,
        "schedules": result.schedules,
    }

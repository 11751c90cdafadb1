"""JSON form of the status overview."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.operations.status import Overview


def overview(schema: str, seen: Overview) -> dict[str, Any]:
    """JSON form of the overview."""
    cursor = seen.cursor
    return {
        "schema": schema,
        "at": seen.at,
        "cursor": {
            "batch": cursor.batch,
            "high": cursor.high,
            "last_id": cursor.last_id,
            "lag": cursor.lag,
            "waiting_s": cursor.waiting_s,
            "at": cursor.at,
            "timeline": cursor.timeline,
            "timeline_at": cursor.timeline_at,
        },
        "blocker": None if seen.blocker is None else seen.blocker.as_json(),
        "open_gaps": seen.gaps,
        "replicas": seen.replicas,
        "pending": seen.pending,
        "endpoints_total": seen.endpoints_total,
        "endpoints": seen.endpoints,
        "dead_letters": seen.dead_letters,
    }

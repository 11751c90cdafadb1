"""JSON form of the status overview."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.operations.status import Overview


def status_report(schema: str, overview: Overview) -> dict[str, Any]:
    """JSON form of the overview."""
    cursor = overview.cursor
    return {
        "schema": schema,
        "at": overview.at,
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
        "blocker": None if overview.blocker is None else overview.blocker.as_json(),
        "open_gaps": overview.gaps,
        "replicas": overview.replicas,
        "pending": overview.pending,
        "endpoints_total": overview.endpoints_total,
        "endpoints": overview.endpoints,
        "dead_letters": overview.dead_letters,
    }

"""JSON form of schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.operations.views.merge import merge_fields

if TYPE_CHECKING:
    from outbox.operations.schedules import Schedule


def schedule_detail(schedule: Schedule, *, of_many: bool = False) -> dict[str, Any]:
    """JSON form of a schedule; in a listing without payload and headers."""
    left_out = ("now", "payload", "headers") if of_many else ("now",)
    return merge_fields(schedule, without=left_out) | {"next_runs": schedule.next_runs()}

"""How a schedule reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import datetime

    from outbox.store.schedules import Schedule


def clock_time(at: datetime) -> str:
    """In its schedule's zone."""
    return at.isoformat(sep=" ", timespec="minutes")


def schedule_json(schedule: Schedule, *, of_many: bool = False) -> dict[str, Any]:
    """Everything, for machines; of one among many without payload and headers."""
    left_out = {"now", "payload", "headers"} if of_many else {"now"}
    flat = {name: getattr(schedule, name) for name in schedule.__slots__ if name not in left_out}
    return flat | {"next_runs": schedule.next_runs()}

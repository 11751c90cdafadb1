"""How the stories of events are told to programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.operations import event_trace as stories
from outbox.operations.views.merge import flat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.operations.event_trace import Story
    from outbox.operations.find_event import Found


def traced(found: Found, told: Sequence[Story]) -> dict[str, Any]:
    """What something stood for, and the story of each event."""
    return {
        "version": stories.VERSION,
        "found_by": found.by,
        "more": found.more,
        "events": [story(each) for each in told],
    }


def story(told: Story) -> dict[str, Any]:
    """One story, with what became of each delivery, and why."""
    deliveries = [{**flat(each), "fate": each.fate} for each in told.deliveries]
    return flat(told) | {"deliveries": deliveries, "diagnosis": told.diagnosis}

"""How the stories of events are told to programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core import story as stories
from outbox.views.flat import flat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.story import Story
    from outbox.store.lookup import Found


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

"""How schedules are told to programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.operations.views.merge import flat

if TYPE_CHECKING:
    from outbox.operations.schedules import Schedule


def schedule(found: Schedule, *, of_many: bool = False) -> dict[str, Any]:
    """Everything; of one among many without payload and headers."""
    left_out = ("now", "payload", "headers") if of_many else ("now",)
    return flat(found, without=left_out) | {"next_runs": found.next_runs()}

"""Single steps of a lane, for tests that name each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.delivery.commands import (
    ErasedEvent,
    Fetch,
    Gate,
    LaneSnapshot,
    Progress,
    Record,
    Send,
)
from outbox.core.delivery.lane import Lane
from outbox.core.model.response import AttemptResult
from outbox.core.model.response_policy import classify
from tests.core.lane_invariants import POLICY
from tests.core.lane_tables import EPOCH_S

if TYPE_CHECKING:
    from outbox.core.model.delivery import Delivery

NOW = EPOCH_S
OK = AttemptResult.completed(200, 0.1)
BUSY = AttemptResult.completed(503, 0.1, headers=(("Retry-After", "7"),))
NO = AttemptResult.completed(400, 0.1)


def lane_with(*deliveries: Delivery | ErasedEvent, lane_id: int = 7) -> Lane:
    """Return a new lane with these deliveries in its buffer."""
    lane = Lane(LaneSnapshot(lane_id, len(deliveries), Progress()), sent_through_batch=0)
    assert lane.next(NOW) == Fetch(0, 0)
    lane.append_fetched(deliveries)
    return lane


def attempt(
    lane: Lane, response: AttemptResult, now: float = NOW, gate: Gate = Gate.OPEN, **more: Any
) -> tuple[Send, Record]:
    """Make one attempt and return its record, which is not written yet."""
    send = lane.next(now, gate)
    assert isinstance(send, Send)
    assert lane.next(now) is None
    outcome = classify(response, maybe_sent_before=send.maybe_sent_before)
    observed_s = now - (lane.first_attempt_at or now)
    return send, lane.record_result(
        outcome, response, POLICY, started_at=now, now=now, u=0.5, observed_s=observed_s, **more
    )

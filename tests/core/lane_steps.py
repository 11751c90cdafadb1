"""Single steps of a lane, for tests that say what each one does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.delivery.commands import Fetch, Gate, Gone, Progress, Record, Send
from outbox.core.delivery.lane import Lane
from outbox.core.model.response import Answer, classify
from tests.core.lane_invariants import POLICY
from tests.core.lane_tables import EPOCH_S

if TYPE_CHECKING:
    from outbox.core.delivery.message import Delivery

NOW = EPOCH_S
OK = Answer.of(200, 0.1)
BUSY = Answer.of(503, 0.1, headers=(("Retry-After", "7"),))
NO = Answer.of(400, 0.1)


def lane_with(*deliveries: Delivery | Gone) -> Lane:
    """A new lane in its owner's hands, with these in its memory."""
    lane = Lane(7, Progress(), (), len(deliveries), sent_through_batch=0)
    assert lane.next(NOW) == Fetch(0, 0)
    lane.fetched(deliveries)
    return lane


def attempt(
    lane: Lane, answer: Answer, now: float = NOW, gate: Gate = Gate.OPEN, **more: Any
) -> tuple[Send, Record]:
    """One attempt and its record, which is not written yet."""
    send = lane.next(now, gate)
    assert isinstance(send, Send)
    assert lane.next(now) is None
    verdict = classify(answer, maybe_sent_before=send.maybe_sent_before)
    return send, lane.answered(verdict, answer, POLICY, started_at=now, now=now, u=0.5, **more)

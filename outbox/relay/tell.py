"""What the log says of deliveries and endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from outbox.core.health import State
from outbox.core.request import Delivery
from outbox.core.steps import DeadRange

if TYPE_CHECKING:
    from outbox.core.answer import Answer, Verdict
    from outbox.core.steps import Record, Send
    from outbox.relay.owned import OwnedEndpoint, OwnedLane

log = structlog.get_logger("outbox.dispatcher")


def health(home: OwnedEndpoint, now: float) -> None:
    """An endpoint's health changed."""
    state, record = home.health.state, home.health.record()
    answer = record.last_answer or {}
    write = log.info if state in (State.HEALTHY, State.RECOVERING) else log.warning
    write(
        f"endpoint is {state.value}",
        endpoint=home.endpoint.name,
        status=answer.get("status"),
        failure=answer.get("failure"),
        held_s=record.held_until and round(max(record.held_until - now, 0.0), 1),
    )


def failed(
    lane: OwnedLane, send: Send, verdict: Verdict, answer: Answer, record: Record, now: float
) -> None:
    """An attempt did not succeed, and there will be another."""
    progress = record.progress
    next_at = progress.next_attempt_at if progress is not None else None
    log.warning(
        "attempt failed",
        **_where(lane, send.delivery.seq),
        attempt=send.attempt,
        status=answer.status,
        failure=answer.failure and answer.failure.value,
        detail=answer.detail or None,
        verdict=verdict.name.lower(),
        retry_in_s=None if next_at is None else round(max(next_at - now, 0.0), 3),
    )


def given_up(lane: OwnedLane, record: Record) -> None:
    """Something was given up, if that is what the record says."""
    dead = record.dead
    if dead is None:
        return
    if isinstance(dead, DeadRange):
        log.error(
            "deliveries given up",
            **_where(lane, dead.seq),
            to_sequence=dead.to_seq,
            reason=dead.reason,
        )
        return
    delivery = dead.delivery
    log.error(
        "delivery given up",
        **_where(lane, record.seq),
        reason=dead.reason,
        attempts=dead.attempts,
        event_id=str(delivery.event_id) if isinstance(delivery, Delivery) else None,
        lane_blocked=record.blocks or None,
    )


def _where(lane: OwnedLane, seq: int) -> dict[str, Any]:
    return {"endpoint": lane.home.endpoint.name, "lane": lane.loaded.name, "sequence": seq}

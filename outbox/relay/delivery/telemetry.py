"""What is told of deliveries and endpoints: to the log, in numbers, and as traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from outbox.core.delivery.circuit_breaker import State
from outbox.core.delivery.commands import DeadRange
from outbox.core.delivery.message import Delivery
from outbox.core.model.headers import lines_of
from outbox.telemetry.meters import Meters

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outbox.core.delivery.commands import AttemptRow, Record, Send
    from outbox.core.delivery.lane import Lane
    from outbox.core.model.response import Answer, Verdict
    from outbox.destinations.interface import Request
    from outbox.relay.delivery.owned_endpoints import OwnedEndpoint, OwnedLane
    from outbox.store.endpoints import Endpoint
    from outbox.telemetry.sampling import Origin
    from outbox.telemetry.tracing import AttemptSpan, Tracing

log = structlog.get_logger("outbox.dispatcher")

TRACE_HEADERS = ("traceparent", "tracestate")


class Observer:
    """Tells of what the dispatcher does.

    Args:
        tracing: None: nothing is traced.
    """

    def __init__(self, meters: Meters | None = None, tracing: Tracing | None = None) -> None:
        self.meters = meters or Meters()
        self._tracing = tracing

    # -------------------------------------------------------------- attempts

    def begins(
        self, lane: OwnedLane, send: Send, request: Request, now: float
    ) -> tuple[Request, AttemptSpan | None]:
        """An attempt is about to be made; returns the request as it is to be sent."""
        tracing = self._tracing
        if tracing is None:
            return request, None
        for delivery in send.batch or (send.delivery,):
            # Of several together, the trace of the first that is traced goes along.
            if (origin := tracing.origin(delivery)) is not None:
                break
        else:
            return request, None
        endpoint, together = lane.home.endpoint.name, len(send.batch)
        span = tracing.attempt(endpoint, delivery, send.attempt, now, origin, together)
        kept = (pair for pair in request.headers if pair[0].lower() not in TRACE_HEADERS)
        return request._replace(lines=lines_of((*kept, *span.headers))), span

    def answered(
        self,
        lane: OwnedLane,
        delivery: Delivery,
        answer: Answer,
        record: Record,
        span: AttemptSpan | None,
    ) -> None:
        """An attempt was answered, or not."""
        row = record.attempt
        assert row is not None
        self.meters.attempted(lane.home.meters, row, answer)
        if self._tracing is not None and span is not None:
            self._tracing.answered(span, row, answer)
        if row.outcome == "delivered":
            self._delivered(lane, delivery, row, None if span is None else span.origin)

    def batch_answered(
        self,
        lane: OwnedLane,
        send: Send,
        answer: Answer,
        records: Sequence[Record],
        span: AttemptSpan | None,
    ) -> None:
        """An attempt of several deliveries was answered, or not.

        Args:
            records: what came of the first of them; of the others nothing.
        """
        tracing, row = self._tracing, None
        for delivery, record in zip(send.batch, records, strict=False):
            row = record.attempt
            assert row is not None
            if row.outcome == "delivered":
                origin = None if tracing is None else tracing.origin(delivery)
                self._delivered(lane, delivery, row, origin)
        # It was one request, and what came of it is what came of the last of them.
        assert row is not None
        self.meters.attempted(lane.home.meters, row, answer)
        if tracing is not None and span is not None:
            tracing.answered(span, row, answer)

    def _delivered(
        self, lane: OwnedLane, delivery: Delivery, row: AttemptRow, origin: Origin | None
    ) -> None:
        home, since = lane.home, delivery.waits_since
        ended_at = row.started_at + row.elapsed_s
        latency_s = None if since is None else ended_at - since
        self.meters.delivered(home.meters, row.attempt, latency_s)
        if self._tracing is not None and origin is not None:
            began_at = row.started_at if since is None else since
            name = home.endpoint.name
            self._tracing.ended(
                name, delivery, "delivered", row.attempt, began_at, ended_at, origin
            )

    def abandoned(self, span: AttemptSpan | None, now: float) -> None:
        """An attempt is closed before it was answered; somebody will make it again."""
        if self._tracing is not None and span is not None:
            self._tracing.abandoned(span, now)

    # What follows is told when it is durable.

    def failed(
        self,
        lane: OwnedLane,
        send: Send,
        verdict: Verdict,
        answer: Answer,
        record: Record,
        now: float,
    ) -> None:
        """An attempt did not succeed, and there will be another."""
        progress, row = record.progress, record.attempt
        assert row is not None
        # Of several together it is the first that is still owed.
        tried = (each for each in send.batch if each.seq == record.seq)
        delivery = next(tried, send.delivery)
        next_at = progress.next_attempt_at if progress is not None else None
        delay_s = None if next_at is None else max(next_at - now, 0.0)
        if delay_s is not None:
            self.meters.waits(delay_s)
        log.warning(
            "attempt failed",
            **_where(lane, record.seq),
            together=len(send.batch) or None,
            attempt=row.attempt,
            status=answer.status,
            failure=answer.failure and answer.failure.value,
            detail=answer.detail or None,
            verdict=verdict.name.lower(),
            retry_in_s=None if delay_s is None else round(delay_s, 3),
            **self._trace(delivery),
        )

    def given_up(self, lane: OwnedLane, record: Record, now: float) -> None:
        """Something was given up, if that is what the record says."""
        dead = record.dead
        if dead is None:
            return
        self.meters.given_up(lane.home.meters, dead)
        if isinstance(dead, DeadRange):
            log.error(
                "deliveries given up",
                **_where(lane, dead.seq),
                to_sequence=dead.to_seq,
                reason=dead.reason,
            )
            return
        # Of an event that was erased only its place is known.
        delivery = dead.delivery if isinstance(dead.delivery, Delivery) else None
        log.error(
            "delivery given up",
            **_where(lane, record.seq),
            reason=dead.reason,
            attempts=dead.attempts,
            event_id=None if delivery is None else str(delivery.event_id),
            lane_blocked=record.blocks or None,
            **self._trace(delivery),
        )
        tracing = self._tracing
        if tracing is None or delivery is None or (origin := tracing.origin(delivery)) is None:
            return
        since = delivery.waits_since
        endpoint = lane.home.endpoint.name
        began_at = now if since is None else since
        tracing.ended(endpoint, delivery, dead.reason, dead.attempts, began_at, now, origin)

    def finished(self, endpoint: Endpoint, lanes: Iterable[Lane]) -> None:
        """An endpoint ended, and what its lanes owed is given up."""
        reason = "removed" if endpoint.state == "removing" else "disabled"
        if owed := sum(lane.owed for lane in lanes):
            self.meters.ended(self.meters.of(endpoint.name), reason, owed)
        log.info("endpoint ended", endpoint=endpoint.name, was=endpoint.state, given_up=owed)

    # ---------------------------------------------------------------- health

    def health(self, home: OwnedEndpoint, now: float) -> None:
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

    def _trace(self, delivery: Delivery | None) -> dict[str, str]:
        """The trace that a line of the log belongs to; only where something is traced."""
        if self._tracing is None or delivery is None:
            return {}
        return {"trace_id": self._tracing.trace_id(delivery)}


def _where(lane: OwnedLane, seq: int) -> dict[str, Any]:
    return {"endpoint": lane.home.endpoint.name, "lane": lane.loaded.name, "sequence": seq}

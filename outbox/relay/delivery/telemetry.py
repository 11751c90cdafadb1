"""Telemetry of deliveries and endpoints: logs, metrics, traces and the delivery history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from outbox.core.delivery.circuit_breaker import BreakerState
from outbox.core.delivery.commands import DeadLetter, DeadRange, Send
from outbox.core.delivery.delivery_history import DeliveryHistory
from outbox.core.model.delivery import Delivery
from outbox.core.model.headers import format_lines
from outbox.telemetry.meters import Meters
from outbox.telemetry.sampling import trace_id

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox.core.delivery.commands import AttemptRow, Record, Successes
    from outbox.core.delivery.endpoint import Endpoint
    from outbox.core.delivery.lane import Lane
    from outbox.core.delivery.request_run import RequestRun
    from outbox.core.model.response import AttemptResult
    from outbox.core.model.response_policy import AttemptOutcome
    from outbox.destinations.interface import Request
    from outbox.relay.delivery.attempt import Attempt
    from outbox.relay.delivery.owned_endpoints import EndpointRuntime, LaneRuntime
    from outbox.telemetry.sampling import TraceOrigin
    from outbox.telemetry.tracing import AttemptSpan, Tracing

log = structlog.get_logger("outbox.dispatcher")

TRACE_HEADERS = ("traceparent", "tracestate")


class DeliveryTelemetry:
    """Telemetry hooks of the dispatcher.

    Args:
        tracing: the tracing; None: there are no traces.
    """

    def __init__(self, meters: Meters | None = None, tracing: Tracing | None = None) -> None:
        self.meters = meters or Meters()
        self.history = DeliveryHistory()
        """Written by the recorder of the session that runs."""
        self.tracing = tracing

    # -------------------------------------------------------------- attempts

    def attempt_started(
        self, lane: LaneRuntime, send: Send, request: Request, now: float
    ) -> tuple[Request, AttemptSpan | None]:
        """Report an attempt before it is sent; return the request with trace headers."""
        tracing = self.tracing
        assert tracing is not None
        for delivery in send.batch or (send.delivery,):
            # A batch carries the context of its first traced delivery.
            if (origin := tracing.origin(delivery)) is not None:
                break
        else:
            return request, None
        endpoint, together = lane.runtime.endpoint, len(send.batch)
        span = tracing.start_attempt(
            endpoint.name, endpoint.url, delivery, send.attempt, now, origin, together
        )
        kept = (pair for pair in request.headers if pair[0].lower() not in TRACE_HEADERS)
        return request._replace(lines=format_lines((*kept, *span.headers))), span

    def attempt_completed(
        self,
        lane: LaneRuntime,
        delivery: Delivery,
        response: AttemptResult,
        record: Record,
        span: AttemptSpan | None,
    ) -> None:
        """Report the result of an attempt."""
        row = record.attempt
        assert row is not None
        self.meters.record_attempt(lane.runtime.meters, row, response)
        if self.tracing is not None and span is not None:
            self.tracing.end_attempt(span, row, response)
        endpoint_id = lane.runtime.endpoint.id
        if row.outcome != "delivered":
            self.history.add_failure(endpoint_id)
        else:
            self.history.add_successes(endpoint_id, (row.elapsed_s,))
            # An append to a broker has no span of its own.
            origin = None if span is None else span.origin
            if self.tracing is not None and lane.runtime.broker is not None:
                origin = self.tracing.origin(delivery)
            since = delivery.waits_since
            latency_s = None if since is None else row.started_at + row.elapsed_s - since
            self.meters.record_delivered(lane.runtime.meters, row.attempt, latency_s)
            if origin is not None:
                self._trace_delivered(lane, delivery, row, origin)

    def open_failed(self, lane: LaneRuntime, response: AttemptResult, record: Record) -> None:
        """Report that a broker's lane could not be opened, or could not be ended."""
        # The end entry is no delivery, and has no attempts.
        if record.attempt is not None:
            self.meters.record_attempt(lane.runtime.meters, record.attempt, response)
            self.history.add_failure(lane.runtime.endpoint.id)

    def run_attempt_traced(
        self,
        lane: LaneRuntime,
        delivery: Delivery,
        run: RequestRun,
        response: AttemptResult,
        span: AttemptSpan,
    ) -> None:
        """Report the traces of the last success that a run took."""
        assert self.tracing is not None
        row = run.results.rows[-1]
        self.tracing.end_attempt(span, row, response)
        self._trace_delivered(lane, delivery, row, span.origin)

    def run_delivered(self, lane: LaneRuntime, results: Successes) -> None:
        """Report the successes that a run took, except for their traces."""
        self.meters.record_run(lane.runtime.meters, results)
        self.history.add_run(lane.runtime.endpoint.id, results)

    def batch_completed(
        self,
        lane: LaneRuntime,
        send: Send,
        response: AttemptResult,
        accepted: Successes,
        failed: Record | None,
        span: AttemptSpan | None,
    ) -> None:
        """Report the result of a batch attempt.

        Args:
            accepted: the results of the first deliveries.
            failed: the record of the delivery after them, if there is one; the others stay pending.
        """
        tracing = self.tracing
        endpoint_id = lane.runtime.endpoint.id
        self.meters.record_accepted(lane.runtime.meters, accepted)
        self.history.add_run(endpoint_id, accepted)
        if failed is not None:
            self.history.add_failure(endpoint_id)
        if tracing is not None:
            for index, delivery in enumerate(send.batch[: len(accepted)]):
                if (origin := tracing.origin(delivery)) is not None:
                    self._trace_delivered(lane, delivery, accepted.rows[index], origin)
        # One request: its outcome is that of the delivery that failed.
        row = accepted.rows[-1] if failed is None else failed.attempt
        assert row is not None
        self.meters.record_attempt(lane.runtime.meters, row, response)
        if tracing is not None and span is not None:
            tracing.end_attempt(span, row, response)

    def _trace_delivered(
        self, lane: LaneRuntime, delivery: Delivery, row: AttemptRow, origin: TraceOrigin
    ) -> None:
        assert self.tracing is not None
        since, name = delivery.waits_since, lane.runtime.endpoint.name
        began_at, ended_at = since or row.started_at, row.started_at + row.elapsed_s
        self.tracing.record_delivery(
            name, delivery, "delivered", row.attempt, began_at, ended_at, origin
        )

    def attempt_abandoned(self, span: AttemptSpan | None, now: float) -> None:
        """Report an attempt that was closed without a response; it is repeated."""
        if self.tracing is not None and span is not None:
            self.tracing.abandon_attempt(span, now)

    # The following are called when their records are durable.

    def attempt_failed(
        self,
        lane: LaneRuntime,
        attempt: Attempt,
        outcome: AttemptOutcome,
        record: Record,
        now: float,
    ) -> None:
        """Report a failed attempt that will be retried."""
        send, response = attempt.send, attempt.response
        progress = record.progress
        assert progress is not None
        # Of a batch, the first delivery that is still pending.
        batch = send.batch if isinstance(send, Send) else ()
        delivery = next((each for each in batch if each.seq == record.seq), send.delivery)
        next_at = progress.next_attempt_at
        delay_s = None if next_at is None else max(next_at - now, 0.0)
        is_probe = record.attempt is not None and record.attempt.outcome == "probe"
        if delay_s is not None:
            self.meters.record_retry_delay(delay_s)
        log.warning(
            "attempt failed",
            **_about(lane, record.seq, delivery),
            together=len(batch) or None,
            attempt=progress.attempts,
            status=response.status,
            failure=response.failure and response.failure.value,
            detail=response.detail or None,
            outcome="probe" if is_probe else outcome.name.lower(),
            retry_in_s=None if delay_s is None else round(delay_s, 3),
        )

    def recorded_unsent(self, lane: LaneRuntime, record: Record, now: float) -> None:
        """Report the record of a delivery that was not sent."""
        if record.dead is not None:
            self.dead_lettered(lane, record, record.dead, now)
        elif record.stuck:
            log.error(
                "lane held, because the event of its next delivery is gone; see outbox status",
                **_about(lane, record.seq),
                outbox_id=record.missing[0],
            )

    def dead_letter_refused(self, lane: LaneRuntime, wait_s: float) -> None:
        """Report that the database refused the dead letter of a lane, which waits."""
        about = _about(lane, lane.state.acked_seq + 1)
        log.error("the database refuses a dead letter; its lane waits", **about, retry_s=wait_s)

    def dead_lettered(
        self, lane: LaneRuntime, record: Record, dead: DeadLetter | DeadRange, now: float
    ) -> None:
        """Report the record's dead letter."""
        self.meters.record_dead_letter(lane.runtime.meters, dead)
        if isinstance(dead, DeadRange):
            log.error(
                "deliveries dead-lettered",
                **_about(lane, dead.seq),
                to_sequence=dead.to_seq,
                reason=dead.reason,
            )
            return
        # Of an erased event only its sequence number is known.
        delivery = dead.delivery if isinstance(dead.delivery, Delivery) else None
        response = dead.last_response or {}
        log.error(
            "delivery dead-lettered",
            **_about(lane, record.seq, delivery),
            reason=dead.reason,
            attempts=dead.attempts,
            status=response.get("status"),
            failure=response.get("failure"),
            detail=response.get("detail"),
            lane_blocked=record.blocks or None,
        )
        tracing = self.tracing
        if tracing is None or delivery is None or (origin := tracing.origin(delivery)) is None:
            return
        since = delivery.waits_since
        endpoint = lane.runtime.endpoint.name
        began_at = now if since is None else since
        tracing.record_delivery(
            endpoint, delivery, dead.reason, dead.attempts, began_at, now, origin
        )

    def endpoint_ended(self, endpoint: Endpoint, lanes: Iterable[Lane]) -> None:
        """Report that an endpoint ended and its pending deliveries were dead-lettered."""
        reason = "removed" if endpoint.state == "removing" else "disabled"
        if pending := sum(lane.pending for lane in lanes):
            self.meters.record_dead_letters(self.meters.meters_for(endpoint.name), reason, pending)
        log.info(
            "endpoint ended", endpoint=endpoint.name, was=endpoint.state, dead_lettered=pending
        )

    # ---------------------------------------------------------------- health

    def breaker_changed(self, runtime: EndpointRuntime, now: float) -> None:
        """Report a state change of an endpoint's circuit breaker."""
        state, record = runtime.breaker.state, runtime.breaker.record()
        response = record.last_response or {}
        write = (
            log.info if state in (BreakerState.HEALTHY, BreakerState.RECOVERING) else log.warning
        )
        write(
            f"endpoint is {state.value}",
            endpoint=runtime.endpoint.name,
            status=response.get("status"),
            failure=response.get("failure"),
            held_s=record.held_until and round(max(record.held_until - now, 0.0), 1),
        )

    def unsolicited_data(self, runtime: EndpointRuntime) -> None:
        """Report that the endpoint's receiver sent data that belongs to no request."""
        log.warning(
            "receiver sent unsolicited data: its connections carry one request each for a day, and "
            "the last acknowledgements may be wrong; see outbox doctor",
            endpoint=runtime.endpoint.name,
        )


def _about(lane: LaneRuntime, seq: int, delivery: object = None) -> dict[str, Any]:
    """The log fields of a delivery: what a receiver or a customer may quote."""
    where = {"endpoint": lane.runtime.endpoint.name, "lane": lane.loaded.name, "sequence": seq}
    if not isinstance(delivery, Delivery):
        return where  # Of an erased event only the sequence number is known.
    return {
        **where,
        "event_id": str(delivery.event_id),
        "type": delivery.type,
        "key": delivery.key,
        "delivery_id": delivery.message_id,
        "trace_id": trace_id(delivery),
    }

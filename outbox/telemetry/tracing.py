"""One trace for each event: from the producer's transaction through every attempt.

    the producer's span, if it had one
    └── publish order.paid            by `outbox.publish`
        └── deliver billing           from the event's commit to its end, for each endpoint
            ├── send billing          one attempt
            └── send billing          another one, maybe of another replica
                └── the receiver's own spans

What a delivery's spans have in common is worked out, not stored: the trace is the one
of the `traceparent` that was published with the event, or is made of the event's id; the
span of the delivery has an id made of its lane and number.  So a replica that takes
over goes on with the same trace.  A delivery's own span is told of when it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outbox.telemetry.meters import error_type
from outbox.telemetry.sampling import origin_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from outbox.core.delivery.commands import AttemptRow
    from outbox.core.delivery.message import Delivery
    from outbox.core.model.response import Answer, Headers
    from outbox.telemetry.sampling import Origin, Sampling

NS = 1_000_000_000
SAMPLED = TraceFlags(TraceFlags.SAMPLED)

_propagator = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class AttemptSpan:
    """An attempt that is traced."""

    span: Span
    origin: Origin

    @property
    def headers(self) -> Headers:
        """What tells the receiver of it."""
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, trace.set_span_in_context(self.span))
        return tuple(carrier.items())


class Ids(RandomIdGenerator):
    """Random ids, but for a span whose ids are known before it is begun."""

    def __init__(self) -> None:
        self.trace_id: int | None = None
        self.span_id: int | None = None

    def generate_trace_id(self) -> int:
        """The one that is set, once; or a random one."""
        known, self.trace_id = self.trace_id, None
        return super().generate_trace_id() if known is None else known

    def generate_span_id(self) -> int:
        """The one that is set, once; or a random one."""
        known, self.span_id = self.span_id, None
        return super().generate_span_id() if known is None else known


class Tracing:
    """Makes the spans of deliveries and attempts.

    Args:
        provider: the SDK's.
        ids: the provider's generator.
        sampling: the provider's sampler is of it.
    """

    def __init__(self, provider: TracerProvider, ids: Ids, sampling: Sampling) -> None:
        self._tracer = provider.get_tracer("outbox")
        self._ids = ids
        self.origin = sampling.origin
        """Of a delivery; None: it is not traced."""

    def attempt(
        self,
        endpoint: str,
        delivery: Delivery,
        attempt: int,
        started_at: float,
        origin: Origin,
        together: int = 0,
    ) -> AttemptSpan:
        """An attempt of a delivery that is traced begins.

        Args:
            started_at: epoch seconds.
            together: it goes in a batch of so many; 0: by itself.
        """
        attributes = {**_about(endpoint, delivery), "outbox.attempt": attempt}
        if together:
            attributes["messaging.batch.message_count"] = together
        of_delivery = SpanContext(
            origin.trace_id, _span_id(delivery), is_remote=False, trace_flags=SAMPLED,
            trace_state=origin.state,
        )  # fmt: skip
        span = self._tracer.start_span(
            f"send {endpoint}",
            trace.set_span_in_context(trace.NonRecordingSpan(of_delivery)),
            SpanKind.CLIENT,
            attributes,
            start_time=int(started_at * NS),
        )
        return AttemptSpan(span, origin)

    def answered(self, attempt: AttemptSpan, row: AttemptRow, answer: Answer) -> None:
        """It was answered, or not; `row` is what is written down of it."""
        span = attempt.span
        if answer.status is not None:
            span.set_attribute("http.response.status_code", answer.status)
        if row.attempt > 1:
            span.set_attribute("http.request.resend_count", row.attempt - 1)
        span.set_attribute("outbox.outcome", row.outcome)
        if row.outcome != "delivered":
            span.set_attribute("error.type", error_type(answer))
            span.set_status(Status(StatusCode.ERROR, row.error))
        span.end(int((row.started_at + row.elapsed_s) * NS))

    def ended(
        self,
        endpoint: str,
        delivery: Delivery,
        outcome: str,
        attempts: int,
        began_at: float,
        now: float,
        origin: Origin,
    ) -> None:
        """A delivery that is traced was acknowledged or given up.

        Args:
            outcome: `delivered`, or why it was given up.
            began_at: when there was something to deliver, in epoch seconds.
        """
        # Both are asked for while it is begun, and before anything else can begin.
        self._ids.span_id = _span_id(delivery)
        self._ids.trace_id = origin.trace_id if origin.context is None else None
        attributes = {
            **_about(endpoint, delivery),
            "outbox.outcome": outcome,
            "outbox.attempts": attempts,
        }
        span = self._tracer.start_span(
            f"deliver {endpoint}",
            origin.context,
            SpanKind.PRODUCER,
            attributes,
            start_time=int(began_at * NS),
        )
        if outcome != "delivered":
            span.set_status(Status(StatusCode.ERROR, outcome))
        span.end(int(now * NS))

    def abandoned(self, attempt: AttemptSpan, now: float) -> None:
        """It was closed before it was answered."""
        attempt.span.set_attribute("outbox.outcome", "abandoned")
        attempt.span.set_status(Status(StatusCode.ERROR, "closed before it was answered"))
        attempt.span.end(int(now * NS))

    def trace_id(self, delivery: Delivery) -> str:
        """The trace of a delivery, sampled or not, as it is written in logs."""
        return trace.format_trace_id(origin_of(delivery).trace_id)


def _span_id(delivery: Delivery) -> int:
    digest = blake2b(f"{delivery.lane}/{delivery.seq}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) or 1


def _about(endpoint: str, delivery: Delivery) -> dict[str, str | int]:
    return {
        "messaging.system": "outbox",
        "messaging.operation.name": "deliver",
        "messaging.operation.type": "send",
        "messaging.destination.name": endpoint,
        "messaging.message.id": str(delivery.event_id),
        "outbox.event.type": delivery.type,
        "outbox.delivery.id": str(delivery.delivery_id),
        "outbox.lane": delivery.lane,
        "outbox.sequence": delivery.seq,
    }

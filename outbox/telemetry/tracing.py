"""One trace for each event: from the producer's transaction through every attempt.

    the producer's span, if it had one
    └── publish order.paid            by `outbox.publish`
        └── deliver billing           from the event's commit to its end, for each endpoint
            ├── send billing          one attempt
            └── send billing          another attempt, possibly by another replica
                └── the receiver's own spans

The ids are derived, not stored.  The trace id is that of the event's `traceparent`, or derived
from the event's id.  The id of the delivery's span is derived from its lane and sequence.  A
replica that takes over therefore continues the trace.  The delivery's span is exported when
the delivery completes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from yarl import URL

from outbox.telemetry.meters import error_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from outbox.core.delivery.commands import AttemptRow
    from outbox.core.model.delivery import Delivery
    from outbox.core.model.response import AttemptResult, Headers
    from outbox.telemetry.sampling import Sampling, TraceOrigin

NS = 1_000_000_000
SAMPLED = TraceFlags(TraceFlags.SAMPLED)

_propagator = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class AttemptSpan:
    """The span of an attempt."""

    span: Span
    origin: TraceOrigin

    @property
    def headers(self) -> Headers:
        """Headers that propagate the trace context to the receiver."""
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, trace.set_span_in_context(self.span))
        return tuple(carrier.items())


class PresetIdGenerator(RandomIdGenerator):
    """An id generator that uses preset ids once, and random ids otherwise."""

    def __init__(self) -> None:
        self.trace_id: int | None = None
        self.span_id: int | None = None

    def generate_trace_id(self) -> int:
        """The preset trace id, once, or a random one."""
        known, self.trace_id = self.trace_id, None
        return super().generate_trace_id() if known is None else known

    def generate_span_id(self) -> int:
        """The preset span id, once, or a random one."""
        known, self.span_id = self.span_id, None
        return super().generate_span_id() if known is None else known


class Tracing:
    """Creates the spans of deliveries and attempts.

    Args:
        provider: the SDK's tracer provider.
        ids: the id generator of `provider`.
        sampling: has the sampler of `provider`.
    """

    def __init__(
        self, provider: TracerProvider, ids: PresetIdGenerator, sampling: Sampling
    ) -> None:
        self._tracer = provider.get_tracer("outbox")
        self._ids = ids
        self.origin = sampling.origin
        """The trace origin of a delivery; None: it is not sampled."""

    def start_attempt(
        self,
        endpoint: str,
        url: str,
        delivery: Delivery,
        attempt: int,
        started_at: float,
        origin: TraceOrigin,
        together: int = 0,
    ) -> AttemptSpan:
        """Start the span of an attempt of a sampled delivery.

        Args:
            url: that of the endpoint.
            started_at: epoch seconds.
            together: deliveries in the batch; 0: the request is not a batch.
        """
        attributes = {
            **_about(endpoint, delivery), **_about_request(url), "outbox.attempt": attempt
        }  # fmt: skip
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

    def end_attempt(self, attempt: AttemptSpan, row: AttemptRow, response: AttemptResult) -> None:
        """End the span of a completed attempt; `row` is its row of the attempt log."""
        span = attempt.span
        if response.status is not None:
            span.set_attribute("http.response.status_code", response.status)
        if row.attempt > 1:
            span.set_attribute("http.request.resend_count", row.attempt - 1)
        span.set_attribute("outbox.outcome", row.outcome)
        if row.outcome != "delivered":
            span.set_attribute("error.type", error_type(response))
            span.set_status(Status(StatusCode.ERROR, row.error))
        span.end(int((row.started_at + row.elapsed_s) * NS))

    def record_delivery(
        self,
        endpoint: str,
        delivery: Delivery,
        outcome: str,
        attempts: int,
        began_at: float,
        now: float,
        origin: TraceOrigin,
    ) -> None:
        """Export the span of a sampled delivery that was acknowledged or dead-lettered.

        Args:
            outcome: `delivered`, or the reason of the dead letter.
            began_at: when the delivery became pending, in epoch seconds.
        """
        # `start_span` below uses both preset ids before any other span can start.
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

    def abandon_attempt(self, attempt: AttemptSpan, now: float) -> None:
        """End the span of an attempt that was cancelled."""
        attempt.span.set_attribute("outbox.outcome", "abandoned")
        attempt.span.set_status(Status(StatusCode.ERROR, "cancelled before the response"))
        attempt.span.end(int(now * NS))


def _span_id(delivery: Delivery) -> int:
    digest = blake2b(f"{delivery.lane}/{delivery.seq}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) or 1


@lru_cache(maxsize=1024)
def _about_request(url: str) -> Mapping[str, str | int]:
    """What an HTTP client's span has to say; a query may hold a secret.

    https://opentelemetry.io/docs/specs/semconv/http/http-spans/#http-client-span
    """
    target = URL(url)
    return {
        "http.request.method": "POST",
        "server.address": target.raw_host or "",
        "server.port": target.port or 0,
        "url.full": str(target.with_query("REDACTED") if target.query_string else target),
    }


def _about(endpoint: str, delivery: Delivery) -> dict[str, str | int]:
    return {
        "messaging.system": "outbox",
        "messaging.operation.name": "deliver",
        "messaging.operation.type": "send",
        "messaging.destination.name": endpoint,
        "messaging.message.id": str(delivery.event_id),
        "outbox.event.type": delivery.type,
        "outbox.delivery.id": delivery.message_id,
        "outbox.lane": delivery.lane,
        "outbox.sequence": delivery.seq,
    }

"""Trace sampling: which events are traced, and the origin of their trace.

Sampling is decided for every attempt and is negative for most, so it is implemented here
without the SDK's overhead.  A test compares the decisions with those of the SDK's samplers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from opentelemetry.context import Context

    from outbox.core.model.delivery import Delivery

SAMPLER, ARGUMENT = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
DEFAULT = "parentbased_always_on"
RATIOS = ("traceidratio", "parentbased_traceidratio")
KNOWN = (*RATIOS, "always_on", "always_off", DEFAULT, "parentbased_always_off")

TRACEPARENT = re.compile(rb'"traceparent"', re.IGNORECASE)
# A valid traceparent (W3C Trace Context, 3.2.2) with the sampled flag off.
UNSAMPLED = re.compile(
    rb'(?i:"traceparent")\s*:\s*'
    rb'"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][02468ace]"'
)
_LOW, _MIXER = (1 << 64) - 1, 0x9E3779B97F4A7C15F39CC0605CEDC835
"""The multiplier is odd, so that different events have different trace ids."""

_propagator = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class TraceOrigin:
    """The origin of an event's trace."""

    trace_id: int
    context: Context | None
    """The producer's context; None: the event has no valid traceparent."""
    state: trace.TraceState | None = None


class Sampling:
    """Sampling decisions.

    Args:
        rate: the share of events to trace, from 0 to 1.
        follows_producer: whether an event's traceparent decides (parent-based sampling).
    """

    def __init__(self, rate: float, *, follows_producer: bool) -> None:
        root = TraceIdRatioBased(rate)
        self._bound = root.bound
        self._follows = follows_producer
        self.sampler: Sampler = ParentBased(root) if follows_producer else root
        """The equivalent sampler of the SDK."""

    def origin(self, delivery: Delivery) -> TraceOrigin | None:
        """The origin of a delivery's trace; None: it is not sampled."""
        headers = delivery.headers
        if headers is not None and (match := TRACEPARENT.search(headers)):
            at = match.start()
            if self._follows and UNSAMPLED.match(headers, at) and not _is_repeated(headers, at):
                return None
            origin = origin_of(delivery)
            if origin.context is not None and self._follows:
                span_context = trace.get_current_span(origin.context).get_span_context()
                return origin if span_context.trace_flags.sampled else None
            return origin if origin.trace_id & _LOW < self._bound else None
        trace_id = trace_id_of(delivery.event_id)
        return TraceOrigin(trace_id, None) if trace_id & _LOW < self._bound else None


def _is_repeated(headers: bytes, at: int) -> bool:
    """Whether the header occurs again in another case; the last one takes precedence."""
    return TRACEPARENT.search(headers, at + 1) is not None


def origin_of(delivery: Delivery) -> TraceOrigin:
    """The origin of a delivery's trace, sampled or not."""
    if delivery.headers is not None and TRACEPARENT.search(delivery.headers):
        headers = orjson.loads(delivery.headers)
        context = _propagator.extract({name.lower(): headers[name] for name in headers})
        span_context = trace.get_current_span(context).get_span_context()
        if span_context.is_valid:
            return TraceOrigin(span_context.trace_id, context, span_context.trace_state)
    return TraceOrigin(trace_id_of(delivery.event_id), None)


def trace_id(delivery: Delivery) -> str:
    """The trace id of a delivery for logs, sampled or not."""
    return trace.format_trace_id(origin_of(delivery).trace_id)


def trace_id_of(event_id: UUID) -> int:
    """The trace id of an event without a traceparent, derived from its id.

    The UUID itself is unsuitable: its version and variant bits are constant, and ratio samplers
    use the upper bits of the lower half.
    """
    number = event_id.int
    return ((number ^ number >> 64) * _MIXER & (1 << 128) - 1) or 1


def configure_sampling(env: Mapping[str, str]) -> Sampling:
    """The sampling that OpenTelemetry's variables configure.

    Raises:
        UsageError: the sampler is unknown, or the ratio is invalid.
    """
    name = env.get(SAMPLER, "").strip().lower() or DEFAULT
    if name not in KNOWN:
        raise UsageError(f'{SAMPLER}: there is no sampler "{name}"; use one of {", ".join(KNOWN)}')
    rate = float(name.endswith("always_on"))
    if name in RATIOS:
        text = env.get(ARGUMENT, "").strip() or "1"
        try:
            rate = float(text)
        except ValueError:
            rate = -1.0
        if not 0 <= rate <= 1:
            raise UsageError(f'{ARGUMENT}: "{text}" is not a ratio from 0 to 1, such as 0.01')
    return Sampling(rate, follows_producer=name.startswith("parentbased"))

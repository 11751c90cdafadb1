"""Where an event's trace comes from, and whether it is traced at all.

This is asked of every attempt, and mostly the answer is no: so that is found out
without the SDK, in the SDK's words.  A test holds both against each other.
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

    from outbox.core.delivery.message import Delivery

SAMPLER, ARGUMENT = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
DEFAULT = "parentbased_always_on"
RATIOS = ("traceidratio", "parentbased_traceidratio")
KNOWN = (*RATIOS, "always_on", "always_off", DEFAULT, "parentbased_always_off")

TRACEPARENT = re.compile(rb'"traceparent"', re.IGNORECASE)
# One that is valid (W3C Trace Context, 3.2.2), and whose producer did not sample it.
UNSAMPLED = re.compile(
    rb'(?i:"traceparent")\s*:\s*'
    rb'"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][02468ace]"'
)
_LOW, _MIXER = (1 << 64) - 1, 0x9E3779B97F4A7C15F39CC0605CEDC835
"""The mixer is odd, so that different events have different traces."""

_propagator = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the trace of an event comes from."""

    trace_id: int
    context: Context | None
    """The producer's; None: it told of none."""
    state: trace.TraceState | None = None


class Sampling:
    """Which events are traced.

    Args:
        rate: the share of them, from 0 to 1.
        follows_producer: where an event comes with a trace, its producer has decided.
    """

    def __init__(self, rate: float, *, follows_producer: bool) -> None:
        root = TraceIdRatioBased(rate)
        self._bound = root.bound
        self._follows = follows_producer
        self.sampler: Sampler = ParentBased(root) if follows_producer else root
        """The same for the SDK."""

    def origin(self, delivery: Delivery) -> Origin | None:
        """Where its trace comes from; None: it is not traced."""
        headers = delivery.headers
        if headers is not None and (found := TRACEPARENT.search(headers)):
            at = found.start()
            if self._follows and UNSAMPLED.match(headers, at) and not _again(headers, at):
                return None
            origin = origin_of(delivery)
            if origin.context is not None and self._follows:
                said = trace.get_current_span(origin.context).get_span_context()
                return origin if said.trace_flags.sampled else None
            return origin if origin.trace_id & _LOW < self._bound else None
        trace_id = trace_id_of(delivery.event_id)
        return Origin(trace_id, None) if trace_id & _LOW < self._bound else None


def _again(headers: bytes, at: int) -> bool:
    """Whether the name is written once more, in other letters; then the last one counts."""
    return TRACEPARENT.search(headers, at + 1) is not None


def origin_of(delivery: Delivery) -> Origin:
    """The trace that a delivery is part of, sampled or not."""
    if delivery.headers is not None and TRACEPARENT.search(delivery.headers):
        headers = orjson.loads(delivery.headers)
        context = _propagator.extract({name.lower(): headers[name] for name in headers})
        said = trace.get_current_span(context).get_span_context()
        if said.is_valid:
            return Origin(said.trace_id, context, said.trace_state)
    return Origin(trace_id_of(delivery.event_id), None)


def trace_id_of(event_id: UUID) -> int:
    """The trace of an event that came with none.

    Not the UUID itself: some of its bits never change, and samplers go by the upper ones
    of its lower half.
    """
    number = event_id.int
    return ((number ^ number >> 64) * _MIXER & (1 << 128) - 1) or 1


def sampling(env: Mapping[str, str]) -> Sampling:
    """What OpenTelemetry's variables ask for.

    Raises:
        UsageError: a sampler that is not known, or a share that is none.
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
            raise UsageError(f'{ARGUMENT}: "{text}" is no share from 0 to 1, such as 0.01')
    return Sampling(rate, follows_producer=name.startswith("parentbased"))

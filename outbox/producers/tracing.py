"""Producer spans and trace context, with the application's OpenTelemetry.

Does nothing in an application that has not imported OpenTelemetry.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextmanager
def traced(what: str, count: int = 1) -> Iterator[None]:
    """Open a PRODUCER span around publishing; the events join its trace.

    Args:
        what: the event's type, or a description of the batch, for the span's name.
        count: the number of events.
    """
    # If the application has not imported OpenTelemetry, no span is active; importing it is slow.
    if "opentelemetry.trace" not in sys.modules:
        yield
        return
    from opentelemetry import trace

    attributes: dict[str, str | int] = {
        "messaging.system": "outbox",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "create",
    }
    if count > 1:
        attributes["messaging.batch.message_count"] = count
    tracer = trace.get_tracer("outbox")
    with tracer.start_as_current_span(
        f"publish {what}", kind=trace.SpanKind.PRODUCER, attributes=attributes
    ):
        yield


def add_trace_context(headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Add the current trace context (W3C Trace Context) to an event's headers."""
    if "opentelemetry.trace" not in sys.modules:
        return headers
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    if not carrier or any(name.lower() == "traceparent" for name in headers or ()):
        return headers
    return {**carrier, **(headers or {})}

"""The producer's part of an event's trace, with the application's own OpenTelemetry.

Nothing is imported, and nothing happens, in an application that does not use it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextmanager
def traced(what: str, count: int = 1) -> Iterator[None]:
    """A span of the application's: the events published in it belong to its trace.

    Args:
        what: the events' type, or how they are called together.
        count: how many there are.
    """
    # Without this module there is no span, and importing it is not free.
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


def with_trace(headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """An event's headers and the running trace context (W3C Trace Context)."""
    if "opentelemetry.trace" not in sys.modules:
        return headers
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    if not carrier or any(name.lower() == "traceparent" for name in headers or ()):
        return headers
    return {**carrier, **(headers or {})}

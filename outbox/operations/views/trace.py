"""JSON form of event traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.operations.event_trace import VERSION
from outbox.operations.views.merge import merge_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.operations.event_trace import EventTrace
    from outbox.operations.find_event import EventMatch


def trace_result(match: EventMatch, traces: Sequence[EventTrace]) -> dict[str, Any]:
    """JSON form of a lookup, with the trace of each event."""
    return {
        "version": VERSION,
        "found_by": match.by,
        "more": match.more,
        "events": [event_trace(each) for each in traces],
    }


def event_trace(trace: EventTrace) -> dict[str, Any]:
    """JSON form of one trace, with its diagnosis."""
    deliveries = [{**merge_fields(each), "state": each.state} for each in trace.deliveries]
    return merge_fields(trace) | {"deliveries": deliveries, "diagnosis": trace.diagnosis}

"""OpenTelemetry metrics of a receiver.

Only the OpenTelemetry API is used: without it, or without a MeterProvider, the instruments are
no-ops.
The only attribute is `outcome`, with the values of `RequestOutcome`; lanes, types and ids
have unbounded cardinality and are not attributes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from outbox.receiver.requests import RequestOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opentelemetry.metrics import MeterProvider

log = logging.getLogger("outbox.receiver")

# The default bucket boundaries of the API are for milliseconds.
PROCESSING_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_OUTCOMES = {each: {"outcome": each.value} for each in RequestOutcome}


class _NoMeter:
    """A meter and its instruments, each call of which does nothing."""

    def __getattr__(self, name: str) -> _NoMeter:
        return self

    def __call__(self, *_: object, **__: object) -> _NoMeter:
        return self


def _get_meter(provider: MeterProvider | None) -> Any:
    try:
        from opentelemetry.metrics import get_meter
    except ImportError:
        return _NoMeter()
    return get_meter("outbox.receiver", meter_provider=provider)


class ReceiverMetrics:
    """A receiver's instruments; their errors are logged, never raised.

    Args:
        provider: the meter provider; None selects the global one, even if it is set later.
    """

    def __init__(self, provider: MeterProvider | None = None) -> None:
        meter = _get_meter(provider)
        self._requests = meter.create_counter(
            "outbox.receiver.requests",
            "{request}",
            "Requests, or attempts to process an event of a stream, by outcome.",
        )
        self._in_flight = meter.create_up_down_counter(
            "outbox.receiver.requests.in_flight",
            "{request}",
            "Requests being processed, without those held for earlier deliveries.",
        )
        duration = (
            "outbox.receiver.request.duration",
            "s",
            "Time from a request to its response, including the time it was held.",
        )
        try:
            self._duration = meter.create_histogram(
                *duration, explicit_bucket_boundaries_advisory=PROCESSING_BOUNDS_S
            )
        except TypeError:  # An older API: the application sets the boundaries by a view.
            self._duration = meter.create_histogram(*duration)
        self._gaps = meter.create_counter(
            "outbox.receiver.gaps",
            "{delivery}",
            "Deliveries before which sequence numbers were missing.",
        )
        self._old = meter.create_counter(
            "outbox.receiver.old", "{delivery}", "Deliveries overtaken by a higher number."
        )
        self._overdue = meter.create_counter(
            "outbox.receiver.overdue",
            "{number}",
            "Missing sequence numbers overtaken by more than the tolerance.",
        )
        self._fetched = meter.create_counter(
            "outbox.receiver.fetched",
            "{delivery}",
            "Deliveries fetched from the relay and processed.",
        )
        self._lanes_stopped = meter.create_up_down_counter(
            "outbox.receiver.lanes.stopped",
            "{lane}",
            "Lanes of a stream whose reading has stopped, such as at a gap or a failing handler.",
        )
        self._has_begun = self._has_failed = False

    def in_flight(self, change: int) -> None:
        """Add `change` to the number of requests in flight."""
        self._record(self._in_flight.add, change)

    def request_ended(self, outcome: RequestOutcome, elapsed_s: float | None = None) -> None:
        """Count a request and its duration.

        Args:
            elapsed_s: the duration of processing; None: it was rejected before processing began.
        """
        self._record(self._requests.add, 1, _OUTCOMES[outcome])
        if elapsed_s is not None:
            self._record(self._duration.record, elapsed_s, _OUTCOMES[outcome])

    def delivery_committed(self, *, gap: bool, old: bool, overdue: int) -> None:
        """Count the observations of a committed delivery; `overdue` is an amount."""
        for counter, amount in ((self._gaps, gap), (self._old, old), (self._overdue, overdue)):
            if amount:
                self._record(counter.add, int(amount))

    def deliveries_fetched(self, deliveries: int) -> None:
        """Count deliveries fetched from the relay and processed."""
        self._record(self._fetched.add, deliveries)

    def lanes_stopped(self, change: int) -> None:
        """Add `change` to the number of lanes that are stopped."""
        self._record(self._lanes_stopped.add, change)

    def _record(
        self,
        record: Callable[[float, Mapping[str, str] | None], None],
        value: float,
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        try:
            if not self._has_begun:
                self._create_series()
            record(value, attributes)
        except Exception:
            # Logged once: a failing provider fails for every request.
            if not self._has_failed:
                self._has_failed = True
                log.exception(
                    "recording a metric failed; the receiver's metrics are incomplete from now on"
                )

    def _create_series(self) -> None:
        """Record zeros, because a series that starts at 1 shows no increase to `rate()`.

        Called at the first request, when the application has set its provider.
        """
        self._has_begun = True
        for counter in (self._gaps, self._old, self._overdue, self._fetched):
            counter.add(0)
        for attributes in _OUTCOMES.values():
            self._requests.add(0, attributes)

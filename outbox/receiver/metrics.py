"""What a receiver counts, for whichever MeterProvider the application has set.

Only OpenTelemetry's API is used: without a provider nothing happens.  The one attribute,
`outcome`, takes the values of `Ended`; lanes, types and ids have no end, and are none.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from opentelemetry.metrics import get_meter

from outbox.receiver.requests import Ended

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opentelemetry.metrics import MeterProvider

log = logging.getLogger("outbox.receiver")

# The API's own are for milliseconds.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_OUTCOMES = {each: {"outcome": each.value} for each in Ended}


class Metering:
    """A receiver's instruments.  Nothing that goes wrong with them is raised.

    Args:
        provider: None: the global one, also when it is set later than this is made.
    """

    def __init__(self, provider: MeterProvider | None = None) -> None:
        meter = get_meter("outbox.receiver", meter_provider=provider)
        self._requests = meter.create_counter(
            "outbox.receiver.requests", "{request}", "Requests, by what became of them."
        )
        self._in_flight = meter.create_up_down_counter(
            "outbox.receiver.requests.in_flight",
            "{request}",
            "Requests that are being processed; those that wait for others before them are not.",
        )
        self._duration = meter.create_histogram(
            "outbox.receiver.request.duration",
            "s",
            "How long a request took until its answer, what it waited for included.",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._gaps = meter.create_counter(
            "outbox.receiver.gaps", "{delivery}", "Deliveries before which numbers were missing."
        )
        self._old = meter.create_counter(
            "outbox.receiver.old", "{delivery}", "Deliveries that a higher number had overtaken."
        )
        self._overdue = meter.create_counter(
            "outbox.receiver.overdue",
            "{number}",
            "Numbers that were missing for longer than is tolerated.",
        )
        self._fetched = meter.create_counter(
            "outbox.receiver.fetched",
            "{delivery}",
            "Deliveries that were fetched from the relay, and processed.",
        )
        self._has_begun = self._has_failed = False

    def in_flight(self, change: int) -> None:
        """So many requests more, or less, are being processed."""
        self._tell(self._in_flight.add, change)

    def ended(self, outcome: Ended, elapsed_s: float | None = None) -> None:
        """A request was answered.

        Args:
            elapsed_s: None: it was turned away before it began.
        """
        self._tell(self._requests.add, 1, _OUTCOMES[outcome])
        if elapsed_s is not None:
            self._tell(self._duration.record, elapsed_s, _OUTCOMES[outcome])

    def taken(self, *, gap: bool, old: bool, overdue: int) -> None:
        """A delivery was committed; `overdue` numbers before it are given up for lost."""
        for counter, amount in ((self._gaps, gap), (self._old, old), (self._overdue, overdue)):
            if amount:
                self._tell(counter.add, int(amount))

    def fetched(self, deliveries: int) -> None:
        """So many were fetched, and processed."""
        self._tell(self._fetched.add, deliveries)

    def _tell(
        self,
        record: Callable[[float, Mapping[str, str] | None], None],
        value: float,
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        try:
            if not self._has_begun:
                self._begin()
            record(value, attributes)
        except Exception:
            # Once: a provider that fails does so for every request.
            if not self._has_failed:
                self._has_failed = True
                log.exception("this receiver's metrics are wrong from now on")

    def _begin(self) -> None:
        """Tell of noughts, since a series that begins at 1 is taken for one that does not grow.

        Not before the first request, when the application has set its provider.
        """
        self._has_begun = True
        for counter in (self._gaps, self._old, self._overdue, self._fetched):
            counter.add(0)
        for attributes in _OUTCOMES.values():
            self._requests.add(0, attributes)

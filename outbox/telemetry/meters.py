"""What is counted while the relay works: plain numbers, added to in well under a microsecond.

One `Meters` lives as long as the process, over all its sessions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from outbox.core.delivery.commands import DeadRange
from outbox.core.model.endpoint import OTHERS
from outbox.telemetry import catalogue
from outbox.telemetry.catalogue import ANSWERS, OUTCOMES
from outbox.telemetry.snapshot import Buckets, Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.core.delivery.commands import AttemptRow, DeadLetter
    from outbox.core.model.response import Answer
    from outbox.telemetry.catalogue import Metric
    from outbox.telemetry.snapshot import Series


class Histogram:
    """Counts values by the bucket that they fall into."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, metric: Metric) -> None:
        self._bounds = metric.bounds
        self._counts = [0] * (len(metric.bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """A value; below nothing counts as nothing, since clocks differ a little."""
        if value < 0.0:
            value = 0.0
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> Buckets:
        """The counts up to now."""
        return Buckets(tuple(self._counts), self._sum)


class EndpointMeters:
    """What is counted for one endpoint, or for all those that share a series."""

    __slots__ = ("attempts", "began_at", "deliveries", "duration", "latency", "owners")

    def __init__(self, began_at: float) -> None:
        # Or somewhat before, in epoch seconds.
        self.began_at = began_at
        # By outcome.
        self.deliveries: Counter[str] = Counter()
        # By outcome and error.
        self.attempts: Counter[tuple[str, str | None]] = Counter()
        self.duration = Histogram(catalogue.ATTEMPT_DURATION)
        self.latency = Histogram(catalogue.DELIVERY_LATENCY)
        # How many endpoints that are owned now count here.
        self.owners = 0

    def begin(self) -> None:
        """An endpoint counts here from now on: nothing of it has ended yet, and that is told.

        Whoever reads counters takes a series that begins at 5,000 for one that does not grow,
        and a backlog can be given up all at once.
        """
        self.deliveries.update(dict.fromkeys(OUTCOMES, 0))


class Meters:
    """Everything that a replica counts.

    Args:
        started_at: epoch seconds.
        endpoints_max: so many endpoints have series of their own.
    """

    def __init__(self, started_at: float = 0.0, endpoints_max: int = 100) -> None:
        self.endpoints_max = endpoints_max
        self._started_at = started_at
        self._named: dict[str, EndpointMeters] = {}
        self._looked_at = started_at
        self._other = EndpointMeters(started_at)
        self._retries: Counter[str] = Counter(dict.fromkeys(ANSWERS, 0))
        self._retry_delay = Histogram(catalogue.RETRY_DELAY)
        self._delivery_attempts = Histogram(catalogue.DELIVERY_ATTEMPTS)
        self.events = 0
        """Sequenced."""
        self.losses = 0
        """Of other replicas."""
        self.session_losses = 0

    # ------------------------------------------------------------- endpoints

    def begin(self) -> None:
        """A new session: nothing is owned yet."""
        for each in self._named.values():
            each.owners = 0

    def taken(self, name: str) -> EndpointMeters:
        """An endpoint is owned from now on; returns where it is counted.

        When there are more than have series of their own, those that came first keep them, and
        those that are owned no more lose them.
        """
        meters = self._named.get(name)
        if meters is None:
            if len(self._named) >= self.endpoints_max:
                gone = next((n for n, m in self._named.items() if not m.owners), None)
                if gone is None:
                    self._other.begin()
                    return self._other
                del self._named[gone]
            meters = self._named[name] = EndpointMeters(self._looked_at)
            meters.begin()
        meters.owners += 1
        return meters

    def left(self, meters: EndpointMeters) -> None:
        """An endpoint is not owned any more; what was counted stays until its place is needed."""
        if meters is not self._other:
            meters.owners -= 1

    def of(self, name: str) -> EndpointMeters:
        """Where an endpoint is counted."""
        return self._named.get(name, self._other)

    def label(self, name: str) -> str:
        """The value of the attribute `endpoint`."""
        return name if name in self._named else OTHERS

    # ------------------------------------------------------------ deliveries

    def attempted(self, meters: EndpointMeters, row: AttemptRow, answer: Answer) -> None:
        """A request was answered, or not."""
        delivered = row.outcome == "delivered"
        meters.attempts[row.outcome, None if delivered else error_type(answer)] += 1
        meters.duration.add(row.elapsed_s)
        if row.attempt > 1:
            self._retries[row.outcome] += 1

    def delivered(self, meters: EndpointMeters, attempts: int, latency_s: float | None) -> None:
        """A delivery was acknowledged.

        Args:
            latency_s: since the event was committed; None: it was sent again.
        """
        meters.deliveries["delivered"] += 1
        self._delivery_attempts.add(attempts)
        if latency_s is not None:
            meters.latency.add(latency_s)

    def waits(self, delay_s: float) -> None:
        """A delivery is tried again after so long."""
        self._retry_delay.add(delay_s)

    def given_up(self, meters: EndpointMeters, dead: DeadLetter | DeadRange) -> None:
        """A delivery was given up, or several together."""
        if isinstance(dead, DeadRange):
            self.ended(meters, dead.reason, dead.to_seq - dead.seq + 1)
            return
        meters.deliveries[dead.reason] += 1
        if dead.attempts:
            self._delivery_attempts.add(dead.attempts)

    def ended(self, meters: EndpointMeters, reason: str, deliveries: int) -> None:
        """Deliveries were given up together, unsent."""
        meters.deliveries[reason] += deliveries

    # -------------------------------------------------------------- snapshot

    def snapshot(self, at: float, gauges: Mapping[Metric, Series]) -> Snapshot:
        """Everything as it is now.

        Args:
            at: epoch seconds.
            gauges: what is not counted but looked at.
        """
        series: dict[Metric, Series] = {metric: {} for metric in catalogue.CATALOGUE}
        series.update(self._of_endpoints())
        series[catalogue.RETRIES] = {(k,): v for k, v in self._retries.items()}
        series[catalogue.RETRY_DELAY] = {(): self._retry_delay.buckets()}
        series[catalogue.DELIVERY_ATTEMPTS] = {(): self._delivery_attempts.buckets()}
        series[catalogue.EVENTS] = {(): self.events}
        series[catalogue.LOSSES] = {(): self.losses}
        series[catalogue.SESSION_LOSSES] = {(): self.session_losses}
        series.update(gauges)
        # One that got its place since then was never told of before.
        self._looked_at = at
        began = {n: m.began_at for n, m in self._named.items() if m.began_at != self._started_at}
        return Snapshot(self._started_at, at, series, began)

    def _of_endpoints(self) -> dict[Metric, Series]:
        series: defaultdict[Metric, dict[tuple[str | None, ...], float | Buckets]]
        series = defaultdict(dict)
        for name, each in (*self._named.items(), (OTHERS, self._other)):
            for outcome, count in each.deliveries.items():
                series[catalogue.DELIVERIES][name, outcome] = count
            for (outcome, error), count in each.attempts.items():
                series[catalogue.ATTEMPTS_MADE][name, outcome, error] = count
            for metric, histogram in (
                (catalogue.ATTEMPT_DURATION, each.duration),
                (catalogue.DELIVERY_LATENCY, each.latency),
            ):
                buckets = histogram.buckets()
                if buckets.count:
                    series[metric][name,] = buckets
        return dict(series)


def error_type(answer: Answer) -> str:
    """What went wrong, in few words: `5xx`, `timeout`."""
    if answer.failure is not None:
        return answer.failure.value
    return f"{(answer.status or 0) // 100}xx"

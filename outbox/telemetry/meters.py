"""Meters: counters and histograms of the relay, with updates well under a microsecond.

One `Meters` exists for the lifetime of the process, across sessions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from outbox.core.delivery.commands import DeadRange
from outbox.core.model.setting_types import OTHERS
from outbox.telemetry import catalogue
from outbox.telemetry.catalogue import ATTEMPT_OUTCOMES, DELIVERY_OUTCOMES
from outbox.telemetry.snapshot import Buckets, Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from outbox.core.delivery.commands import AttemptRow, DeadLetter, Successes
    from outbox.core.model.response import AttemptResult
    from outbox.telemetry.catalogue import Metric
    from outbox.telemetry.snapshot import Series


class Histogram:
    """A histogram with fixed buckets."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, metric: Metric) -> None:
        self._bounds = metric.bounds
        self._counts = [0] * (len(metric.bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add a value; a negative one counts as 0, because clocks differ slightly."""
        if value < 0.0:
            value = 0.0
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add_all(self, values: Iterable[float | None]) -> None:
        """Add the values that are not None, without a call for each."""
        counts, bounds, total = self._counts, self._bounds, self._sum
        for value in values:
            if value is not None:
                counts[bisect_left(bounds, value)] += 1
                if value > 0.0:
                    total += value
        self._sum = total

    def buckets(self) -> Buckets:
        """The current counts."""
        return Buckets(tuple(self._counts), self._sum)


class EndpointMeters:
    """The meters of one endpoint, or of all endpoints that share the series `(other)`."""

    __slots__ = ("attempts", "began_at", "deliveries", "duration", "latency", "owners")

    def __init__(self, began_at: float) -> None:
        # Epoch seconds; may be somewhat earlier than the first count.
        self.began_at = began_at
        # By outcome.
        self.deliveries: Counter[str] = Counter()
        # By outcome and error.
        self.attempts: Counter[tuple[str, str | None]] = Counter()
        self.duration = Histogram(catalogue.ATTEMPT_DURATION)
        self.latency = Histogram(catalogue.DELIVERY_LATENCY)
        # The number of owned endpoints that use these meters.
        self.owners = 0

    def begin(self) -> None:
        """Export all outcomes with the value 0.

        `rate` and `increase` ignore the first value of a series, and a backlog of thousands can
        be dead-lettered at once.
        """
        self.deliveries.update(dict.fromkeys(DELIVERY_OUTCOMES, 0))


class Meters:
    """All meters of a replica.

    Args:
        started_at: epoch seconds.
        endpoints_max: endpoints with their own series; the others share `(other)`.
    """

    def __init__(self, started_at: float = 0.0, endpoints_max: int = 100) -> None:
        self.endpoints_max = endpoints_max
        self._started_at = started_at
        self._named: dict[str, EndpointMeters] = {}
        self._snapshot_at = started_at
        self._other = EndpointMeters(started_at)
        self._retries: Counter[str] = Counter(dict.fromkeys(ATTEMPT_OUTCOMES, 0))
        self._retry_delay = Histogram(catalogue.RETRY_DELAY)
        self._delivery_attempts = Histogram(catalogue.DELIVERY_ATTEMPTS)
        self.events = 0
        """Events that were sequenced."""
        self.fed_deliveries = 0
        """Deliveries of earlier events that were sequenced for feeds."""
        self.losses = 0
        """Other replicas that were expired."""
        self.session_losses = 0
        self.contradictions = 0
        self.run_deliveries = 0
        """Deliveries that another one followed in a request run."""

    # ------------------------------------------------------------- endpoints

    def begin(self) -> None:
        """Start a new session, in which no endpoint is owned."""
        for each in self._named.values():
            each.owners = 0

    def count_contradiction(self) -> None:
        """Count a message that the second read of its proof aborted."""
        self.contradictions += 1

    def acquire(self, name: str) -> EndpointMeters:
        """Record that an endpoint is owned, and return its meters.

        Above `endpoints_max`, endpoints keep their series in order of acquisition, and endpoints
        that are no longer owned lose theirs.
        """
        meters = self._named.get(name)
        if meters is None:
            if len(self._named) >= self.endpoints_max:
                unowned = next((n for n, m in self._named.items() if not m.owners), None)
                if unowned is None:
                    self._other.begin()
                    return self._other
                del self._named[unowned]
            meters = self._named[name] = EndpointMeters(self._snapshot_at)
            meters.begin()
        meters.owners += 1
        return meters

    def release(self, meters: EndpointMeters) -> None:
        """Record that an endpoint is no longer owned; its series stays until another needs it."""
        if meters is not self._other:
            meters.owners -= 1

    def meters_for(self, name: str) -> EndpointMeters:
        """The meters of an endpoint."""
        return self._named.get(name, self._other)

    def label(self, name: str) -> str:
        """The value of the attribute `endpoint` for an endpoint."""
        return name if name in self._named else OTHERS

    # ------------------------------------------------------------ deliveries

    def record_attempt(
        self, meters: EndpointMeters, row: AttemptRow, response: AttemptResult
    ) -> None:
        """Count a completed request."""
        delivered = row.outcome == "delivered"
        meters.attempts[row.outcome, None if delivered else error_type(response)] += 1
        meters.duration.add(row.elapsed_s)
        if row.attempt > 1:
            self._retries[row.outcome] += 1

    def record_delivered(
        self, meters: EndpointMeters, attempts: int, latency_s: float | None
    ) -> None:
        """Count an acknowledged delivery.

        Args:
            latency_s: since the event's commit; None for replays and backfills.
        """
        meters.deliveries["delivered"] += 1
        self._delivery_attempts.add(attempts)
        if latency_s is not None:
            meters.latency.add(latency_s)

    def record_run(self, meters: EndpointMeters, results: Successes) -> None:
        """Count the successes of a request run."""
        count = len(results)
        meters.attempts["delivered", None] += count
        self.run_deliveries += count
        meters.duration.add_all(results.elapsed_s)
        self.record_accepted(meters, results)

    def record_accepted(self, meters: EndpointMeters, results: Successes) -> None:
        """Count the deliveries that a run or a batch has delivered."""
        count = len(results)
        meters.deliveries["delivered"] += count
        self._delivery_attempts.add(1, count)
        meters.latency.add_all(results.latencies_s)

    def record_retry_delay(self, delay_s: float) -> None:
        """Add the delay before a retry."""
        self._retry_delay.add(delay_s)

    def record_dead_letter(self, meters: EndpointMeters, dead: DeadLetter | DeadRange) -> None:
        """Count a dead letter, which may be a range of deliveries."""
        if isinstance(dead, DeadRange):
            self.record_dead_letters(meters, dead.reason, dead.to_seq - dead.seq + 1)
            return
        meters.deliveries[dead.reason] += 1
        if dead.attempts:
            self._delivery_attempts.add(dead.attempts)

    def record_dead_letters(self, meters: EndpointMeters, reason: str, deliveries: int) -> None:
        """Count deliveries that were dead-lettered together, unsent."""
        meters.deliveries[reason] += deliveries

    # -------------------------------------------------------------- snapshot

    def snapshot(self, at: float, gauges: Mapping[Metric, Series]) -> Snapshot:
        """A snapshot of all metrics.

        Args:
            at: epoch seconds.
            gauges: the current values of the gauges.
        """
        series: dict[Metric, Series] = {metric: {} for metric in catalogue.CATALOGUE}
        series.update(self._endpoint_series())
        series[catalogue.RETRIES] = {(k,): v for k, v in self._retries.items()}
        series[catalogue.RETRY_DELAY] = {(): self._retry_delay.buckets()}
        series[catalogue.DELIVERY_ATTEMPTS] = {(): self._delivery_attempts.buckets()}
        series[catalogue.RUN_DELIVERIES] = {(): self.run_deliveries}
        series[catalogue.EVENTS] = {(): self.events}
        series[catalogue.FED_DELIVERIES] = {(): self.fed_deliveries}
        series[catalogue.LOSSES] = {(): self.losses}
        series[catalogue.SESSION_LOSSES] = {(): self.session_losses}
        series[catalogue.PROOF_ABORTS] = {(): self.contradictions}
        series.update(gauges)
        # A series that was created since the last snapshot starts at that snapshot.
        self._snapshot_at = at
        began = {n: m.began_at for n, m in self._named.items() if m.began_at != self._started_at}
        return Snapshot(self._started_at, at, series, began)

    def _endpoint_series(self) -> dict[Metric, Series]:
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


def error_type(response: AttemptResult) -> str:
    """The attribute `error.type`: a status class such as `5xx`, or a failure such as `timeout`."""
    if response.failure is not None:
        return response.failure.value
    return f"{(response.status or 0) // 100}xx"

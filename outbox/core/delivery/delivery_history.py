"""Delivery history: how many deliveries succeeded and failed in each interval, and how fast.

The relay counts in memory and adds the counts to the table `delivery_history` together with the
lanes' checkpoints.  The table keeps 24 hours: each endpoint has one row for each interval of the
day, which replaces that of the day before.  A crash loses the counts of a few seconds.

Latencies are those of successful requests, in a histogram with fixed bounds.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.delivery.commands import Successes

HISTORY_INTERVAL_S = 300
INTERVALS = 288
"""24 hours."""
LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets; one more bucket has the rest.  The table depends on their number."""
ALL_ENDPOINTS = UUID(int=0)
"""The id under which the sum over all endpoints is stored."""


class IntervalCounts:
    """Counts of one endpoint."""

    __slots__ = ("failures", "latencies", "successes")

    def __init__(self) -> None:
        self.successes = 0
        """Deliveries that were acknowledged."""
        self.failures = 0
        """Requests that failed."""
        self.latencies = [0] * (len(LATENCY_BOUNDS_S) + 1)
        """The number of successes in each bucket of `LATENCY_BOUNDS_S`."""


class CountedDeliveries(NamedTuple):
    """What is added to the history of an endpoint."""

    endpoint_id: UUID
    counts: IntervalCounts


class DeliveryHistory:
    """The counts that are not written yet."""

    def __init__(self) -> None:
        # In the order in which the endpoints were first counted.
        self._counts: dict[UUID, IntervalCounts] = {}

    def __len__(self) -> int:
        """Number of endpoints with counts."""
        return len(self._counts)

    def add_successes(self, endpoint_id: UUID, elapsed_s: Sequence[float]) -> None:
        """Count deliveries that were acknowledged.

        Args:
            elapsed_s: the duration of the request of each.
        """
        counts = self._counts_of(endpoint_id)
        counts.successes += len(elapsed_s)
        latencies = counts.latencies
        for each in elapsed_s:
            latencies[bisect_left(LATENCY_BOUNDS_S, each)] += 1

    def add_run(self, endpoint_id: UUID, results: Successes) -> None:
        """Count the successes of a run or a batch."""
        if results:
            self.add_successes(endpoint_id, results.elapsed_s)

    def add_failure(self, endpoint_id: UUID) -> None:
        """Count a request that failed."""
        self._counts_of(endpoint_id).failures += 1

    def remove(self, endpoints_max: int) -> list[CountedDeliveries]:
        """Remove and return the counts of the endpoints that have waited longest, and their sum.

        In the order in which the rows are locked.
        """
        ids = list(islice(self._counts, endpoints_max))
        removed = [CountedDeliveries(each, self._counts.pop(each)) for each in ids]
        if removed:
            removed.append(
                CountedDeliveries(ALL_ENDPOINTS, _sum([each.counts for each in removed]))
            )
        # UUIDs compare more slowly than their values.
        return sorted(removed, key=lambda each: each.endpoint_id.int)

    def _counts_of(self, endpoint_id: UUID) -> IntervalCounts:
        counts = self._counts.get(endpoint_id)
        if counts is None:
            counts = self._counts[endpoint_id] = IntervalCounts()
        return counts


def _sum(all_counts: Sequence[IntervalCounts]) -> IntervalCounts:
    total = IntervalCounts()
    total.successes = sum(each.successes for each in all_counts)
    total.failures = sum(each.failures for each in all_counts)
    columns = zip(*(each.latencies for each in all_counts), strict=True)
    total.latencies = list(map(sum, columns))
    return total


def latency_quantile_s(latencies: Sequence[int], share: float) -> float | None:
    """A quantile of a histogram of latencies, in seconds; None: it is empty.

    Interpolated linearly within its bucket.  In the last bucket it is the bucket's lower bound.

    Args:
        share: 0.5 is the median.
    """
    sums = list(accumulate(latencies))
    if not sums or not sums[-1]:
        return None
    rank = share * sums[-1]
    bucket = next(n for n, below in enumerate(sums) if below >= rank and below)
    if bucket == len(LATENCY_BOUNDS_S):
        return LATENCY_BOUNDS_S[-1]
    low = LATENCY_BOUNDS_S[bucket - 1] if bucket else 0.0
    position = (rank - (sums[bucket] - latencies[bucket])) / latencies[bucket]
    return low + position * (LATENCY_BOUNDS_S[bucket] - low)

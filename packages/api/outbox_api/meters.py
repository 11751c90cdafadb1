"""Meters of the API: requests, their duration, and why they were refused, of each listener."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from aiohttp import web

from outbox.telemetry import catalogue
from outbox.telemetry.meters import Histogram
from outbox_api.problem import Refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CLOSED = "closed"
"""The status of a request whose client closed the connection before the response."""
STATUSES = ("2xx", "3xx", "4xx", "5xx", CLOSED)

REFUSAL: web.ResponseKey[Refusal] = web.ResponseKey("refusal", Refusal)
"""Why a request was refused, in its response."""


class ApiMeters:
    """The meters of a process.

    Args:
        started_at: epoch seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self, started_at: float = 0.0, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._started_at = started_at
        self._clock = clock
        self._in_progress: Counter[str] = Counter()
        # By listener and status.
        self._durations: defaultdict[tuple[str, str], Histogram] = defaultdict(
            lambda: Histogram(catalogue.API_REQUEST_DURATION)
        )
        # By listener and reason.
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._held = 0

    def count_held(self) -> None:
        """Count a request whose events were held."""
        self._held += 1

    def middleware(self, listener: str) -> Any:
        """Create the outermost middleware of a listener: it sees the response that is sent.

        Args:
            listener: the value of the attribute.
        """
        # Also at 0: the first value of a series is not an increase.
        self._in_progress[listener] += 0
        for status in STATUSES:
            self._durations[listener, status].add(0, times=0)
        for reason in Refusal:
            self._refusals[listener, reason] += 0

        @web.middleware
        async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
            began_at, status = self._clock(), CLOSED
            self._in_progress[listener] += 1
            try:
                response = await handler(request)
                status = f"{response.status // 100}xx"
                if (refusal := response.get(REFUSAL)) is not None:
                    self._refusals[listener, refusal] += 1
                return response
            finally:
                self._in_progress[listener] -= 1
                self._durations[listener, status].add(self._clock() - began_at)

        return count

    def to_json(self) -> dict[str, Any]:
        """The values in JSON types, for `outbox.telemetry.api_series`."""
        durations = [
            [key, {"counts": list(buckets.counts), "sum": buckets.sum}]
            for key, each in self._durations.items()
            for buckets in (each.buckets(),)
        ]
        in_progress = [[[listener], count] for listener, count in self._in_progress.items()]
        return {
            "started_at": self._started_at,
            "series": {
                catalogue.API_REQUEST_DURATION.name: durations,
                catalogue.API_REQUESTS_IN_PROGRESS.name: in_progress,
                catalogue.API_REFUSALS.name: [list(each) for each in self._refusals.items()],
                catalogue.API_HELD.name: [[[], self._held]],
            },
        }

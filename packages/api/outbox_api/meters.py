"""Meters of the API: requests, their duration, and why they were refused, of each listener."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from aiohttp import web

from outbox.telemetry import catalogue
from outbox.telemetry.meters import Histogram
from outbox_api.problem import Refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LISTENERS = ("api", "receivers")
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
        # Also at 0: the first value of a series is not an increase.
        self._durations = {
            (listener, status): Histogram(catalogue.API_REQUEST_DURATION)
            for listener in LISTENERS
            for status in STATUSES
        }
        self._refusals: Counter[tuple[str, str]] = Counter(
            {(listener, reason): 0 for listener in LISTENERS for reason in Refusal}
        )

    def middleware(self, listener: str) -> Any:
        """Create the outermost middleware of a listener: it sees the response that is sent."""

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
        in_progress = [[[listener], self._in_progress[listener]] for listener in LISTENERS]
        return {
            "started_at": self._started_at,
            "series": {
                catalogue.API_REQUEST_DURATION.name: durations,
                catalogue.API_REQUESTS_IN_PROGRESS.name: in_progress,
                catalogue.API_REFUSALS.name: [list(each) for each in self._refusals.items()],
            },
        }

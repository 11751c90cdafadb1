"""Cache of live status, for clients that poll.

The database is queried on demand, at most once per `FRESH_S` for each tenant, however many
clients poll.  Samples of the last minutes are kept while clients poll.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outbox_api import live_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from asyncpg import Connection

    from outbox_api.live_status import LiveStatus, LiveTotals

FRESH_S = 1.0
SAMPLES_MAX = 600
"""Ten minutes of samples."""
STALE_S = 10.0
"""While a refresh is running, other requests get a snapshot that is at most this old."""
FORGET_S = 600.0
"""An older snapshot is not used as the base of a rate."""
WATCHED_MAX = 50
"""Maximum number of tenants with cached samples."""
LIVE_ENDPOINTS, LIVE_ENDPOINTS_MAX = 30, 200


@dataclass(frozen=True, slots=True)
class Sample:
    """Rates per second over an interval that ends at `at`."""

    at: datetime
    seconds: float
    """Length of the interval; a long one is an average over a time without polling."""
    events: float
    """Events sequenced; 0 for a tenant."""
    deliveries: float
    """Deliveries created."""
    ended: float
    """Deliveries acknowledged or dead-lettered."""
    pending: int


class _TenantCache:
    """Snapshot and samples of one tenant, or of the whole installation."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self.snapshot: LiveStatus | None = None
        self.limit = 0
        """Number of endpoints in the snapshot."""
        self.large_request_at = float("-inf")
        """Time of the last request for more than `LIVE_ENDPOINTS` endpoints."""
        self.refreshed_at = float("-inf")
        self.refreshing = asyncio.Lock()

    def limited(self, limit: int) -> LiveStatus | None:
        """Return the snapshot with `limit` endpoints; None: it has too few."""
        if self.snapshot is None or self.limit < limit:
            return None
        return replace(self.snapshot, endpoints=self.snapshot.endpoints[:limit])


class LiveStatusCache:
    """Cache of live status per tenant.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._caches: OrderedDict[str | None, _TenantCache] = OrderedDict()

    async def snapshot(
        self, connection: Connection[Any], schema: str, tenant: str | None, limit: int
    ) -> tuple[LiveStatus, Iterable[Sample]]:
        """Return the current status, refreshed unless it is fresh, and the samples.

        Args:
            limit: maximum number of endpoints.
        """
        cache = self._caches.setdefault(tenant, _TenantCache())
        self._caches.move_to_end(tenant)
        while len(self._caches) > WATCHED_MAX:
            self._caches.popitem(last=False)
        is_recent = self._clock() - cache.refreshed_at < STALE_S
        if (
            cache.refreshing.locked()
            and is_recent
            and (snapshot := cache.limited(limit)) is not None
        ):
            return snapshot, cache.samples  # Do not wait for the lock while holding a connection.
        async with cache.refreshing:
            now = self._clock()
            age_s = now - cache.refreshed_at
            before = cache.snapshot if age_s < FORGET_S else None
            if age_s < FRESH_S and (snapshot := cache.limited(limit)) is not None:
                return snapshot, cache.samples
            if limit > LIVE_ENDPOINTS:
                cache.large_request_at = now
            # A request for more endpoints refreshes at once; later requests share that snapshot.
            cache.limit = (
                LIVE_ENDPOINTS_MAX if now - cache.large_request_at < FORGET_S else LIVE_ENDPOINTS
            )
            snapshot = await live_status.read_live_status(
                connection,
                schema,
                tenant=tenant,
                since_batch=None if before is None else before.totals.batch,
                limit=cache.limit,
            )
            if before is not None and age_s < FRESH_S:
                # The interval is too short for a rate: keep the base of the next one.
                cache.snapshot = replace(snapshot, totals=before.totals)
            else:
                if before is None:
                    cache.samples.clear()
                elif (sample := _sample(before.totals, snapshot.totals)) is not None:
                    cache.samples.append(sample)
                cache.snapshot, cache.refreshed_at = snapshot, now
            snapshot = cache.limited(limit)
            assert snapshot is not None
        return snapshot, cache.samples


def _sample(before: LiveTotals, now: LiveTotals) -> Sample | None:
    """Compute the rates between two totals; None when no time has passed."""
    seconds = (now.at - before.at).total_seconds()
    if seconds <= 0:
        return None
    sequenced = now.sequenced - before.sequenced
    # Sequenced deliveries that are no longer pending have ended.
    ended = sequenced - (now.pending - before.pending)
    return Sample(
        now.at,
        seconds,
        max(now.events, 0) / seconds,
        max(sequenced, 0) / seconds,
        max(ended, 0) / seconds,
        now.pending,
    )

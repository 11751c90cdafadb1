"""Cache of live status, for clients that poll.

The database is queried on demand: for each tenant, and each of two numbers of endpoints, at most
once per `FRESH_S`, however many clients poll.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox_api import live_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncpg import Connection

    from outbox_api.live_status import LiveStatus

FRESH_S = 1.0
STALE_S = 10.0
"""While a query is running, other requests get a status that is at most this old."""
CACHED_MAX = 50
LIVE_ENDPOINTS, LIVE_ENDPOINTS_MAX = 30, 200


class _Cached:
    """The last status that was read."""

    def __init__(self) -> None:
        self.status: LiveStatus | None = None
        self.read_at = float("-inf")
        self.reading = asyncio.Lock()


class LiveStatusCache:
    """Cache of live status per tenant.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._cached: OrderedDict[tuple[str | None, int], _Cached] = OrderedDict()

    async def read(
        self, connection: Connection[Any], schema: str, tenant: str | None, limit: int
    ) -> LiveStatus:
        """Return the current status.

        Args:
            tenant: only the endpoints of this tenant; None: all.
            limit: maximum number of endpoints.
        """
        read_max = LIVE_ENDPOINTS if limit <= LIVE_ENDPOINTS else LIVE_ENDPOINTS_MAX
        cached = self._cached.setdefault((tenant, read_max), _Cached())
        self._cached.move_to_end((tenant, read_max))
        while len(self._cached) > CACHED_MAX:
            self._cached.popitem(last=False)
        # Do not wait for the lock while holding a connection.
        if not cached.reading.locked() or self._clock() - cached.read_at >= STALE_S:
            async with cached.reading:
                now = self._clock()
                if now - cached.read_at >= FRESH_S:
                    cached.status = await live_status.read_live_status(
                        connection, schema, tenant=tenant, limit=read_max
                    )
                    cached.read_at = now
        assert cached.status is not None
        return replace(cached.status, endpoints=cached.status.endpoints[:limit])

"""Cache of the Prometheus exposition: frequent scrapes cost no more than one a second.

The health listener needs no authentication, so the number of scrapes is not trusted.  One
snapshot serves all scrapes of a second, and is rendered once per format.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from outbox.telemetry.prometheus import negotiate_format

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from outbox.telemetry.prometheus import ExpositionFormat, PrometheusRenderer
    from outbox.telemetry.snapshot import Snapshot

MAX_AGE_S = 1.0


class ExpositionCache:
    """Renders snapshots on demand, at most one in `MAX_AGE_S`.

    Args:
        take_snapshot: samples all metrics.
        renderer: renders a snapshot, in a thread.
        clock: seconds of any monotonic clock.
    """

    def __init__(
        self,
        take_snapshot: Callable[[], Awaitable[Snapshot]],
        renderer: PrometheusRenderer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._take_snapshot = take_snapshot
        self._renderer = renderer
        self._clock = clock
        self._snapshot: asyncio.Future[Snapshot] | None = None
        self._taken_at = 0.0
        self._rendered: dict[ExpositionFormat, asyncio.Task[tuple[bytes, str]]] = {}

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """The exposition, at most a second old, and its content type.

        Args:
            accept: the request's Accept header.
        """
        now = self._clock()
        if self._snapshot is None or (now - self._taken_at >= MAX_AGE_S and not self._is_busy()):
            self._taken_at = now
            self._snapshot = asyncio.ensure_future(self._take_snapshot())
            self._rendered = {}
        chosen = negotiate_format(accept)
        if chosen not in self._rendered:
            self._rendered[chosen] = asyncio.create_task(self._render(self._snapshot, chosen))
        # Shielded: a client that disconnects does not cancel the work of the others, and
        # does not let the next request repeat it.
        return await asyncio.shield(self._rendered[chosen])

    def _is_busy(self) -> bool:
        """Whether work has not ended; a slow snapshot does not let work pile up."""
        return any(not each.done() for each in self._rendered.values())

    async def _render(
        self, snapshot: asyncio.Future[Snapshot], chosen: ExpositionFormat
    ) -> tuple[bytes, str]:
        return await asyncio.to_thread(self._renderer.render, await snapshot, chosen)

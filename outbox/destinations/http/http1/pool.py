"""Connections that wait for their next request, each for the target it was made for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from outbox.destinations.interface import POOLS_MAX

if TYPE_CHECKING:
    from outbox.destinations.http.connector import Target
    from outbox.destinations.http.http1.connection import Connection


class Pools:
    """Kept connections.

    Args:
        keep_alive_s: one that is not used is kept so long; None: not at all.
    """

    def __init__(self, keep_alive_s: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._keep_alive_s = keep_alive_s
        # Of each target the one that was used longest ago comes first, and so do the targets.
        self._kept: dict[Target, list[Connection]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def take(self, target: Target) -> Connection | None:
        """One that can be used, if there is one."""
        kept = self._kept.get(target)
        found = None
        while kept and found is None:
            # The one that was used last is the least likely to be gone.
            connection = kept.pop()
            if connection.usable:
                found = connection
        if kept is not None and not kept:
            del self._kept[target]
        return found

    def keep(self, connection: Connection) -> None:
        """Nothing is under way on it any more."""
        if self._keep_alive_s is None:
            connection.close()
            return
        connection.free_since = self._loop.time()
        kept = self._kept.pop(connection.target, [])
        kept.append(connection)
        self._kept[connection.target] = kept
        if len(self._kept) > POOLS_MAX:
            for each in self._kept.pop(next(iter(self._kept))):
                each.close()
        if self._timer is None:
            self._timer = self._loop.call_later(self._keep_alive_s, self._sweep)

    def close(self) -> None:
        """Close all of them."""
        if self._timer is not None:
            self._timer.cancel()
        for kept in self._kept.values():
            for each in kept:
                each.close()
        self._kept.clear()

    def _sweep(self) -> None:
        """Close what has not been used for too long."""
        assert self._keep_alive_s is not None
        long_ago = self._loop.time() - self._keep_alive_s
        for target, kept in list(self._kept.items()):
            old = 0
            while old < len(kept) and kept[old].free_since <= long_ago:
                kept[old].close()
                old += 1
            del kept[:old]
            if not kept:
                del self._kept[target]
        self._timer = None
        if self._kept:
            oldest = min(kept[0].free_since for kept in self._kept.values())
            self._timer = self._loop.call_at(oldest + self._keep_alive_s, self._sweep)

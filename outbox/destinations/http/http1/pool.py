"""Connection pools: idle connections by target."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from outbox.destinations.interface import POOLS_MAX

if TYPE_CHECKING:
    from outbox.destinations.http.http1.connection import Connection
    from outbox.network.connector import Target


class ConnectionPools:
    """Idle connections by target.

    Args:
        keep_alive_s: idle time-out; None: no pooling.
    """

    def __init__(self, keep_alive_s: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._keep_alive_s = keep_alive_s
        # Targets, and connections of a target: least recently used first.
        self._idle: dict[Target, list[Connection]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def acquire(self, target: Target) -> Connection | None:
        """Take a usable connection from the pool; None: there is none."""
        idle = self._idle.get(target)
        if idle is None:
            return None
        reusable = None
        suspects: list[Connection] = []
        while idle and reusable is None:
            # LIFO: the most recently used one is least likely to be closed by the peer.
            connection = idle.pop()
            if not connection.usable:
                continue
            if connection.readable:
                # The loop reads it in its next iteration, and closes it, unless it is a TLS record
                # without data, such as a session ticket.
                suspects.append(connection)
            else:
                reusable = connection
        idle.extend(reversed(suspects))
        if not idle:
            del self._idle[target]
        return reusable

    def release(self, connection: Connection) -> None:
        """Return a connection to the pool after its request."""
        if self._keep_alive_s is None:
            connection.close()
            return
        connection.free_since = self._loop.time()
        idle = self._idle.pop(connection.target, [])
        idle.append(connection)
        self._idle[connection.target] = idle
        if len(self._idle) > POOLS_MAX:
            for each in self._idle.pop(next(iter(self._idle))):
                each.close()
        if self._timer is None:
            self._timer = self._loop.call_later(self._keep_alive_s, self._sweep)

    def close(self) -> None:
        """Close all idle connections."""
        if self._timer is not None:
            self._timer.cancel()
        for idle in self._idle.values():
            for each in idle:
                each.close()
        self._idle.clear()

    def _sweep(self) -> None:
        """Close connections whose idle time-out has passed."""
        assert self._keep_alive_s is not None
        idle_before = self._loop.time() - self._keep_alive_s
        for target, idle in list(self._idle.items()):
            old = 0
            while old < len(idle) and idle[old].free_since <= idle_before:
                idle[old].close()
                old += 1
            del idle[:old]
            if not idle:
                del self._idle[target]
        self._timer = None
        if self._idle:
            oldest = min(idle[0].free_since for idle in self._idle.values())
            self._timer = self._loop.call_at(oldest + self._keep_alive_s, self._sweep)

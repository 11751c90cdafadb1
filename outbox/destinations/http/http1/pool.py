"""Connection pools: idle connections by target."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from outbox.destinations.interface import POOLS_MAX

if TYPE_CHECKING:
    from outbox.destinations.http.http1.connection import Connection
    from outbox.network.connector import Target

SWEEP_S = 1.0
"""Interval at which idle connections are closed that are no longer used."""
KEEP_ALIVE_MARGIN_S = 1.0
"""How much earlier than the receiver an announced idle time-out ends: a request on its way."""


class ConnectionPools:
    """Idle connections by target.

    Args:
        keep_alive_s: idle time-out of connections whose receiver announces none; None: no pooling.
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
            if connection.idle_until <= self._loop.time() or not connection.reusable:
                connection.close()
            elif connection.readable:
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
        idle_s, announced_s = self._keep_alive_s, connection.keep_alive_s
        if idle_s is not None and announced_s is not None:
            idle_s = announced_s - KEEP_ALIVE_MARGIN_S
        if idle_s is None or idle_s <= 0:
            connection.close()
            return
        connection.idle_until = self._loop.time() + idle_s
        idle = self._idle.pop(connection.target, [])
        idle.append(connection)
        self._idle[connection.target] = idle
        if len(self._idle) > POOLS_MAX:
            for each in self._idle.pop(next(iter(self._idle))):
                each.close()
        if self._timer is None:
            self._timer = self._loop.call_later(SWEEP_S, self._sweep)

    def close(self) -> None:
        """Close all idle connections."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for idle in self._idle.values():
            for each in idle:
                each.close()
        self._idle.clear()

    def _sweep(self) -> None:
        """Close connections whose idle time-out has passed, or that may not be reused."""
        now = self._loop.time()
        for target, idle in list(self._idle.items()):
            kept = []
            for each in idle:
                if each.idle_until > now and each.reusable:
                    kept.append(each)
                else:
                    each.close()
            idle[:] = kept
            if not idle:
                del self._idle[target]
        self._timer = self._loop.call_later(SWEEP_S, self._sweep) if self._idle else None

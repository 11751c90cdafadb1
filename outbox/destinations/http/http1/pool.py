"""Connection pools: idle connections by target."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from outbox.network.reuse_limits import AGE_MAX_S

if TYPE_CHECKING:
    from outbox.destinations.http.http1.connection import Connection
    from outbox.network.connector import Target

SWEEP_S = 1.0
"""Interval at which idle connections are closed that are no longer used."""
KEEP_ALIVE_MARGIN_S = 1.0
"""How much earlier than the receiver an announced idle time-out ends: a request on its way."""
CLOSED_TOGETHER = 16
"""Idle connections that are closed when the process lacks resources for a new one, about."""

# What an idle connection takes in memory: measured, and rounded up.
PLAIN_BYTES = 4 << 10
TLS_BYTES = 44 << 10
ASYNCIO_TLS_BYTES = 300 << 10
"""In the event loops of asyncio itself, which have a buffer of 256 KiB for each."""


class ConnectionPools:
    """Idle connections by target.

    Args:
        keep_alive_s: idle time-out of connections whose receiver announces none; None: no pooling.
        bytes_max: what idle connections may take in memory.
    """

    def __init__(self, keep_alive_s: float | None, bytes_max: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._keep_alive_s = keep_alive_s
        self._bytes_max = bytes_max
        # Of the idle connections.
        self._bytes = 0
        is_of_asyncio = isinstance(self._loop, asyncio.BaseEventLoop)
        self._tls_bytes = ASYNCIO_TLS_BYTES if is_of_asyncio else TLS_BYTES
        # Targets, and connections of a target: least recently used first.
        self._idle: dict[Target, list[Connection]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def bytes_of(self, target: Target) -> int:
        """What an idle connection takes in memory."""
        return self._tls_bytes if target.secure else PLAIN_BYTES

    def acquire(self, target: Target) -> Connection | None:
        """Take a usable connection from the pool; None: there is none."""
        idle = self._idle.get(target)
        if not idle:
            return None
        reusable = None
        suspects: list[Connection] = []
        while idle and reusable is None:
            # LIFO: the most recently used one is least likely to be closed by the peer.
            connection = idle.pop()
            self._bytes -= connection.idle_bytes
            if connection.idle_until <= self._loop.time() or not connection.reusable:
                connection.close()
            elif connection.readable:
                # The loop reads it in its next iteration, and closes it, unless it is a TLS record
                # without data, such as a session ticket.
                suspects.append(connection)
            else:
                reusable = connection
        for suspect in reversed(suspects):
            idle.append(suspect)
            self._bytes += suspect.idle_bytes
        return reusable

    def release(self, connection: Connection) -> None:
        """Return a connection to the pool after its request."""
        idle_s, announced_s = self._keep_alive_s, connection.keep_alive_s
        if idle_s is not None and announced_s is not None:
            idle_s = min(announced_s - KEEP_ALIVE_MARGIN_S, AGE_MAX_S)
        if idle_s is None or idle_s <= 0:
            connection.close()
            return
        connection.idle_until = self._loop.time() + idle_s
        idle = self._idle.pop(connection.target, [])
        idle.append(connection)
        self._idle[connection.target] = idle
        self._bytes += connection.idle_bytes
        while self._bytes > self._bytes_max:
            for each in self._pop_oldest():
                each.close()
        if self._timer is None:
            self._timer = self._loop.call_later(SWEEP_S, self._sweep)

    def free_resources(self) -> bool:
        """Close some idle connections; returns whether there were any.

        What they had is free in the next iteration of the loop: they do not wait for their peers.
        """
        closed = 0
        while self._bytes and closed < CLOSED_TOGETHER:
            for each in self._pop_oldest():
                each.abort()
                closed += 1
        return closed > 0

    def close(self) -> None:
        """Close all idle connections."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._idle:
            for each in self._pop_oldest():
                each.close()

    def _pop_oldest(self) -> list[Connection]:
        """Remove the idle connections of the least recently used target."""
        popped = self._idle.pop(next(iter(self._idle)))
        self._bytes -= sum(each.idle_bytes for each in popped)
        return popped

    def _sweep(self) -> None:
        """Close connections whose idle time-out has passed, and forget those that have ended.

        Their names are looked up again when they are used, not each second.
        """
        now = self._loop.time()
        for target, idle in list(self._idle.items()):
            kept = []
            for each in idle:
                if each.idle_until > now and each.usable:
                    kept.append(each)
                else:
                    each.close()
                    self._bytes -= each.idle_bytes
            idle[:] = kept
            if not idle:
                del self._idle[target]
        self._timer = self._loop.call_later(SWEEP_S, self._sweep) if self._idle else None

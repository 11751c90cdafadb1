"""Sends the requests of delivery runs that follow the responses of one pass of the event loop.

In steps for all of these connections: first all decide, then all write, then all prepare.  Each
step runs the same code again and again.  One connection at a time took almost twice the CPU time,
because reading, deciding, writing and preparing evict each other's code from the processor's
caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from outbox.destinations.http.http1.connection import Connection


class FollowUps:
    """Collects connections with a response in a delivery run, and serves them together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._connections: list[Connection] = []

    def add(self, connection: Connection) -> None:
        """Serve a connection after the responses that are being read now."""
        if not self._connections:
            self._loop.call_soon(self._serve)
        self._connections.append(connection)

    def _serve(self) -> None:
        connections, self._connections = self._connections, []
        sending = [each for each in connections if each.take_following()]
        for each in sending:
            each.write_following()
        for each in sending:
            each.prepare_next()

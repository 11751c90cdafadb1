"""A TCP port that can be closed and reopened.

While it is closed, the kernel refuses connections, as when a server is down; a bound socket
reserves the port meanwhile.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HOST = "127.0.0.1"
BACKLOG = 1024


class PortGate:
    """A port on loopback, open or shut.

    Args:
        protocol_factory: makes the protocol of each connection.
    """

    def __init__(self, protocol_factory: Callable[[], asyncio.Protocol]) -> None:
        self._protocol_factory = protocol_factory
        self._server: asyncio.Server | None = None
        # Bound but never listening: it reserves the port while the gate is shut.
        self._reservation = _bound(0)
        self.port: int = self._reservation.getsockname()[1]

    async def open(self) -> None:
        """Start to listen, unless it is open."""
        if self._server is None:
            self._server = await asyncio.get_running_loop().create_server(
                self._protocol_factory, sock=_bound(self.port), backlog=BACKLOG
            )

    def shut(self) -> None:
        """Refuse new connections; existing ones stay open."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        """Shut the gate and release the port."""
        self.shut()
        self._reservation.close()


def _bound(port: int) -> socket.socket:
    """Bind a socket to the port, shared with SO_REUSEPORT."""
    bound = socket.socket()
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((HOST, port))
    except BaseException:
        bound.close()
        raise
    bound.setblocking(False)
    return bound

"""A port of this machine that can be shut and opened again.

While it is shut, connecting is refused by the kernel, as when a server is
down; the port stays ours, so that nobody else can take it meanwhile.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HOST = "127.0.0.1"
BACKLOG = 1024


class Door:
    """A listening port, open or shut.

    Args:
        guest: makes the protocol of each connection.
    """

    def __init__(self, guest: Callable[[], asyncio.Protocol]) -> None:
        self._guest = guest
        self._server: asyncio.Server | None = None
        # Bound and never listening: it keeps the port while nobody listens.
        self._holder = _bound(0)
        self.port: int = self._holder.getsockname()[1]

    async def open(self) -> None:
        """Listen; nothing to do when it is open."""
        if self._server is None:
            self._server = await asyncio.get_running_loop().create_server(
                self._guest, sock=_bound(self.port), backlog=BACKLOG
            )

    def shut(self) -> None:
        """Refuse new connections; those that there are go on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        """Shut it for good."""
        self.shut()
        self._holder.close()


def _bound(port: int) -> socket.socket:
    """A socket at the port, beside others of ours that are bound to it."""
    bound = socket.socket()
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((HOST, port))
    except BaseException:
        bound.close()
        raise
    bound.setblocking(False)
    return bound

"""One relay's way to the database, which can be cut, blocked and hung.

Only this proxy's connections are ever touched, so that whatever else uses the
database does not notice.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, cast

from outbox.devtools.chaos.port_gate import Door

if TYPE_CHECKING:
    from collections.abc import Iterator

GHOST_S = 5.0
"""A half-open session stays at the server for so long after the relay left it,
until keepalives would notice."""
STARTUP_BYTES_MAX = 65536
KEY_DATA, READY = b"K", b"Z"


class Proxy:
    """Passes connections on to one address.

    Args:
        host: a name, an address, or the directory of a Unix socket.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self.door = Door(lambda: _Near(self))
        self.links: set[Link] = set()
        self.muted = False

    @property
    def local(self) -> bool:
        """The server is reached by a Unix socket."""
        return self._host.startswith("/")

    def cut(self) -> None:
        """Reset every connection, on both sides."""
        for link in list(self.links):
            link.cut()

    def mute(self) -> None:
        """Let nothing pass any more, neither on old connections nor on new ones."""
        self.muted = True
        for link in self.links:
            link.muted = True

    def heal(self) -> None:
        """New connections work again; muted ones never will."""
        self.muted = False

    def sessions(self) -> Iterator[tuple[int | None, int | None]]:
        """(backend pid, client port) of each connection: what is known of it."""
        for link in self.links:
            if not link.ghost:
                yield link.backend_pid, link.client_port

    def close(self) -> None:
        """The end."""
        self.door.close()
        self.cut()

    async def dial(self, link: Link) -> None:
        """Connect to the server, for a relay that has just connected here."""
        loop = asyncio.get_running_loop()
        try:
            if self.local:
                path = f"{self._host}/.s.PGSQL.{self._port}"
                await loop.create_unix_connection(lambda: _Far(link), path)
            else:
                await loop.create_connection(lambda: _Far(link), self._host, self._port)
        except OSError:
            link.cut()


class Link:
    """Two connections that are one to those at its ends."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.muted = proxy.muted
        self.ghost = False
        self.near: asyncio.Transport | None = None
        self.far: asyncio.Transport | None = None
        self.backend_pid: int | None = None
        self.client_port: int | None = None
        self._waiting: list[bytes] = []
        self._startup: bytes | None = b""
        self._dialling: asyncio.Task[None] | None = None

    def arrived(self, near: asyncio.Transport) -> None:
        self.near = near
        self.proxy.links.add(self)
        self._dialling = asyncio.get_running_loop().create_task(self.proxy.dial(self))

    def dialled(self, far: asyncio.Transport) -> None:
        self.far = far
        if self.near is None or self.near.is_closing():
            self.cut()
            return
        if not self.proxy.local:
            self.client_port = far.get_extra_info("sockname")[1]
        for data in self._waiting:
            far.write(data)
        self._waiting.clear()

    def to_server(self, data: bytes) -> None:
        if self.muted:
            return
        if self.far is None:
            self._waiting.append(data)
        else:
            self.far.write(data)

    def to_relay(self, data: bytes) -> None:
        if self.muted or self.near is None:
            return
        if self._startup is not None:
            self._read_startup(data)
        self.near.write(data)

    def lost(self, *, at_server: bool) -> None:
        """One side ended; in a half-open connection the other one does not hear of it."""
        if not self.muted:
            # What the other one was told before still reaches it.
            for side in (self.near, self.far):
                if side is not None:
                    side.close()
            self._forget()
        elif not at_server and not self.ghost:
            self.ghost = True
            asyncio.get_running_loop().call_later(GHOST_S, self.cut)

    def cut(self) -> None:
        """Reset both sides."""
        for side in (self.near, self.far):
            if side is not None:
                side.abort()
        self._forget()

    def _forget(self) -> None:
        self.near = self.far = None
        self.proxy.links.discard(self)

    def _read_startup(self, data: bytes) -> None:
        """Find the backend's number, which the server tells before the first query.

        After an answer to SSLRequest of one letter all is encrypted, and the
        port on the way to the server has to tell which session it is.
        """
        if self._startup == b"" and data in (b"S", b"N", b"G"):
            if data == b"S":
                self._startup = None
            return
        known = (self._startup or b"") + data
        at = 0
        while at + 5 <= len(known):
            (size,) = struct.unpack_from("!i", known, at + 1)
            if known[at : at + 1] == KEY_DATA and at + 9 <= len(known):
                (self.backend_pid,) = struct.unpack_from("!i", known, at + 5)
            if self.backend_pid is not None or known[at : at + 1] == READY or size < 4:
                self._startup = None
                return
            at += 1 + size
        self._startup = known if len(known) < STARTUP_BYTES_MAX else None


class _Side(asyncio.Protocol):
    """One end; what cannot be written to the other one is not read here."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def _other(self) -> asyncio.Transport | None:
        raise NotImplementedError

    def pause_writing(self) -> None:
        other = self._other()
        if other is not None and not other.is_closing():
            other.pause_reading()

    def resume_writing(self) -> None:
        other = self._other()
        if other is not None and not other.is_closing():
            other.resume_reading()


class _Near(_Side):
    """The relay's end."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__(Link(proxy))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.link.arrived(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        self.link.to_server(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.link.lost(at_server=False)

    def _other(self) -> asyncio.Transport | None:
        return self.link.far


class _Far(_Side):
    """The server's end."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.link.dialled(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        self.link.to_relay(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.link.lost(at_server=True)

    def _other(self) -> asyncio.Transport | None:
        return self.link.near

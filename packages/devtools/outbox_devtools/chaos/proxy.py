"""TCP proxy between one client and the database, which can be cut, blocked, hung and half-sent.

The client is a relay, or a command of an operator.  Only connections through this proxy are
affected, so other users of the database are not.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from outbox_devtools.chaos.port_gate import PortGate

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

CLIENT_CLOSED_S = 5.0
"""How long the server keeps a half-open session after the relay closed it, in seconds;
stands for TCP keepalive."""
STARTUP_BYTES_MAX = 65536
KEY_DATA, READY = b"K", b"Z"


@dataclass(slots=True)
class Interruption:
    """What happens once in the middle of what a client sends."""

    pieces_before: int
    """Pieces of data that still pass; a client sends about one for each response it gets."""
    share: float
    """Share of the next piece that passes; the client sends nothing after it."""
    act: Callable[[], None]


class Proxy:
    """Forwards connections to one address.

    Args:
        host: a name, an address, or the directory of a Unix socket.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self.gate = PortGate(lambda: _Near(self))
        self.links: set[Link] = set()
        self.muted = False
        self.interruption: Interruption | None = None
        """The next interruption of any connection."""

    @property
    def local(self) -> bool:
        """The server is reached through a Unix socket."""
        return self._host.startswith("/")

    def cut(self) -> None:
        """Reset all connections on both sides."""
        for link in list(self.links):
            link.cut()

    def mute(self, *, for_good: bool = False) -> None:
        """Drop all data, on existing and new connections, without closing them.

        Args:
            for_good: the server keeps the sessions even after the client has closed them.
        """
        self.muted = True
        for link in self.links:
            link.mute(for_good=for_good)

    def resume(self) -> None:
        """Forward new connections again; muted ones stay muted."""
        self.muted = False

    def hang_half_sent(self, rng: random.Random) -> int | None:
        """Let one connection hang in the middle of what the relay sends next, for good.

        Returns:
            The pid of its backend; None: there is no connection.
        """
        links = [link for link in self.links if link.backend_pid is not None and not link.muted]
        if not links:
            return None
        link = rng.choice(sorted(links, key=lambda each: each.backend_pid or 0))
        link.interruption = Interruption(0, rng.random(), partial(link.mute, for_good=True))
        return link.backend_pid

    def sessions(self) -> Iterator[tuple[int | None, int | None]]:
        """Yield (backend pid, client port) of each connection, as far as known."""
        for link in self.links:
            if not link.client_closed:
                yield link.backend_pid, link.client_port

    def close(self) -> None:
        """Close the port and reset all connections."""
        self.gate.close()
        self.cut()

    async def dial(self, link: Link) -> None:
        """Connect to the server for a new connection of the relay."""
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
    """A pair of connections, to the relay and to the server."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.muted = proxy.muted
        self.for_good = False
        """The server keeps the session even after the client has closed it."""
        self.client_closed = False
        self.interruption: Interruption | None = None
        self.interrupted = False
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
        if self.muted or self.interrupted:
            return
        interruption = self.interruption or self.proxy.interruption
        if interruption is None:
            self._forward(data)
        elif interruption.pieces_before:
            interruption.pieces_before -= 1
            self._forward(data)
        else:
            self.interruption = self.proxy.interruption = None
            self.interrupted = True
            self._forward(data[: max(1, int(interruption.share * len(data)))])
            interruption.act()

    def _forward(self, data: bytes) -> None:
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

    def mute(self, *, for_good: bool) -> None:
        """Drop all data from now on, in both directions."""
        self.muted = True
        self.for_good = self.for_good or for_good

    def lost(self, *, at_server: bool) -> None:
        """Handle the end of one side; a half-open link keeps the other side open."""
        if not self.muted:
            # `close` flushes data that was already received.
            for side in (self.near, self.far):
                if side is not None:
                    side.close()
            self._forget()
        elif not at_server and not self.client_closed:
            self.client_closed = True
            if not self.for_good:
                asyncio.get_running_loop().call_later(CLIENT_CLOSED_S, self.cut)

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
        """Read the backend's pid from BackendKeyData, sent before ReadyForQuery.

        After the one-byte response S to SSLRequest the stream is encrypted; the session is
        then identified by its client port.
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
    """One end of a link, with backpressure: reading pauses while the other end is full."""

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
    """The end towards the relay."""

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
    """The end towards the server."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.link.dialled(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        self.link.to_relay(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.link.lost(at_server=True)

    def _other(self) -> asyncio.Transport | None:
        return self.link.near

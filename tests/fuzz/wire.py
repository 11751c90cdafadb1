"""An in-memory network: the real transport, with a scripted receiver.

Names, sockets and TLS are replaced; everything from the connector's pool and aiohttp's parser
up to the `AttemptResult` is the production code. The clock is virtual, so that a receiver that
sends nothing for a minute costs nothing.

A script consists of bytes, which are sent unchanged, except for these, which are actions:

    ␞  the next segment begins            ␛  the connection is reset
    ␜  the receiver closes                ␚  nothing arrives for five seconds
    ␙  the next byte is sent, whatever it is
    ␘  the last segment is sent a hundred times more
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

from tests.support.virtual_time import VirtualTimeLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

SEGMENT, EOF, RESET, PAUSE, LITERAL, AGAIN = 0x1E, 0x1C, 0x1B, 0x1A, 0x19, 0x18
PAUSE_S = 5.0
TIMES = 100
STEPS_MAX = 2000


def segments(script: bytes, *, drip: bool = False) -> list[bytes | int]:
    """Parse a script into steps: bytes to send, or an action.

    Args:
        drip: Send every byte as a segment of its own.
    """
    steps: list[bytes | int] = []
    segment = bytearray()

    def send() -> None:
        if segment:
            steps.append(bytes(segment))
            segment.clear()

    bytes_left = iter(script)
    for byte in bytes_left:
        if byte in (EOF, RESET, PAUSE, SEGMENT, AGAIN):
            send()
            if byte == AGAIN:
                steps += steps[-1:] * TIMES
            elif byte != SEGMENT:
                steps.append(byte)
            continue
        segment.append(next(bytes_left, byte) if byte == LITERAL else byte)
        if drip:
            send()
    send()
    return steps[:STEPS_MAX]


class Wire(asyncio.Transport):
    """One connection, as the sender sees it."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        # A connected socket: the sender polls whether it is readable.
        sock, self._peer = socket.socketpair()
        super().__init__({"socket": sock, "peername": ("127.0.0.1", 80)})
        self.written = bytearray()
        self._protocol = protocol
        self._sock = sock
        self._closing = False
        self._paused = False
        self._waiting: list[bytes] = []

    # ---------------------------------------------------------- sender side

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.written += data
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MemoryLoop)
        if not self._closing:
            loop.asked(self)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._end(None)

    def abort(self) -> None:
        self._end(None)

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self.feed(data)

    def is_reading(self) -> bool:
        return not self._paused

    # ------------------------------------------------------- receiver side

    def feed(self, data: bytes) -> None:
        """Receive these bytes."""
        if self._closing:
            return
        if self._paused:
            self._waiting.append(data)
        else:
            self._protocol.data_received(data)

    async def play(self, steps: list[bytes | int]) -> None:
        """Execute a script."""
        for step in steps:
            if isinstance(step, bytes):
                self.feed(step)
                await asyncio.sleep(0)
            elif step == PAUSE:
                await asyncio.sleep(PAUSE_S)
            elif self._closing:
                return
            elif step == EOF:
                self._protocol.eof_received()
                self._end(None)
            else:
                self._end(ConnectionResetError(104, "Connection reset by peer"))

    def _end(self, error: Exception | None) -> None:
        if self._closing:
            return
        self._closing = True
        self._sock.close()
        self._peer.close()
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, error)


class MemoryLoop(VirtualTimeLoop):
    """An event loop whose connections call `asked` with every request."""

    asked: Callable[[Wire], None]

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """Nobody is there to say no."""

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Any, *_: Any, sock: socket.socket, **__: Any
    ) -> tuple[Any, Any]:
        """Create a connection without a network."""
        protocol = protocol_factory()
        sock.close()
        wire = Wire(protocol)
        protocol.connection_made(wire)
        return wire, protocol

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine and every task that it started."""
        try:
            self.run_until_complete(main)
        finally:
            for task in asyncio.all_tasks(self):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    self.run_until_complete(task)

"""Servers on 127.0.0.1 between a client and PostgreSQL, or in place of it."""

from __future__ import annotations

import asyncio
import struct
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from outbox_devtools.listening import Handler as Handler
from outbox_devtools.listening import listening as listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

_SSL_REQUEST = 80877103


async def client_messages(reader: asyncio.StreamReader) -> AsyncIterator[tuple[bytes, bytes]]:
    """The messages of a client of PostgreSQL, each with its type; startup packets have none."""
    while True:
        size = await reader.readexactly(4)
        body = await reader.readexactly(struct.unpack("!I", size)[0] - 4)
        yield b"", size + body
        if body != struct.pack("!I", _SSL_REQUEST):
            break
    while True:
        head = await reader.readexactly(5)
        yield head[:1], head + await reader.readexactly(struct.unpack("!I", head[1:])[0] - 4)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(65536):
        yield data


async def _single_messages(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    with suppress(asyncio.IncompleteReadError):
        async for _, data in client_messages(reader):
            yield data


def forward_to(socket_path: str, replaced: Mapping[bytes, bytes] | None = None) -> Handler:
    """Forward to a unix socket and back.

    Args:
        replaced: what the client gets instead of some bytes of the server, of the same length.
    """

    async def pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replaced: Mapping[bytes, bytes]
    ) -> None:
        while data := await reader.read(65536):
            for old, new in replaced.items():
                assert len(old) == len(new)
                data = data.replace(old, new)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(socket_path)
        try:
            await asyncio.gather(pump(reader, back, {}), pump(there, writer, replaced or {}))
        finally:
            back.close()

    return handler


class Line:
    """A connection through `Lines`."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self.hangs = False
        """Whether data is accepted from both sides, and none is forwarded."""
        self.flows = asyncio.Event()
        """While this is not set, data of the server waits, and the server blocks."""
        self.flows.set()
        self.mute = False
        """The same for data of the server only."""
        self._ends: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        """Abort the connection."""
        for end in self._ends:
            end.transport.abort()

    async def pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, responses: bool
    ) -> None:
        """Forward data and the end of the stream."""

        def is_hanging() -> bool:
            return self.hangs or (self.mute and responses)

        by_message = self._lines.by_message and not responses
        async for data in _single_messages(reader) if by_message else _chunks(reader):
            if responses:
                await self.flows.wait()
            if is_hanging():
                continue
            last = not responses and self._lines.stop_at(data)
            self.hangs |= last
            if not last or self._lines.forward_last_data:
                writer.write(data)
                await writer.drain()
        if not is_hanging():
            writer.close()

    async def connect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, socket_path: str
    ) -> None:
        """Serve a client until one side ends."""
        there, back = await asyncio.open_unix_connection(socket_path)
        self._ends = [writer, back]
        try:
            await asyncio.gather(
                self.pump(reader, back, responses=False), self.pump(there, writer, responses=True)
            )
        finally:
            back.transport.abort()


class Lines:
    """A proxy to a unix socket, each connection of which can be made to hang."""

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self.opened: list[Line] = []
        """The connections, in the order in which they were opened."""
        self.attempts = 0
        self.hanging = False
        """Whether new connections hang from the start, as old ones do after `hang`."""
        self.refusing = False
        """Whether new connections are closed at once."""
        self.last_words: bytes | None = None
        """The next connection on which a client sends this data hangs then."""
        self.forward_last_data = True
        """Whether that data is still forwarded."""
        self.by_message = False
        """Whether the data of a client is split into messages, which it usually sends together."""

    def hang(self) -> None:
        """Let all connections hang until `heal`."""
        self.hanging = True
        for line in self.opened:
            line.hangs = True

    def cut(self) -> None:
        """Close all connections and refuse new ones until `heal`."""
        self.refusing = True
        for line in self.opened:
            line.cut()

    def stop_at(self, data: bytes) -> bool:
        """Whether the connection hangs after this data."""
        if self.last_words is None or self.last_words not in data:
            return False
        self.last_words = None
        return True

    def heal(self) -> None:
        """Let new connections through; hanging ones stay hanging."""
        self.hanging = self.refusing = False

    async def handler(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The handler for `listening`."""
        self.attempts += 1
        if self.refusing:
            writer.transport.abort()
            return
        line = Line(self)
        line.hangs = self.hanging
        self.opened.append(line)
        await line.connect(reader, writer, self._socket_path)


@asynccontextmanager
async def through_lines(
    socket_dir: Path, database: str, user: str = "postgres"
) -> AsyncIterator[tuple[Lines, str]]:
    """A proxy to a server, and the DSN of the proxy."""
    lines = Lines(str(socket_dir / ".s.PGSQL.5432"))
    async with listening(lines.handler) as port:
        yield lines, f"postgresql://{user}@127.0.0.1:{port}/{database}"


def refuse_with(sqlstate: str, message: str) -> Handler:
    """Respond to the startup packet with an error of PostgreSQL's protocol."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            (size,) = struct.unpack("!i", await reader.readexactly(4))
            packet = await reader.readexactly(size - 4)
            if struct.unpack("!i", packet[:4])[0] != _SSL_REQUEST:
                break
            writer.write(b"N")
        fields = f"SFATAL\0VFATAL\0C{sqlstate}\0M{message}\0\0".encode()
        writer.write(b"E" + struct.pack("!i", len(fields) + 4) + fields)
        await writer.drain()

    return handler


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    """Accept all data and never respond."""
    while await reader.read(65536):
        pass

"""A TCP proxy in front of a broker that cuts, holds and releases the bytes of a connection."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class Wire:
    """Connections through the proxy, all of which it treats alike."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self.port = 0
        self.host = ""
        self.connections = 0
        self.request_bytes = 0
        """Received from clients since `count`."""
        self.response_bytes = 0
        """Received from the server since `count`."""
        self._requests_left: int | None = None
        self._responses_left: int | None = None
        self._cuts_once = False
        self._holding = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._held: list[tuple[asyncio.StreamWriter, bytes]] = []
        self.rewrite_response: Callable[[bytes], bytes] = lambda data: data
        self.mute = False
        """Whether the server's bytes are dropped."""

    @property
    def is_used(self) -> bool:
        """Whether a client is connected."""
        return bool(self._writers)

    def count(self) -> None:
        self.request_bytes = self.response_bytes = 0

    def cut_after(
        self, *, requests: int | None = None, responses: int | None = None, once: bool = False
    ) -> None:
        """Close the connection after this many more bytes of one side; None: never."""
        self._requests_left, self._responses_left = requests, responses
        self._cuts_once = once

    @property
    def is_cutting(self) -> bool:
        """Whether a connection is still to be cut."""
        return self._requests_left is not None or self._responses_left is not None

    def _was_cut(self) -> None:
        if self._cuts_once:
            self.cut_after()

    def hold(self) -> None:
        """Keep the requests from now on, also after their client has gone."""
        self._holding = True

    @property
    def held_bytes(self) -> int:
        return sum(len(data) for _, data in self._held)

    async def release(self, size: int | None = None) -> None:
        """Send the first bytes of what is held, or all of it."""
        self._holding = False
        for writer, data in self._held:
            part = data if size is None else data[:size]
            with suppress(OSError):
                writer.write(part)
                await writer.drain()
            if size is not None:
                size -= len(part)
        for writer in {writer for writer, _ in self._held}:
            writer.close()
        self._held.clear()

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        responses = asyncio.create_task(self._pump_responses(server_reader, writer))
        self._writers |= {writer, server_writer}
        try:
            await self._pump_requests(reader, server_writer, writer)
        finally:
            writer.transport.abort()
            if not self._holding:
                server_writer.close()
            responses.cancel()
            await asyncio.gather(responses, return_exceptions=True)
            self._writers -= {writer, server_writer}

    async def _pump_requests(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                self.request_bytes += len(data)
                if self._holding:
                    self._held.append((writer, data))
                    continue
                left = self._requests_left
                if left is not None:
                    data = data[:left]
                    self._requests_left = left - len(data)
                writer.write(data)
                await writer.drain()
                if self._requests_left == 0 and left is not None:
                    self._was_cut()
                    client.transport.abort()
                    return

    async def _pump_responses(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                self.response_bytes += len(data)
                if self.mute:
                    continue
                data = self.rewrite_response(data)
                left = self._responses_left
                if left is not None:
                    data = data[:left]
                    self._responses_left = left - len(data)
                writer.write(data)
                await writer.drain()
                if self._responses_left == 0 and left is not None:
                    self._was_cut()
                    break
        # The client sees the end of the bytes that it got.
        with suppress(OSError):
            writer.close()


@asynccontextmanager
async def wire_to(port: int, *, host: str = "127.0.0.1", own_port: int = 0) -> AsyncIterator[Wire]:
    """A proxy on `host` to a port of 127.0.0.1."""
    wire = Wire("127.0.0.1", port)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(wire.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, host, own_port)
    wire.host, wire.port = server.sockets[0].getsockname()[:2]
    try:
        yield wire
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        wire.close()

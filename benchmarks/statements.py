"""Counts a relay's statements at a proxy between it and its PostgreSQL.

A proxy is necessary, because PostgreSQL itself counts transactions only, unless it has an extension
that not every installation has.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

from outbox.store.connection.dsn import parse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.postgres import Database

SSL_REQUEST = 80877103
STATEMENTS = (b"Q", b"E")
"""The messages that execute something: a simple query, and Execute."""


class Counter:
    """Counts the statements that pass the proxy."""

    def __init__(self) -> None:
        self.statements = 0

    async def count(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a client's messages and count them."""
        code = SSL_REQUEST
        while (
            code == SSL_REQUEST
        ):  # PostgreSQL refuses (for example SSL), and the client begins again.
            head = await reader.readexactly(8)
            size, code = struct.unpack("!ii", head)
            writer.write(head + await reader.readexactly(size - len(head)))
        while True:
            head = await reader.readexactly(5)
            (size,) = struct.unpack("!i", head[1:])
            writer.write(head + await reader.readexactly(size - 4))
            self.statements += head[:1] in STATEMENTS
            await writer.drain()


@asynccontextmanager
async def counting(database: Database) -> AsyncIterator[tuple[str, Counter]]:
    """Run a proxy; return a DSN that leads through it, and its counter."""
    where = parse(database.dsn, source="--dsn", env={})
    host, server_port = where.addresses[0]
    counter = Counter()
    serving: set[asyncio.Task[None]] = set()

    async def back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        if host.startswith("/"):
            path = f"{host}/.s.PGSQL.{server_port}"
            from_server, to_server = await asyncio.open_unix_connection(path)
        else:
            from_server, to_server = await asyncio.open_connection(host, server_port)
        ways = [
            asyncio.ensure_future(counter.count(reader, to_server)),
            asyncio.ensure_future(back(from_server, writer)),
        ]
        try:
            # The connection has ended on either side.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.close()
            to_server.close()
            serving.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    who = ":".join(quote(each, safe="") for each in (where.user, where.password) if each)
    try:
        yield f"postgresql://{who}@127.0.0.1:{port}/{database.name}?sslmode=disable", counter
    finally:
        server.close()
        if serving:
            # The relays have ended, and so do their connections.
            await asyncio.wait(serving, timeout=5)

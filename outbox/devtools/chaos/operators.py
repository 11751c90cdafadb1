"""Operators whose connection to the database stops in the middle of a command, for good."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from outbox.config import Settings
from outbox.devtools.chaos.port_gate import HOST
from outbox.devtools.chaos.proxy import Proxy
from outbox.devtools.chaos.proxy_dsn import proxied_dsn
from outbox.errors import OutboxError
from outbox.store.connection import dsn
from outbox.store.connection.connect import CONNECTION_ERRORS
from outbox.store.connection.operator import connect_operator

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from asyncpg import Connection

    from outbox.store.connection.dsn import Dsn

PIECES_MAX = 6
"""A command sends about as many pieces of data, so few of them are completed."""
KILLED_AFTER_S = 2.0
"""The operator gives up, and its process ends without a word to the server."""


class Operators:
    """Sends commands over connections of their own, through a proxy that can let them hang."""

    def __init__(self, address: Dsn, schema: str) -> None:
        (server,) = address.addresses
        self._address = address
        self._schema = schema
        self._proxy = Proxy(*server)

    async def open(self) -> None:
        """Open the proxy's port."""
        await self._proxy.gate.open()

    def close(self) -> None:
        """Close the port, and reset all connections."""
        self._proxy.close()

    async def hang_in(
        self, command: Callable[[Connection[Any]], Awaitable[object]], rng: random.Random
    ) -> str:
        """Execute a command on a connection that stops somewhere in the middle of it.

        The server keeps the session, which waits for the rest of a message.

        Returns:
            What became of the command: "completed", "silent" or the error.
        """
        given = proxied_dsn(self._address, HOST, self._proxy.gate.port)
        connection = await connect_operator(
            dsn.parse(given, source="outbox prove", env={}),
            Settings(schema_name=self._schema),
            "outbox-prove-operator",
        )
        self._proxy.hang_each(rng, PIECES_MAX)
        try:
            async with asyncio.timeout(KILLED_AFTER_S):
                await command(connection)
        except TimeoutError:
            return "silent"
        except (*CONNECTION_ERRORS, OutboxError) as error:
            return str(error)
        finally:
            with suppress(*CONNECTION_ERRORS):
                connection.terminate()
        return "completed"

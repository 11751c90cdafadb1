"""One connection to Redis or Valkey, through which calls go in groups.

Calls that wait while a group is out form the next group: they are written together, and responded
in order.  A group whose responses do not come ends the connection.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from outbox.core.model.response import Failure
from outbox.destinations.interface import NotConnected

GROUP_BYTES = 4 << 20
"""Bytes after which a group takes no further call."""


class Opener(Protocol):
    """Opens the streams of a connection."""

    async def __call__(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises NotConnected."""
        ...


class NotSent(Exception):
    """The call was not sent; the cause is in its argument."""

    def __init__(self, cause: NotConnected | RedisError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class ResponseLost(Exception):
    """The call may have been executed; the message says what happened."""


class _OwnStreams(Connection):
    """redis-py's connection over streams that are opened here, where each address is checked."""

    def __init__(self, opener: Opener, **settings: Any) -> None:
        super().__init__(
            **settings, retry=Retry(NoBackoff(), 0), protocol=2, driver_info=None,
            socket_timeout=None, socket_connect_timeout=None,
        )  # fmt: skip
        self._opener = opener

    # The only method that redis-py calls to open a connection, with these two results.
    async def _connect(self) -> None:
        self._reader, self._writer = await self._opener()


class _Call:
    __slots__ = ("packed", "response")

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        self.response: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class GroupedConnection:
    """A connection that is opened when it is needed, and again after it ended.

    Args:
        settings: username, password and db.
        timeout_s: for the responses of a group.
    """

    def __init__(self, opener: Opener, timeout_s: float, **settings: Any) -> None:
        self._opener = opener
        self._timeout_s = timeout_s
        self._settings = settings
        self._connection: Connection | None = None
        self._waiting: list[_Call] = []
        # Held while a group is out.
        self._exchanging = asyncio.Lock()
        self._is_closed = False

    async def call(self, packed: bytes) -> Any:
        """Execute a command, which is in the protocol's form.

        Raises:
            RedisError: the server's error.
            NotSent: nothing was sent.
            ResponseLost: the response did not come; the connection is closed.
        """
        call = _Call(packed)
        self._waiting.append(call)
        try:
            async with self._exchanging:
                if not call.response.done():
                    await self._exchange()
        finally:
            if call in self._waiting:
                self._waiting.remove(call)
        return call.response.result()

    async def _exchange(self) -> None:
        """Send a group of the waiting calls, and read their responses."""
        try:
            connection = await self._connected()
        except (NotConnected, RedisError) as error:
            group, self._waiting = self._waiting, []
            for call in group:
                _fail(call, NotSent(error))
            return
        group = self._next_group()
        read = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.send_packed_command(
                    [call.packed for call in group], check_health=False
                )
                for call in group:
                    try:
                        response = await connection.read_response(disconnect_on_error=False)
                    except RedisError as error:
                        if not is_response(error):
                            raise
                        _fail(call, error)
                    else:
                        if not call.response.done():
                            call.response.set_result(response)
                    read += 1
        except (OSError, TimeoutError, RedisError, asyncio.IncompleteReadError) as error:
            await self._drop()
            text = "no response in time" if isinstance(error, TimeoutError) else str(error)
            for call in group[read:]:
                _fail(call, ResponseLost(text or type(error).__name__))
        except BaseException:
            # The task that reads for all of them was cancelled.
            for call in group[read:]:
                _fail(
                    call, ResponseLost("the connection was closed while it waited for the response")
                )
            await self._drop()
            raise

    def _next_group(self) -> list[_Call]:
        count = size = 0
        while count < len(self._waiting) and size < GROUP_BYTES:
            size += len(self._waiting[count].packed)
            count += 1
        group, self._waiting = self._waiting[:count], self._waiting[count:]
        return group

    async def _connected(self) -> Connection:
        """The open connection.

        Raises:
            NotConnected: no connection could be established.
            RedisError: the server did not accept it.
        """
        if self._is_closed:
            raise NotConnected(Failure.CONNECT, "the connection was closed")
        if self._connection is not None and self._connection.is_connected:
            return self._connection
        connection = _OwnStreams(self._opener, **self._settings)
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.connect()  # type: ignore[no-untyped-call]
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if isinstance(error.__cause__, NotConnected):
                raise error.__cause__ from None
            if isinstance(error, (OSError, TimeoutError, RedisError)) and not is_response(error):
                raise unreachable(error) from error
            raise
        self._connection = connection
        return connection

    async def _drop(self) -> None:
        """Close the connection; what was not sent yet is lost with it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)

    async def aclose(self) -> None:
        """Close the connection for ever; calls in flight lose their responses."""
        self._is_closed = True
        await self._drop()


def is_response(error: Exception) -> bool:
    """Whether the server responded with this error; redis-py has no class for these."""
    return isinstance(error, ResponseError) or getattr(error, "status_code", None) is not None


def unreachable(error: Exception) -> NotConnected:
    """The error for a connection that broke while it was set up."""
    text = "no response in time" if isinstance(error, TimeoutError) else str(error)
    return NotConnected(Failure.CONNECT, text or type(error).__name__)


def _fail(call: _Call, error: Exception) -> None:
    if not call.response.done():
        call.response.set_exception(error)
        # Its task may have been cancelled.
        call.response.exception()

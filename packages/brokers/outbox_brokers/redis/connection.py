"""One connection to Redis or Valkey, through which calls go in groups.

Calls that wait while a group is out form the next group: they are written together, and their
responses come in order.  A group whose responses do not come ends the connection, with everything
that is not sent yet.

The exchange runs in a task of its own, so that a call can be cancelled, or end in time, while the
calls beside it go on.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, cast

from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from outbox.core.model.response import Failure
from outbox.network.errors import NotConnected
from outbox.network.reuse_limits import RESEND_WITHIN_S, peer_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.network.reuse_limits import ReuseLimits

REDIS_REPLY_BYTES_MAX = 64 * 1024
"""Bytes that the server may send for one call, and for the authentication."""
REDIS_REPLY_LINES_MAX = 1000
"""Lines that it may send for one call: the library reads each value of an array by itself, and
the event loop does nothing else meanwhile.  INFO has a few hundred."""
USUAL_REPLY_BYTES = 1024
USUAL_REPLY_LINES = 16
"""What it may send for each further call of a group."""
GROUP_BYTES = 4 << 20
"""Bytes after which a group takes no further call."""
_CLOSED = "the endpoint's broker was closed"
_OTHER_SERVER = "READONLY"
"""The server became a replica: after a failover, a new connection may reach the primary."""


class BoundedProtocol(asyncio.StreamReaderProtocol):
    """asyncio's protocol of streams, which ends the connection when the server sends too much.

    redis-py reads whatever length a reply announces into memory.
    """

    def __init__(self) -> None:
        self._loop_of_streams = asyncio.get_running_loop()
        self._reader_of_streams = asyncio.StreamReader(
            limit=REDIS_REPLY_BYTES_MAX, loop=self._loop_of_streams
        )
        super().__init__(self._reader_of_streams, loop=self._loop_of_streams)
        self._made: asyncio.Transport | None = None
        self.is_untouched = True
        """Whether the server has sent nothing since `expect`."""
        self._bytes_left = REDIS_REPLY_BYTES_MAX
        self._lines_left = REDIS_REPLY_LINES_MAX

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Not asyncio's class, if the loop is uvloop's.
        self._made = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.is_untouched = False
        self._bytes_left -= len(data)
        self._lines_left -= data.count(b"\n")
        if self._bytes_left >= 0 and self._lines_left >= 0:
            super().data_received(data)
            return
        text = "the server sent more for a call than a response has"
        self._reader_of_streams.set_exception(ConnectionError(text))
        assert self._made is not None
        self._made.abort()

    def expect(self, replies: int) -> None:
        """Bound what the server sends from now on."""
        self.is_untouched = True
        self._bytes_left = REDIS_REPLY_BYTES_MAX + (replies - 1) * USUAL_REPLY_BYTES
        self._lines_left = REDIS_REPLY_LINES_MAX + (replies - 1) * USUAL_REPLY_LINES

    def streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The streams of the connection that was made."""
        assert self._made is not None
        reader = self._reader_of_streams
        return reader, asyncio.StreamWriter(self._made, self, reader, self._loop_of_streams)


class Opener(Protocol):
    """Opens a connection."""

    async def __call__(self, factory: Callable[[], BoundedProtocol]) -> BoundedProtocol:
        """Raises NotConnected."""
        ...


class NotSent(Exception):
    """The call was not sent; the cause is in its argument."""

    def __init__(self, cause: NotConnected | RedisError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class ResponseLost(Exception):
    """The call may have been executed; the message says what happened."""


class ClosedWhileIdle(ResponseLost):
    """The server closed the idle connection while the call was on its way."""


class _OwnStreams(Connection):
    """redis-py's connection over streams that are opened here, where each address is checked."""

    def __init__(
        self, opener: Opener, new_limits: Callable[[], ReuseLimits], **settings: Any
    ) -> None:
        super().__init__(
            **settings, retry=Retry(NoBackoff(), 0), protocol=2, driver_info=None,
            socket_timeout=None, socket_connect_timeout=None,
        )  # fmt: skip
        self._opener = opener
        self._limits = new_limits()
        self.has_served = False
        """Whether it had calls before."""
        self._protocol: BoundedProtocol | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    # The only method that redis-py calls to open a connection, with these two results.
    async def _connect(self) -> None:
        self._protocol = await self._opener(BoundedProtocol)
        self._streams = self._reader, self._writer = self._protocol.streams()

    def expect(self, replies: int) -> None:
        """Bound what the server sends for the next calls."""
        assert self._protocol is not None
        self._protocol.expect(replies)

    @property
    def is_untouched(self) -> bool:
        """Whether the server has sent nothing since the last calls were sent."""
        return self._protocol is not None and self._protocol.is_untouched

    @property
    def is_usable(self) -> bool:
        """Whether it may carry more calls: by its age and address, and because the server has not
        closed it, as servers do with idle connections.
        """
        if self._streams is None or not self.is_connected:
            return False
        reader, writer = self._streams
        is_open = not reader.at_eof() and not writer.transport.is_closing()
        return is_open and self._limits.allow(self)

    @property
    def address(self) -> str | None:
        """IP address of the server."""
        return peer_address(None if self._streams is None else self._streams[1].transport)

    async def abort(self) -> None:
        """Close it without sending what is buffered, which redis-py's `disconnect` still sends."""
        if self._streams is not None:
            self._streams[1].transport.abort()
        with suppress(Exception):
            await self.disconnect(nowait=True)


class _Call:
    __slots__ = ("connection", "packed", "response")

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        self.response: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.connection: _OwnStreams | None = None
        """The connection on which it was sent; None: it waits."""


class GroupedConnection:
    """A connection that is opened when it is needed, and again after it ended.

    Args:
        new_limits: the limits of a connection that is opened now.
        settings: host, port, username, password and db.
        timeout_s: time-out of one call, connecting included.
        connect_timeout_s: time-out of one connection, authentication included.
    """

    def __init__(
        self,
        opener: Opener,
        new_limits: Callable[[], ReuseLimits],
        timeout_s: float,
        connect_timeout_s: float,
        **settings: Any,
    ) -> None:
        self._opener = opener
        self._new_limits = new_limits
        self._timeout_s = timeout_s
        self._connect_timeout_s = min(connect_timeout_s, timeout_s)
        self._settings = settings
        self._connection: _OwnStreams | None = None
        self._waiting: list[_Call] = []
        self._exchanging: asyncio.Task[None] | None = None
        """Runs while calls wait."""
        self._is_closed = False

    async def call(self, packed: bytes, deadline: float | None = None) -> Any:
        """Execute a command, which is in the protocol's form.

        Args:
            deadline: the latest time by the event loop's clock; None: `timeout_s` from now.

        Raises:
            RedisError: the server's error.
            NotSent: nothing was sent.
            ResponseLost: the response did not come; the connection is closed.
        """
        if self._is_closed:
            raise NotSent(NotConnected(Failure.CONNECT, _CLOSED))
        call = _Call(packed)
        self._waiting.append(call)
        if self._exchanging is None:
            self._exchanging = asyncio.create_task(self._exchange_all())
        try:
            async with asyncio.timeout_at(deadline or self.deadline()) as limit:
                return await call.response
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"no response within {self._timeout_s:g} s"
            if call.connection is None:
                raise NotSent(NotConnected(Failure.CONNECT, text)) from None
            await self._drop(call.connection)
            raise ResponseLost(text) from None
        finally:
            if call.connection is None and call in self._waiting:
                self._waiting.remove(call)

    def deadline(self) -> float:
        """When a call that begins now ends at the latest."""
        return asyncio.get_running_loop().time() + self._timeout_s

    async def _exchange_all(self) -> None:
        """Exchange groups until no call waits."""
        try:
            while self._waiting:
                try:
                    connection = await self._connected()
                except (NotConnected, RedisError) as error:
                    self._fail_waiting(error)
                else:
                    if self._waiting:
                        await self._exchange(connection, self._next_group())
        except asyncio.CancelledError:
            self._fail_waiting(NotConnected(Failure.CONNECT, _CLOSED))
            raise
        finally:
            self._exchanging = None

    async def _exchange(self, connection: _OwnStreams, group: list[_Call]) -> None:
        """Send a group of calls, and read their responses."""
        for call in group:
            call.connection = connection
        read, is_current = 0, True
        sent_at = monotonic()
        lost_as = ResponseLost
        lost = "the connection was closed before the response"
        connection.expect(len(group))
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
                        is_current &= code_of(error) != _OTHER_SERVER
                    else:
                        if not call.response.done():
                            call.response.set_result(response)
                    read += 1
        except TimeoutError:
            lost = f"no response within {self._timeout_s:g} s"
        except Exception as error:
            # Of the network, or of the library on a connection that was dropped meanwhile.
            lost = str(error) or type(error).__name__
            is_sudden = monotonic() - sent_at < RESEND_WITHIN_S
            if is_sudden and connection.has_served and connection.is_untouched:
                lost_as = ClosedWhileIdle
        finally:
            for call in group[read:]:
                _fail(call, lost_as(lost))
            connection.has_served = True
            if read < len(group) or not is_current:
                await self._drop(connection)

    def _next_group(self) -> list[_Call]:
        count = size = 0
        while count < len(self._waiting) and size < GROUP_BYTES:
            size += len(self._waiting[count].packed)
            count += 1
        group, self._waiting = self._waiting[:count], self._waiting[count:]
        return group

    def _fail_waiting(self, error: NotConnected | RedisError) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            _fail(call, NotSent(error))

    async def _connected(self) -> _OwnStreams:
        """The open connection.

        Raises:
            NotConnected: no connection could be established.
            RedisError: the server did not accept it.
        """
        if self._connection is not None:
            if self._connection.is_usable:
                return self._connection
            await self._drop(self._connection)
        connection = _OwnStreams(self._opener, self._new_limits, **self._settings)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await connection.connect()  # type: ignore[no-untyped-call]
        except BaseException as error:
            await connection.abort()
            if isinstance(error.__cause__, NotConnected):
                raise error.__cause__ from None
            if isinstance(error, NotConnected) or not isinstance(error, Exception):
                raise
            if not is_response(error):
                # Also whatever a response of another form leads to inside the library.
                raise unreachable(error) from error
            raise
        self._connection = connection
        return connection

    async def _drop(self, connection: _OwnStreams) -> None:
        """Close a connection; what was not sent yet is lost with it."""
        if self._connection is connection:
            self._connection = None
        await connection.abort()

    async def aclose(self) -> None:
        """Close the connection; calls in flight lose their responses."""
        self._is_closed = True
        if (exchanging := self._exchanging) is not None:
            exchanging.cancel()
            await asyncio.wait([exchanging])
        if self._connection is not None:
            await self._drop(self._connection)


def is_response(error: Exception) -> bool:
    """Whether the server responded with this error; redis-py has no class for these."""
    return isinstance(error, ResponseError) or getattr(error, "status_code", None) is not None


def code_of(error: RedisError) -> str:
    """The first word of the server's error, which redis-py takes off for some."""
    code = getattr(error, "status_code", None)
    return str(code or str(error).partition(" ")[0])


def unreachable(error: Exception) -> NotConnected:
    """The error for a connection that broke while it was set up."""
    text = "no response in time" if isinstance(error, TimeoutError) else str(error)
    return NotConnected(Failure.CONNECT, text or type(error).__name__)


def _fail(call: _Call, error: Exception) -> None:
    if not call.response.done():
        call.response.set_exception(error)
        # Its task may have been cancelled.
        call.response.exception()

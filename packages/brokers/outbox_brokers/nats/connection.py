"""One connection to a NATS server: requests in flight, and their end with the connection.

nats-py reconnects, buffers what is published meanwhile, and sends it after its caller got a
time-out.  All of that is switched off here: a `Connection` is used until the first response that
does not come, and then dropped with everything that it has not sent (`abort`, not `close`, which
flushes).

The library also retries a connect, with names that it resolves itself and addresses that the
server reports.  It therefore gets a connected socket, once, whose address the egress policy has
checked.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from aiohappyeyeballs import start_connection
from nats import errors
from nats.aio.client import Client, RawCredentials
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from outbox.core.brokers.port import Stop, StopKind
from outbox.core.model.response import one_line
from outbox.network.dns import Unresolved
from outbox.network.egress import OPTION, literal
from outbox.network.errors import is_own_failure
from outbox.network.reuse_limits import RESEND_WITHIN_S, peer_address
from outbox.network.tls import ssl_error_reason
from outbox_brokers.nats.transport import GuardedTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from urllib.parse import ParseResult

    from nats.aio.msg import Msg

    from outbox.network.dns import Resolver
    from outbox.network.egress import EgressPolicy, Network
    from outbox.network.reuse_limits import ReuseLimits
    from outbox_brokers.nats.target import NatsCredentials, NatsTarget

ADDRESSES_TRIED_MAX = 4
ATTEMPT_DELAY_S = 0.25
"""Connection attempt delay of Happy Eyeballs (RFC 8305, 5)."""
NATS_MESSAGE_BYTES_MAX = 1 << 20
"""Longest message to and from the server: the default of its max_payload."""
ACKNOWLEDGEMENT_BYTES = 4096
"""What the server may send for a message that is published."""
JETSTREAM_REPLY_BYTES = 2 * NATS_MESSAGE_BYTES_MAX
"""What the server may send for a call of its API: a message in Base64, and what describes it."""
UNASKED_BYTES = 64 * 1024
"""What the server may send unasked: the INFO of a connection, PINGs and PONGs."""
UNASKED_BYTES_PER_S = 1024
SPARE_BYTES_MAX = 256 * 1024
"""What the server may send beyond the responses to requests in flight."""
TOO_MUCH = "the server sent more than was asked for"
RELAY_PING_S = 20
"""Interval of PINGs; a connection without a PONG for two of them is lost."""
_PERMISSION = re.compile(
    r'permissions violation for (publish|subscription) to "([^"]*)"', re.IGNORECASE
)


class Stopped(Exception):
    """A call cannot go on; carries its result."""

    def __init__(self, kind: StopKind, detail: str) -> None:
        super().__init__(detail)
        self.stop = Stop(kind, one_line(detail))


async def open_socket(
    target: NatsTarget,
    policy: EgressPolicy,
    resolver: Resolver,
    networks: tuple[Network, ...],
) -> socket.socket:
    """Connect to one of the host's addresses that the policy allows.

    Raises:
        Stopped: no address is known, allowed or reachable.
    """
    host = target.host
    try:
        addresses = [host] if literal(host) is not None else await resolver.resolve(host)
    except Unresolved as error:
        raise Stopped(StopKind.UNAVAILABLE, f"{host}: {error}") from None
    allowed: list[str] = []
    refused = ""
    for address in addresses:
        reason = policy.refusal(address, port=target.port, tls=True, networks=networks)
        if reason is None and not target.secure:
            reason = policy.refusal(address, port=target.port, tls=False, networks=networks) and (
                f"plain NATS to {address} is not encrypted; use nats+tls://, or open the network "
                f"with {OPTION}"
            )
        if reason is None:
            allowed.append(address)
        refused = refused or reason or ""
    if not allowed:
        raise Stopped(StopKind.MISCONFIGURED, refused)
    tried = allowed[:ADDRESSES_TRIED_MAX]
    try:
        sock = await start_connection(
            [_address_info(address, target.port) for address in tried],
            happy_eyeballs_delay=ATTEMPT_DELAY_S,
        )
    except OSError as error:
        reason = error.strerror or str(error)
        if is_own_failure(error, tried):
            raise Stopped(StopKind.LOCAL, reason) from None
        raise Stopped(StopKind.UNAVAILABLE, f"{reason} at {host}:{target.port}") from None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class Connection:
    """A connection with its requests in flight.

    Its end, for whatever reason, ends all of them with `UNKNOWN`.
    """

    def __init__(self, target: NatsTarget, limits: ReuseLimits) -> None:
        self._target = target
        self._limits = limits
        self._calls = 0
        self._is_retired = False
        self._is_closed = False
        """Whether the server closed it."""
        self._has_served = False
        """Whether it had responses before."""
        self._sent_at = 0.0
        """When it was idle last."""
        self._client = _Client()
        self._transport: _SocketTransport | None = None
        self._inbox = ""
        self._requests: dict[str, tuple[str, asyncio.Future[Msg]]] = {}
        """Subject and response of requests in flight, by the last token of the reply subject."""
        self._count = 0
        self._lost = ""
        """Why the connection ended; empty: it has not."""
        self._cause = ""
        """The last error that the client library reported."""

    @property
    def is_usable(self) -> bool:
        """Whether it may carry another call; one that may not ends with its last call."""
        if self._lost or self._is_retired:
            return False
        if self._limits.allow(self):
            return True
        self._is_retired = True
        self._end_retired()
        return False

    @property
    def address(self) -> str | None:
        """IP address of the server."""
        transport = self._transport
        writer = None if transport is None else transport._bare_io_writer
        return peer_address(None if writer is None else writer.transport)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Keep the connection for a call of several requests."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._end_retired()

    def _end_retired(self) -> None:
        if self._is_retired and not self._calls:
            self.drop("another connection replaces it")

    @property
    def version(self) -> str:
        """Version of the server, such as 2.12.1."""
        return str(self._client._server_info.get("version", ""))

    @property
    def payload_bytes_max(self) -> int:
        """The limit for headers and body of a message, the server's or `NATS_MESSAGE_BYTES_MAX`."""
        return min(self._client.max_payload, NATS_MESSAGE_BYTES_MAX)

    async def start(
        self,
        sock: socket.socket,
        context: ssl.SSLContext | None,
        credentials: NatsCredentials,
        timeout_s: float,
    ) -> None:
        """Connect with a socket, and subscribe to responses.

        Raises:
            Stopped: it failed; the connection is dropped.
        """
        self._transport = _SocketTransport(sock, context is not None, self._on_end)
        self._client._transport = self._transport
        host = self._target.host
        options: dict[str, Any] = {"tls": context, "tls_hostname": host.rstrip(".")}
        if credentials.creds is not None:
            options["user_credentials"] = RawCredentials(credentials.creds)
        elif credentials.token is not None:
            options["token"] = credentials.token
        elif credentials.user is not None:
            options |= {"user": credentials.user, "password": credentials.password}
        try:
            await self._client.connect(
                # For the library's records: the transport has the socket.
                servers=[f"nats://{'[' + host + ']' if ':' in host else host}:{self._target.port}"],
                name="outbox",
                allow_reconnect=False,
                max_reconnect_attempts=0,
                connect_timeout=max(1, round(timeout_s)),
                pending_size=0,
                ping_interval=RELAY_PING_S,
                error_cb=self._on_error,
                closed_cb=self._on_closed,
                **options,
            )
            self._inbox = self._client.new_inbox()
            await self._client.subscribe(
                f"{self._inbox}.*",
                cb=self._on_response,
            )
            # A refused subscription is reported before the PONG.
            await self._client.flush(timeout=max(1, round(timeout_s)))
            if self._client._transport is not self._transport:
                raise Stopped(StopKind.MISCONFIGURED, "this version of nats-py is not supported")
        except BaseException as error:
            self.drop("the connection could not be established")
            if not isinstance(error, Exception):
                raise
            raise self._explain(error) from error
        if "permissions violation" in self._cause.lower():
            self.drop("no right to subscribe to responses")
            raise Stopped(StopKind.MISCONFIGURED, self._cause)

    async def request(
        self,
        subject: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        reply_bytes: int = ACKNOWLEDGEMENT_BYTES,
    ) -> Msg:
        """Publish a message and wait for its response; the caller bounds the time.

        Cancellation drops the connection, since the message may be on its way.

        Raises:
            Stopped: UNAVAILABLE if nothing was sent, MISCONFIGURED if the server has refused the
                message for a missing right, UNKNOWN if the response was lost.
        """
        self._check()
        self._begin()
        self._count += 1
        token = str(self._count)
        response: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._requests[token] = (subject, response)
        assert self._transport is not None
        self._transport.expect(reply_bytes)
        try:
            await self._client.publish(
                subject, body, reply=f"{self._inbox}.{token}", headers=dict(headers or {}) or None
            )
            return await response
        except (errors.Error, asyncio.CancelledError) as error:
            del self._requests[token]
            raise self._ended(error) from None
        finally:
            self._requests.pop(token, None)
            self._transport.request_ended(reply_bytes)

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Publish a message of a batch, which has no response.

        Raises:
            Stopped: see `request`.
        """
        self._check()
        self._begin()
        try:
            await self._client.publish(subject, body, headers=dict(headers))
        except (errors.Error, asyncio.CancelledError) as error:
            raise self._ended(error) from None

    def drop(self, reason: str) -> None:
        """End the connection and everything that is not sent, at once."""
        if self._lost:
            return
        self._lost = reason
        if self._transport is not None:
            self._transport.abort()
        self._client._pending = []
        self._client._pending_data_size = 0
        for _, response in self._requests.values():
            if not response.done():
                response.set_exception(
                    Stopped(self._lost_kind, f"the response was lost: {self._cause or reason}")
                )
        _closing.add(task := asyncio.ensure_future(_close(self._client)))
        task.add_done_callback(_closing.discard)

    def _begin(self) -> None:
        """Note when the first of the messages is sent whose responses are awaited."""
        if not self._requests and self._transport is not None:
            self._transport.is_untouched = True
            self._sent_at = monotonic()

    @property
    def _lost_kind(self) -> StopKind:
        """What the loss of a response means."""
        transport = self._transport
        closed_while_idle = (
            self._is_closed
            and self._has_served
            and transport is not None
            and transport.is_untouched
            and monotonic() - self._sent_at < RESEND_WITHIN_S
        )
        return StopKind.CLOSED if closed_while_idle else StopKind.UNKNOWN

    def _check(self) -> None:
        if self._lost:
            raise Stopped(StopKind.UNAVAILABLE, f"the connection was lost: {self._lost}")

    def _ended(self, error: BaseException) -> BaseException:
        """What a failed publish means; all but a header that is not valid ends the connection."""
        if isinstance(error, errors.BadHeaderError):
            return Stopped(StopKind.REFUSED, f"a header's name is not valid: {error}")
        if isinstance(error, asyncio.CancelledError):
            self.drop("a call was cancelled or timed out")
            return error
        self.drop(str(error))
        return Stopped(self._lost_kind, f"the connection was lost: {error}")

    def _explain(self, error: Exception) -> Stopped:
        if isinstance(error, Stopped):
            return error
        where = f"{self._target.host}:{self._target.port}"
        if isinstance(error, ssl.SSLError):
            return Stopped(StopKind.MISCONFIGURED, f"{ssl_error_reason(error)} at {where}")
        text = str(error) or type(error).__name__
        lowered = text.lower()
        if "authorization" in lowered or "authentication" in lowered:
            return Stopped(StopKind.MISCONFIGURED, text)
        if isinstance(error, ValueError):
            # nkeys and base64: the text could contain parts of the credentials.
            return Stopped(StopKind.MISCONFIGURED, "the credentials are not usable")
        if type(error).__module__.startswith("nkeys"):
            return Stopped(StopKind.MISCONFIGURED, "the seed of the credentials is not usable")
        return Stopped(StopKind.UNAVAILABLE, f"{text} at {where}")

    async def _on_response(self, message: Msg) -> None:
        entry = self._requests.get(message.subject.rpartition(".")[2])
        if entry is not None and not entry[1].done():
            self._has_served = True
            entry[1].set_result(message)

    async def _on_error(self, error: Exception) -> None:
        self._cause = one_line(str(error) or type(error).__name__)
        found = _PERMISSION.search(self._cause)
        if found is None or found[1].lower() != "publish":
            return
        for subject, response in self._requests.values():
            # The library has converted the subject to lower case.
            if subject.lower() == found[2].lower() and not response.done():
                response.set_exception(Stopped(StopKind.MISCONFIGURED, self._cause))

    async def _on_closed(self) -> None:
        self._on_end()

    def _on_end(self, reason: str = "the server closed it") -> None:
        if not self._lost:
            self._is_closed = reason is not TOO_MUCH
        self.drop(self._cause or reason)


class _Client(Client):
    """nats-py's client, which parses no more of what a server sends than is used here."""

    def __init__(self) -> None:
        super().__init__()
        self._ps = _Parser(self)

    async def _process_info(self, info: Any, initial_connection: bool = False) -> None:
        """Ignore the servers of an INFO: they are for the library's reconnects, which are switched
        off.  It compares each with all others.
        """

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        if headers is not None and len(headers) > ACKNOWLEDGEMENT_BYTES:
            raise errors.ProtocolError
        found: dict[str, str] | None = await super()._process_headers(headers)
        return found


class _Parser(Parser):
    async def parse(self, data: bytes = b"") -> None:
        """Parse; the library logs other errors with what caused them, and reads no more."""
        try:
            await super().parse(data)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise errors.ProtocolError from error
        if self.state == AWAITING_CONTROL_LINE and len(self.buf) > UNASKED_BYTES:
            # The library looks for the end of the line again with each read.
            raise errors.ProtocolError


class _SocketTransport(GuardedTransport):
    """A transport on a connected socket, which is used once.

    The server may send what was asked for, and little else: the library reads whatever length a
    message announces into memory, and parses an unlimited number of empty ones.
    """

    def __init__(self, sock: socket.socket, secure: bool, on_end: Callable[..., None]) -> None:
        super().__init__(secure=secure)
        self._socket: socket.socket | None = sock
        self._aborted = False
        self._on_end = on_end
        self._bytes_left = float(UNASKED_BYTES)
        self._bytes_awaited = 0
        self.is_untouched = True
        """Whether the server has sent nothing since this was set."""
        self._read_at = monotonic()

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        sock, self._socket = self._socket, None
        if sock is None:
            raise ConnectionAbortedError("a connection is made once")
        reader, writer = await asyncio.open_connection(sock=sock, limit=buffer_size)
        self._bare_io_reader = self._io_reader = reader
        self._bare_io_writer = self._io_writer = writer

    async def read(self, buffer_size: int) -> bytes:
        try:
            data = await super().read(buffer_size)
        except OSError:
            self._on_end()
            raise
        self.is_untouched = self.is_untouched and not data
        now = monotonic()
        left = self._bytes_left + (now - self._read_at) * UNASKED_BYTES_PER_S
        # Without a limit, responses that were shorter than allowed would add up.
        self._bytes_left = min(left, self._bytes_awaited + SPARE_BYTES_MAX) - len(data)
        self._read_at = now
        if self._bytes_left < 0:
            self._on_end(TOO_MUCH)
            raise ConnectionAbortedError(TOO_MUCH)
        if not data:
            self._on_end()
        return data  # type: ignore[no-any-return,unused-ignore]

    def expect(self, reply_bytes: int) -> None:
        """Let the server send this much more for a request."""
        self._bytes_left += reply_bytes
        self._bytes_awaited += reply_bytes

    def request_ended(self, reply_bytes: int) -> None:
        """Do not wait for a response any more."""
        self._bytes_awaited -= reply_bytes

    def abort(self) -> None:
        """Close the socket without sending what is buffered."""
        self._aborted = True
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for writer in (self._io_writer, self._bare_io_writer):
            if writer is not None:
                writer.transport.abort()

    def _refusal(self, text: str) -> Exception:
        return Stopped(StopKind.MISCONFIGURED, text)

    def _check(self) -> None:
        if self._aborted:
            raise ConnectionAbortedError("the connection was dropped")
        super()._check()


_closing: set[asyncio.Task[None]] = set()
CLIENT_CLOSE_S = 2.0
"""Bounds the end of the library's tasks; the socket is closed before."""


async def _close(client: Client) -> None:
    try:
        async with asyncio.timeout(CLIENT_CLOSE_S):
            await client.close()
    except Exception:  # noqa: S110 - the socket is closed, nothing else is of interest.
        pass


def _address_info(address: str, port: int) -> Any:
    if ":" in address:
        return (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, 0, 0))
    return (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port))

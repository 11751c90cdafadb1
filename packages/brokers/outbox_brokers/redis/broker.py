"""Streams of Redis and Valkey: exact appends by one script.

Each lane has a stream `NAME:{<lane>}` and beside it a hash with the epoch of its owner.  The
script appends only if the last id that the stream ever had is the sequence before, the owner is not
fenced, and the lane was not opened again since.  Redis keeps the last id when it trims the stream,
so a trimmed stream is not taken for one that has lost messages.

The set `NAME:lanes` has the names of the lanes: consumers cannot list keys in time.  It is written
by a command of its own, because its key is in another slot of a cluster than the streams are.

**Promise.**  In each lane's stream every sequence that is not a dead letter stands once, in order,
without a hole, also after kills of relays; late writes of former owners and of lost calls are
refused.  A server that has lost or evicted what it had acknowledged is noticed at the next append.

**Not promised.**  That a server that crashes keeps what it had acknowledged, unless `appendfsync`
is `always`: with `everysec` its writes to the file may be two seconds late.  That a failover keeps
it.  That former owners are refused if the hash is deleted alone; the order against other writers of
the same stream.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from outbox.core.brokers.port import (
    Appended,
    Capabilities,
    Fenced,
    Foreign,
    Position,
    Stop,
    StopKind,
)
from outbox.core.model.response import one_line
from outbox.core.model.text import QUOTED_CHARS_MAX, quoted
from outbox.destinations.broker import stopped_finding
from outbox.destinations.broker_connection import BrokerOpener, stop_of
from outbox.network.errors import NotConnected
from outbox_brokers.redis.checks import WHAT_TO_DO, findings_of
from outbox_brokers.redis.connection import (
    ClosedWhileIdle,
    GroupedConnection,
    NotSent,
    ResponseLost,
    code_of,
)
from outbox_brokers.redis.script import DIGEST, FORCE, OPEN, SCRIPT, packed, packed_call
from outbox_brokers.redis.target import parse_credentials, parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox.core.brokers.port import Message, Owner, Standing
    from outbox.destinations.broker import BrokerAddress, BrokerFinding
    from outbox.network.dns import Resolver
    from outbox.network.egress import EgressPolicy
    from outbox_brokers.redis.connection import BoundedProtocol

_LATER = frozenset(
    {
        "OOM", "LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS",
        "MISCONF", "READONLY",
    }
)  # fmt: skip
"""Errors that pass by themselves, or end when the server has room."""
_TOO_MANY_CLIENTS = "max number of clients reached"
BULK_LIMIT = "proto-max-bulk-len"
BULK_BYTES_MIN = 1024 * 1024
"""The smallest limit that a server can have."""


class RedisBroker:
    """The streams of one endpoint."""

    capabilities = Capabilities(compare=True, prefix=True, fence=True, position=True)

    def __init__(self, address: BrokerAddress, policy: EgressPolicy, resolver: Resolver) -> None:
        self._target = target = parse_url(address.url)
        self._opener = BrokerOpener(address, policy, resolver, secure=target.secure)
        user, password = parse_credentials(address.credentials)
        self._connection = GroupedConnection(
            self._open,
            partial(self._opener.limits, target.host),
            address.timeout_s,
            address.connect_timeout_s,
            host=target.host,  # For the library's messages.
            port=target.port,
            username=user,
            password=password,
            db=target.database,
        )

    async def open(
        self, lane: str, owner: Owner, after: int, receipt: str | None, *, force: bool = False
    ) -> Standing:
        response = await self._run(lane, owner, FORCE if force else OPEN, [])
        if isinstance(response, Stop):
            return response
        key = self._target.stream_key(lane)
        match response:
            case [b"OPEN", at, delivery]:
                await self._register(lane)
                return Position(int(at), delivery.decode("utf-8", "replace") or None)
            case [b"FENCED", epoch]:
                return Fenced(int(epoch))
            case [b"OTHER", who]:
                return Foreign(f"the stream {key} belongs to database {_text(who)}")
            case [b"FOREIGN", id_]:
                return Foreign(f"the stream {key} has the id {_text(id_)}, of another writer")
        return _strange(response)

    async def append(
        self, lane: str, owner: Owner, after: int, messages: Sequence[Message]
    ) -> Appended:
        refused = None
        if any(len(message.body) > BULK_BYTES_MIN for message in messages):
            messages, refused = await self._fitting(messages)
            if not messages:
                return Appended(after, refused)
        response = await self._run(lane, owner, str(after), messages)
        if isinstance(response, Stop):
            return Appended(after, response)
        match response:
            case [b"STORED"]:
                return Appended(messages[-1].sequence, refused)
            case [b"UNOPENED" | b"AT" | b"FENCED" | b"OTHER" | b"FOREIGN" as code, *rest]:
                about = " ".join(map(_text, [code, *rest]))
                key = self._target.stream_key(lane)
                return Appended(
                    after, Stop(StopKind.MOVED, f"the script on {key} returned {about}")
                )
        return Appended(after, _strange(response))

    async def check(self, lanes: Sequence[str]) -> list[BrokerFinding]:
        try:
            return await findings_of(self._connection, self._target, lanes)
        except (NotSent, ResponseLost, RedisError) as error:
            return [stopped_finding(_stop(error), WHAT_TO_DO)]

    async def aclose(self) -> None:
        await self._connection.aclose()
        self._opener.close()

    async def _run(
        self, lane: str, owner: Owner, after: str, messages: Sequence[Message]
    ) -> Any | Stop:
        """Run the script, again if the server closed the idle connection meanwhile: opening a lane
        twice is harmless, and one whose append may be stored is opened first.
        """
        deadline = self._connection.deadline()
        try:
            try:
                return await self._run_once(lane, owner, after, messages, deadline)
            except ClosedWhileIdle as error:
                if messages:
                    return Stop(StopKind.CLOSED, one_line(str(error)))
                return await self._run_once(lane, owner, after, messages, deadline)
        except (NotSent, ResponseLost, RedisError) as error:
            return _stop(error)

    async def _run_once(
        self, lane: str, owner: Owner, after: str, messages: Sequence[Message], deadline: float
    ) -> Any:
        """Run the script; the second time with its text, if the server does not have it."""
        given = self._target, lane, owner, after, messages
        try:
            return await self._connection.call(packed_call(("EVALSHA", DIGEST), *given), deadline)
        except RedisError as error:
            if code_of(error) != "NOSCRIPT":
                raise
            return await self._connection.call(packed_call(("EVAL", SCRIPT), *given), deadline)

    async def _register(self, lane: str) -> None:
        """Add a lane to the set of the lanes; without the right, consumers do not find it.

        At each opening, because the server may have lost the set.
        """
        # Otherwise the next opening tries again; the check names the missing right.
        with suppress(NotSent, ResponseLost, RedisError):
            await self._connection.call(packed("SADD", self._target.lanes_key, lane))

    async def _fitting(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Stop | None]:
        """The messages before the first one that the server will never take, and why it will not.

        Its connection breaks with such a message, often before it can say so.
        """
        try:
            setting = await self._connection.call(packed("CONFIG", "GET", BULK_LIMIT))
            bytes_max = int(setting[1])
        except (NotSent, ResponseLost, RedisError, LookupError, ValueError, TypeError):
            # Without the right to ask, or on a proxy: the server decides.
            return messages, None
        for count, message in enumerate(messages):
            if len(message.body) > bytes_max:
                stop = Stop(
                    StopKind.REFUSED,
                    f"the message has {len(message.body)} bytes, and the server's {BULK_LIMIT} is "
                    f"{bytes_max}",
                )
                return messages[:count], stop
        return messages, None

    async def _open(self, factory: Callable[[], BoundedProtocol]) -> BoundedProtocol:
        target = self._target
        return await self._opener.open(target.host, target.port, factory, secure=target.secure)


def _stop(error: NotSent | ResponseLost | RedisError) -> Stop:
    """What an error means for the calls that got it."""
    if isinstance(error, ResponseLost):
        return Stop(StopKind.UNKNOWN, one_line(str(error)))
    if isinstance(error, NotSent):
        if isinstance(error.cause, NotConnected):
            return stop_of(error.cause)
        error = error.cause
    code, text = code_of(error), str(error)
    passes = code in _LATER or _TOO_MANY_CLIENTS in text
    kind = StopKind.UNAVAILABLE if passes else StopKind.MISCONFIGURED
    return Stop(kind, one_line(text if text.startswith(code) else f"{code} {text}"))


def _strange(response: object) -> Stop:
    """The failure for a response that the script does not give."""
    return Stop(StopKind.MISCONFIGURED, f"not a response of the script: {type(response).__name__}")


def _text(value: object) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else quoted(value)
    return one_line(text, QUOTED_CHARS_MAX)

"""Lanes as subjects of a JetStream stream.

    SUBJECT.<lane>.m    the lane's messages, in order
    SUBJECT.<lane>.f    its fence: one message with the owner, replaced by rollup

Every message names the stream sequence of the last one of `SUBJECT.<lane>.*` (optimistic
concurrency).  A fence is such a message: after it, what a former owner sends has a wrong sequence
and is refused.  The lane's stream sequence cannot be predicted in a stream with other lanes, so a
lane has one message in flight, or one atomic batch (server 2.12 and later).
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from outbox.core.brokers.port import (
    Appended,
    Capabilities,
    Fenced,
    Foreign,
    Position,
    Stop,
    StopKind,
)
from outbox.core.model.text import quoted
from outbox.destinations.broker import BrokerFinding, stopped_finding
from outbox.errors import UsageError
from outbox.network.reuse_limits import ReuseLimits
from outbox.network.tls import endpoint_context, system_context
from outbox_brokers.nats.checks import check_stream, refusal_of_stream
from outbox_brokers.nats.connection import Connection, Stopped, open_socket
from outbox_brokers.nats.stream_api import (
    BATCH_INCOMPLETE,
    ApiError,
    NoResponders,
    StoredMessage,
    StreamInfo,
    find_stream,
    last_message,
    parse_ack,
    stream_info,
)
from outbox_brokers.nats.target import parse_credentials, parse_url

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from outbox.core.brokers.port import Message, Owner, Standing
    from outbox.destinations.broker import BrokerAddress
    from outbox.network.dns import Resolver
    from outbox.network.egress import EgressPolicy

BATCH_MIN = 50
"""An atomic batch costs the server milliseconds whatever its size: fewer messages are sent one by
one."""
ATOMIC_BATCH_MAX = 1000
"""The server's limit."""
BATCHES_MAX = 16
"""Batches in flight; the server allows 50 for a stream."""
FENCE_TRIES_MAX = 5
NO_LEADER_S = 30.0
"""A stream without a leader has no responders, like one that does not exist; it has one again
within this time."""
_PROTOCOL_BYTES = 512
"""Bytes that are reserved for the headers that this module adds, which have fewer."""
_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
_WHAT_TO_DO = "check the URL, the credentials (outbox endpoint credentials) and the user's rights"


@dataclass(slots=True)
class _Lane:
    """An opened lane."""

    owner: Owner
    sequence: int
    """Its last sequence number."""
    seq: int
    """Stream sequence of its last message or fence."""


@dataclass(frozen=True, slots=True)
class _Link:
    """A connection and the stream at its other end."""

    connection: Connection
    info: StreamInfo


class NatsBroker:
    """The lanes of one endpoint in a stream of NATS JetStream; see `Broker`.

    Raises:
        UsageError: the address is not valid.
    """

    def __init__(self, address: BrokerAddress, policy: EgressPolicy, resolver: Resolver) -> None:
        self._address = address
        self._policy = policy
        self._resolver = resolver
        self._target = parse_url(address.url)
        self._credentials = parse_credentials(address.credentials)
        self._context: ssl.SSLContext | None = None
        self._link: _Link | None = None
        self._connecting: asyncio.Task[_Link] | None = None
        self._lanes: dict[str, _Lane] = {}
        self._batches = asyncio.Semaphore(BATCHES_MAX)
        self._no_responders_at: float | None = None
        """The time since which no message has had a responder."""
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(compare=True, prefix=True, fence=True, position=True)

    async def open(
        self, lane: str, owner: Owner, after: int, receipt: str | None, *, force: bool = False
    ) -> Standing:
        self._lanes.pop(lane, None)
        try:
            async with asyncio.timeout(self._address.timeout_s):
                try:
                    return await self._connect_and_open(lane, owner, after, receipt, force=force)
                except Stopped as stopped:
                    if stopped.stop.kind is not StopKind.CLOSED:
                        raise
                # The server closed the idle connection; opening a lane twice is harmless.
                return await self._connect_and_open(lane, owner, after, receipt, force=force)
        except TimeoutError:
            return Stop(StopKind.UNKNOWN, self._no_response())
        except Stopped as stopped:
            return stopped.stop

    async def append(
        self, lane: str, owner: Owner, after: int, messages: Sequence[Message]
    ) -> Appended:
        moved = Appended(after, Stop(StopKind.MOVED, f"lane {lane} is not open at {after}"))
        state = self._lanes.get(lane)
        if state is None or state.owner != owner or state.sequence != after:
            return moved
        link = self._usable_link()
        if link is None:
            # The lanes' stream sequences belong to the stream, not to the connection.  A lane with
            # a message in flight when the connection ended is no longer in `_lanes`.
            try:
                async with asyncio.timeout(self._address.timeout_s):
                    link = await self._connect()
            except TimeoutError:
                return Appended(after, Stop(StopKind.UNAVAILABLE, "no connection in time"))
            except Stopped as stopped:
                return Appended(after, stopped.stop)
            if self._lanes.get(lane) is not state:
                return moved  # The name leads to another stream.
        stop: Stop | None
        try:
            async with asyncio.timeout(self._address.timeout_s):
                with link.connection.call():
                    stop = await self._append(link, lane, state, messages)
        except TimeoutError:
            stop = Stop(StopKind.UNKNOWN, self._no_response())
        except Stopped as stopped:
            stop = stopped.stop
        except ApiError as error:
            stop = error.stop
        except NoResponders:
            stop = self._stop_without_responders()
        except BaseException:
            self._lanes.pop(lane, None)
            raise
        if stop is None:
            self._no_responders_at = None
        elif stop.kind not in (StopKind.REFUSED, StopKind.UNAVAILABLE):
            self._lanes.pop(lane, None)
        receipt = f"{link.info.created}/{state.seq}" if state.sequence > after else None
        return Appended(state.sequence, stop, receipt)

    async def check(self, lanes: Sequence[str]) -> list[BrokerFinding]:
        try:
            async with asyncio.timeout(self._address.timeout_s):
                link = await self._connect(checked=False)
                with link.connection.call():
                    info = await stream_info(link.connection, link.info.name)
        except TimeoutError:
            return [BrokerFinding(True, self._no_response(), _WHAT_TO_DO, is_away=True)]
        except Stopped as stopped:
            what, _, action = stopped.stop.detail.partition("; ")
            return [stopped_finding(stopped.stop._replace(detail=what), action or _WHAT_TO_DO)]
        except ApiError as error:
            return [stopped_finding(error.stop, _WHAT_TO_DO)]
        return check_stream(info, link.connection.version, self._target.subject)

    async def aclose(self) -> None:
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._link is not None:
            self._link.connection.drop("the destination was closed")
        self._lanes.clear()

    async def _append(
        self, link: _Link, lane: str, state: _Lane, messages: Sequence[Message]
    ) -> Stop | None:
        fitting = self._fitting(link, messages)
        if len(fitting) < BATCH_MIN:
            await self._append_singly(link, lane, state, fitting)
        else:
            try:
                async with self._batches:
                    await self._append_batch(link, lane, state, fitting)
            except (ApiError, Stopped) as error:
                # Also a message that the server refuses inside a batch makes it incomplete: its
                # own response has no subject.  Nothing of the batch is stored.
                is_incomplete = isinstance(error, ApiError) and error.code == BATCH_INCOMPLETE
                if error.stop.kind is not StopKind.REFUSED and not is_incomplete:
                    raise
                await self._append_singly(link, lane, state, fitting)
        if len(fitting) == len(messages):
            return None
        refused = messages[len(fitting)]
        return Stop(
            StopKind.REFUSED,
            f"sequence {refused.sequence} has {refused.size_bytes} bytes, more than the server's "
            f"max_payload of {link.connection.payload_bytes_max}",
        )

    def _fitting(self, link: _Link, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages before the first one for which the server would close the connection."""
        bytes_max = link.connection.payload_bytes_max - _PROTOCOL_BYTES
        for index, message in enumerate(messages[:ATOMIC_BATCH_MAX]):
            if message.size_bytes + 4 * len(message.headers) > bytes_max:
                return messages[:index]
        return messages[:ATOMIC_BATCH_MAX] if len(messages) > ATOMIC_BATCH_MAX else messages

    async def _append_singly(
        self, link: _Link, lane: str, state: _Lane, messages: Sequence[Message]
    ) -> None:
        subject = f"{self._target.subject}.{lane}"
        for message in messages:
            headers = _headers(message) | {
                _SEQUENCE: str(state.seq),
                f"{_SEQUENCE}-Subject": f"{subject}.*",
                "Nats-Expected-Stream": link.info.name,
            }
            ack = parse_ack(await link.connection.request(f"{subject}.m", message.body, headers))
            if ack.get("duplicate"):
                raise Stopped(StopKind.MOVED, "the server took the message for a duplicate")
            state.seq = int(ack["seq"])
            state.sequence = message.sequence

    async def _append_batch(
        self, link: _Link, lane: str, state: _Lane, messages: Sequence[Message]
    ) -> None:
        subject = f"{self._target.subject}.{lane}"
        batch = uuid4().hex
        for index, message in enumerate(messages, 1):
            headers = _headers(message) | {
                "Nats-Batch-Id": batch,
                "Nats-Batch-Sequence": str(index),
                "Nats-Expected-Stream": link.info.name,
            }
            if index == 1:
                headers[_SEQUENCE] = str(state.seq)
                headers[f"{_SEQUENCE}-Subject"] = f"{subject}.*"
            if index < len(messages):
                await link.connection.publish(f"{subject}.m", message.body, headers)
                continue
            headers["Nats-Batch-Commit"] = "1"
            ack = parse_ack(await link.connection.request(f"{subject}.m", message.body, headers))
            if ack.get("batch") != batch or ack.get("count") != len(messages):
                raise Stopped(StopKind.MISCONFIGURED, "the server does not know atomic batches")
            state.seq = int(ack["seq"])
            state.sequence = message.sequence

    async def _connect_and_open(
        self, lane: str, owner: Owner, after: int, receipt: str | None, *, force: bool
    ) -> Standing:
        link = await self._connect()
        with link.connection.call():
            return await self._open(link, lane, owner, after, receipt, force=force)

    async def _open(
        self,
        link: _Link,
        lane: str,
        owner: Owner,
        after: int,
        receipt: str | None,
        *,
        force: bool,
    ) -> Standing:
        connection, stream = link.connection, link.info.name
        subject = f"{self._target.subject}.{lane}"
        for _ in range(FENCE_TRIES_MAX):
            fence, last = await asyncio.gather(
                last_message(connection, stream, f"{subject}.f"),
                last_message(connection, stream, f"{subject}.m"),
            )
            other = None if fence is None or force else _other_owner(fence, owner)
            if other is not None:
                return other
            seq = max(each.seq if each is not None else 0 for each in (fence, last))
            headers = {
                _SEQUENCE: str(seq),
                f"{_SEQUENCE}-Subject": f"{subject}.*",
                "Nats-Expected-Stream": stream,
                "Nats-Rollup": "sub",
                "X-Outbox-Control": "fence",
            }
            body = json.dumps({"identity": owner.identity, "epoch": owner.epoch}).encode()
            try:
                ack = parse_ack(await connection.request(f"{subject}.f", body, headers))
            except ApiError as error:
                if error.stop.kind is StopKind.MOVED:
                    continue
                return error.stop
            except NoResponders:
                return self._stop_without_responders()
            self._no_responders_at = None
            if last is not None:
                position = _position(last, lane)
            else:
                position = await self._position_without_messages(link, after, receipt)
            if isinstance(position, Position):
                self._lanes[lane] = _Lane(owner, position.sequence, int(ack["seq"]))
            return position
        return Stop(StopKind.UNAVAILABLE, f"lane {lane} has another writer at this moment")

    async def _position_without_messages(
        self, link: _Link, after: int, receipt: str | None
    ) -> Position:
        """Where a lane stands whose messages were trimmed, or never existed."""
        if after == 0 or receipt is None:
            return Position(0, None)
        created, _, seq = receipt.rpartition("/")
        info = await stream_info(link.connection, link.info.name)
        if info.created != link.info.created and self._link is link:
            # Receipts name the stream: it was made anew.
            self._link = _Link(link.connection, info)
        is_proven = seq.isdecimal() and created == info.created and info.last_seq >= int(seq)
        return Position(after if is_proven else 0, None)

    async def _connect(self, *, checked: bool = True) -> _Link:
        """Return the connection; all calls that wait for one share the attempt."""
        if self._closed:
            raise Stopped(StopKind.UNAVAILABLE, "the destination was closed")
        link = self._usable_link()
        if link is None:
            if self._connecting is None:
                self._connecting = asyncio.create_task(self._start_link())
                self._connecting.add_done_callback(self._connected)
            await asyncio.wait((task := self._connecting,))
            if task.cancelled():
                raise Stopped(StopKind.UNAVAILABLE, "the destination was closed")
            if (error := task.exception()) is not None:
                raise error
            link = task.result()
        reason = refusal_of_stream(link.info, link.connection.version)
        if checked and reason is not None:
            # Asked again by the next call: the stream may have been edited.
            link.connection.drop(reason)
            raise Stopped(StopKind.MISCONFIGURED, reason)
        return link

    def _usable_link(self) -> _Link | None:
        """The connection that there is, if it may carry another call."""
        link = self._link
        return link if link is not None and link.connection.is_usable else None

    def _connected(self, task: asyncio.Task[_Link]) -> None:
        self._connecting = None
        if task.cancelled() or task.exception() is not None:
            return
        before, self._link = self._link, task.result()
        if before is not None and before.info.created != self._link.info.created:
            # The name leads to another stream, where the lanes have other stream sequences.
            self._lanes.clear()

    async def _start_link(self) -> _Link:
        timeout_s = self._address.connect_timeout_s
        limits = ReuseLimits(self._resolver, asyncio.get_running_loop(), self._target.host)
        connection = Connection(self._target, limits)
        try:
            async with asyncio.timeout(timeout_s):
                context = await self._tls_context() if self._target.secure else None
                sock = await open_socket(
                    self._target, self._policy, self._resolver, self._address.networks
                )
                await connection.start(sock, context, self._credentials, timeout_s)
            async with asyncio.timeout(timeout_s):
                subject = f"{self._target.subject}.*.m"
                stream = self._target.stream or await find_stream(connection, subject)
                return _Link(connection, await stream_info(connection, stream))
        except BaseException as error:
            connection.drop("the connection could not be established")
            if isinstance(error, TimeoutError):
                raise Stopped(
                    StopKind.UNAVAILABLE, f"no connection within {timeout_s:g} s"
                ) from None
            if isinstance(error, Stopped) and error.stop.kind in (
                StopKind.UNKNOWN,
                StopKind.CLOSED,
            ):
                # Nothing but reads was sent.
                raise Stopped(StopKind.UNAVAILABLE, error.stop.detail) from None
            raise

    async def _tls_context(self) -> ssl.SSLContext:
        if self._context is None:
            tls = self._address.tls
            try:
                self._context = await (
                    asyncio.to_thread(system_context)
                    if tls is None
                    else asyncio.to_thread(endpoint_context, tls)
                )
            except (UsageError, OSError) as error:
                raise Stopped(StopKind.MISCONFIGURED, str(error)) from None
        return self._context

    def _no_response(self) -> str:
        return f"no response within {self._address.timeout_s:g} s"

    def _stop_without_responders(self) -> Stop:
        now = asyncio.get_running_loop().time()
        if self._no_responders_at is None:
            self._no_responders_at = now
        if now - self._no_responders_at < NO_LEADER_S:
            return Stop(
                StopKind.UNAVAILABLE, "no responders: the stream is absent, or has no leader"
            )
        return Stop(
            StopKind.MISCONFIGURED,
            f"no responders for {NO_LEADER_S:g} s: no stream has the subject "
            f"{self._target.subject}.*.m",
        )


def _headers(message: Message) -> dict[str, str]:
    """The message's own headers, without those that would be commands to the server."""
    return {name: value for name, value in message.headers if not name.lower().startswith("nats-")}


def _other_owner(fence: StoredMessage, owner: Owner) -> Foreign | Fenced | None:
    try:
        content = json.loads(fence.body)
        identity, epoch = str(content["identity"]), int(content["epoch"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return Foreign("the lane's fence is not of an outbox relay")
    if identity != owner.identity:
        return Foreign(f"the lane belongs to the database {quoted(identity)}")
    return Fenced(epoch) if epoch > owner.epoch else None


def _position(message: StoredMessage, lane: str) -> Position | Foreign:
    sequence = message.headers.get("x-sequence", "")
    if not (sequence.isascii() and sequence.isdecimal() and len(sequence) <= 19):
        return Foreign(f"the last message of lane {lane} has no X-Sequence: another writer's")
    if message.headers.get("x-lane", lane) != lane:
        return Foreign(f"the last message of lane {lane} has another X-Lane: another writer's")
    return Position(int(sequence), message.headers.get("x-delivery"))

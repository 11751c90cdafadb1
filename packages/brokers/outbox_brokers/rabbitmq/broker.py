"""Lanes as RabbitMQ streams.

Each lane has a stream, and one publisher name per database and lane.  The publishing id is the
sequence.  RabbitMQ stores an id only if it is higher than the last one of that name; it confirms
all others too, and drops them.  So a copy is never stored, and a confirm proves that a message is
in the stream only while nothing else has used the name since the position was read.  There is no
compare and set and no fence:

    promised        each sequence at most once and in order, also after a take-over
    not promised    that a dead-lettered sequence is not in the stream: a former owner's late
                    bytes are stored if they arrive before higher sequences

What follows from that:

* A lane is opened again after every uncertain result, and only a stream that exists has a position:
  the server responds with 0 for one that does not.
* At the first error, time-out or cancellation, nothing more is sent, and the connection is closed
  with all its lanes.  What was in flight on them is `UNKNOWN`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

from outbox.core.brokers.port import (
    Appended,
    Capabilities,
    Foreign,
    Position,
    Stop,
    StopKind,
)
from outbox.core.model.response import one_line
from outbox.destinations.broker import BrokerFinding, stopped_finding
from outbox_brokers.rabbitmq.checks import check_streams
from outbox_brokers.rabbitmq.connection import Lost, Rejected
from outbox_brokers.rabbitmq.dial import Dialer
from outbox_brokers.rabbitmq.lanes import (
    OpenLane,
    Publishing,
    fit,
    publish_frames,
)
from outbox_brokers.rabbitmq.leader import Nodes, create, find
from outbox_brokers.rabbitmq.position import delete_publisher, read_position, unsubscribe
from outbox_brokers.rabbitmq.stops import (
    ACCESS_REFUSED,
    NO_STREAM,
    Stopped,
    code_name,
    rejected,
)
from outbox_brokers.rabbitmq.target import STREAM_NAME_BYTES_MAX, parse_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.brokers.port import Message, Owner, Standing
    from outbox.destinations.broker import BrokerAddress
    from outbox.network.dns import Resolver
    from outbox.network.egress import EgressPolicy
    from outbox_brokers.rabbitmq.connection import StreamConnection

_WHAT_TO_DO = (
    "check the URL, the credentials (outbox endpoint credentials) and that the server has the "
    "plugin rabbitmq_stream"
)

CAPABILITIES = Capabilities(compare=False, prefix=True, fence=False, position=True)


class RabbitMqBroker:
    """A `Broker` on RabbitMQ streams, bound to the event loop in which it was created."""

    def __init__(self, address: BrokerAddress, policy: EgressPolicy, resolver: Resolver) -> None:
        self._target = parse_url(address.url)
        self._timeout_s = address.timeout_s
        self._nodes = Nodes(self._target, Dialer(address, self._target, policy, resolver))
        self._lanes: dict[str, OpenLane] = {}

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    async def open(
        self, lane: str, owner: Owner, after: int, receipt: str | None, *, force: bool = False
    ) -> Standing:
        """Read where the lane stands; RabbitMQ has no fence to write.

        The publisher's sequence outlives the messages that retention removes, so no receipt is
        needed.  Another database has another publisher: a forced opening stands at the stream's
        last message, whichever publisher appended it.
        """
        attempt = _Opening()
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    return await self._open(attempt, lane, owner, after, force=force)
                except Lost as error:
                    if not error.while_idle:
                        raise
                # Opening a lane only reads.
                return await self._open(attempt, lane, owner, after, force=force)
        except Stopped as error:
            return error.stop
        except Rejected as error:
            return rejected(error.code, error.request)
        except Lost as error:
            return Stop(StopKind.UNKNOWN, one_line(error.detail))
        except TimeoutError:
            detail = f"the lane was not opened within {self._timeout_s:g} s"
            if attempt.connection is None:
                return Stop(StopKind.UNAVAILABLE, detail)
            return Stop(StopKind.UNKNOWN, detail)

    async def append(
        self, lane: str, owner: Owner, after: int, messages: Sequence[Message]
    ) -> Appended:
        """Publish the messages; those that no frame can hold end the append before them."""
        state = self._lanes.get(lane)
        if state is None or not state.connection.is_usable or state.identity != owner.identity:
            self._lanes.pop(lane, None)
            return _moved(after, "the lane's connection has ended: open the lane")
        if state.position != after:
            # The server would confirm lower sequences, and drop them.
            return _moved(after, f"the lane stands at {state.position}, not at {after}")
        frame_bytes_max = state.connection.frame_bytes_max
        encoded = fit(messages, frame_bytes_max)
        refused = None
        if len(encoded) < len(messages):
            refused = Stop(
                StopKind.REFUSED,
                f"message {messages[len(encoded)].sequence} does not fit into a frame of "
                f"{frame_bytes_max} bytes, the server's limit",
            )
        if not encoded:
            return Appended(after, refused)
        ids = [each.sequence for each in messages[: len(encoded)]]
        if ids[0] <= after or any(low >= high for low, high in pairwise(ids)):
            raise ValueError(f"sequences {ids[0]}…{ids[-1]} do not increase after {after}")
        publishing = Publishing(ids)
        frames = publish_frames(state.slot, ids, encoded, frame_bytes_max)
        through, stop = await self._publish(lane, state, publishing, frames, after)
        return Appended(through, stop or refused)

    async def check(self, lanes: Sequence[str]) -> list[BrokerFinding]:
        """Check the server, and the streams of these lanes."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await check_streams(self._nodes, self._target, lanes)
        except Stopped as error:
            return [stopped_finding(error.stop, _WHAT_TO_DO)]
        except (Lost, Rejected) as error:
            is_away = isinstance(error, Lost)
            return [BrokerFinding(True, one_line(str(error)), _WHAT_TO_DO, is_away)]
        except TimeoutError:
            detail = f"no response within {self._timeout_s:g} s"
            return [BrokerFinding(True, detail, _WHAT_TO_DO, is_away=True)]

    async def aclose(self) -> None:
        self._nodes.close()
        self._lanes.clear()

    # ------------------------------------------------------------------ open

    async def _open(
        self, attempt: _Opening, lane: str, owner: Owner, after: int, *, force: bool
    ) -> Standing:
        stream = self._target.stream_of(lane)
        reference = f"{owner.identity}/{lane}"
        if max(len(stream.encode()), len(reference.encode())) > STREAM_NAME_BYTES_MAX:
            return Stop(
                StopKind.MISCONFIGURED,
                f"the name of stream {stream}, or of its publisher, is longer than "
                f"{STREAM_NAME_BYTES_MAX} bytes",
            )
        await self._release(attempt, lane)
        attempt.connection = None
        locator = await self._nodes.locator()
        attempt.connection = locator
        try:
            placement = await find(locator, stream)
            if placement is None and after == 0 and self._target.create:
                await create(locator, stream)
                placement = await find(locator, stream)
        except asyncio.CancelledError:
            # The call was cancelled or timed out; without its response the connection is given up.
            locator.abort("the call was cancelled, or had no response in time")
            raise
        if placement is None:
            return self._absent(stream, after)
        attempt.connection = None
        connection = await self._nodes.leader(placement)
        attempt.connection = connection
        return await self._open_at(connection, stream, lane, owner.identity, reference, force=force)

    def _absent(self, stream: str, after: int) -> Standing:
        if after > 0:
            # Never created again: the stream has lost what it had acknowledged.
            return Position(0, None)
        return Stop(
            StopKind.MISCONFIGURED,
            f"stream {stream}: {code_name(NO_STREAM)}; create it, or add create=1 to the URL",
        )

    async def _open_at(
        self,
        connection: StreamConnection,
        stream: str,
        lane: str,
        identity: str,
        reference: str,
        *,
        force: bool,
    ) -> Standing:
        slot = connection.take_slot()
        try:
            result = await read_position(connection, slot, stream, lane, reference, force=force)
            await unsubscribe(connection, slot)
            if isinstance(result, Foreign):
                await self._withdraw(connection, slot)
                return result
        except Stopped:
            # All responses have come: the other lanes of the connection go on.
            await self._withdraw(connection, slot)
            raise
        except BaseException:
            connection.abort("opening a lane was cancelled, or had no response")
            raise
        self._lanes[lane] = OpenLane(connection, slot, identity, result.sequence)
        return result

    async def _withdraw(self, connection: StreamConnection, slot: int) -> None:
        """Delete the publisher and the subscription of a lane that was not opened."""
        try:
            for undo in (unsubscribe, delete_publisher):
                with suppress(Rejected):  # It was not made.
                    await undo(connection, slot)
        except BaseException:
            connection.abort("opening a lane was cancelled, or had no response")
            raise
        connection.free_slot(slot)

    async def _release(self, attempt: _Opening, lane: str) -> None:
        """Delete the publisher of a lane that is opened again."""
        state = self._lanes.pop(lane, None)
        if state is None or state.connection.lost is not None:
            return
        attempt.connection = state.connection
        try:
            await delete_publisher(state.connection, state.slot)
        except BaseException:
            state.connection.abort("a publisher could not be deleted")
            raise
        state.connection.free_slot(state.slot)

    # ------------------------------------------------------------------ append

    async def _publish(
        self, lane: str, state: OpenLane, publishing: Publishing, frames: bytes, after: int
    ) -> tuple[int, Stop | None]:
        connection = state.connection
        connection.publish(state.slot, publishing, frames)
        timed_out = False
        try:
            async with asyncio.timeout(self._timeout_s):
                await publishing.ended
        except TimeoutError:
            timed_out = True
        finally:
            connection.publishers.pop(state.slot, None)
            if not publishing.is_confirmed:
                # Also when this call is cancelled: nothing more is sent.
                connection.abort("an append ended without the server's confirms")
                self._lanes.pop(lane, None)
        through = publishing.through(after)
        if publishing.is_confirmed:
            state.position = through
            return through, None
        if publishing.failed_ids:
            code = min(publishing.failed_ids.values())
            # Of a stream that is gone too: opening the lane says so.
            kind = StopKind.MISCONFIGURED if code == ACCESS_REFUSED else StopKind.UNAVAILABLE
            if not publishing.has_response:
                kind = StopKind.UNKNOWN
            return through, Stop(kind, f"publishing: {code_name(code)}")
        if timed_out:
            return through, Stop(StopKind.UNKNOWN, f"no confirm within {self._timeout_s:g} s")
        lost = publishing.error or Lost("the connection ended")
        kind = StopKind.CLOSED if lost.while_idle else StopKind.UNKNOWN
        return through, Stop(kind, one_line(lost.detail))


class _Opening:
    """How far a call of `open` came."""

    connection: StreamConnection | None = None
    """The connection on which it has asked something; None: it has none yet."""


def _moved(after: int, detail: str) -> Appended:
    return Appended(after, Stop(StopKind.MOVED, detail))

"""A connection of the stream protocol, with rstream's frames.

rstream's own `Client` resolves the host itself, where no egress policy can check the address;
its requests wait for their time-out after the connection is lost; and its `close` takes up to five
seconds.  So the frames are rstream's, and the connection is this one:

* Frames that are sent in one iteration of the event loop share one system call.
* When the connection ends, all that waits for it ends at once.
* Nothing is sent after `abort`: what the kernel has not taken is dropped.

The connection ends at the first error of a publisher and at the first `MetadataUpdate`.  The
server returns errors for what was sent after either, or stores it; only a connection that is
closed proves that nothing more of an append is on its way than what is on the wire.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from rstream import schema
from rstream.constants import Key
from rstream.encoding import encode_frame

from outbox.network.reuse_limits import RESEND_WITHIN_S, peer_address
from outbox_brokers.rabbitmq.frames import decode_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.network.reuse_limits import ReuseLimits

    Pending = asyncio.Future["schema.Frame"]

F = TypeVar("F", bound=schema.Frame)

CHUNK_BYTES_MAX = 64 * 1024 * 1024
"""Longest frame with a chunk of a stream, if a subscription awaits one."""
FRAME_BYTES_MAX = 64 * 1024
"""Longest other frame that is accepted: decoding it takes the event loop some milliseconds."""
RETIRED_CHECK_S = 0.5
"""Interval at which a connection that is too old ends if nothing is awaited on it."""
UNASKED_FRAMES = 100
"""Frames that the server may send beside those that are awaited, such as heartbeats."""
UNASKED_FRAMES_PER_S = 2
TOO_MANY = "the server sent more frames than were asked for"
SLOTS = 256
"""Publishers of a connection: the protocol numbers them with one byte."""
SILENT_HEARTBEATS = 2.5
"""Heartbeats without a byte of the server after which the connection is lost."""

_RESPONSE = 0x8000
_OK = 1
_HEADER = struct.Struct(">IHH")


class Lost(Exception):
    """The connection ended."""

    def __init__(self, detail: str, error: BaseException | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.error = error
        self.while_idle = False
        """Whether the server closed the idle connection while a request was on its way."""


class Rejected(Exception):
    """The server responded to a request with an error."""

    def __init__(self, code: int, request: str) -> None:
        super().__init__(f"{request}: code {code}")
        self.code = code
        self.request = request


class Publisher(Protocol):
    """Receives what the server says of one publisher."""

    def confirmed(self, ids: tuple[int, ...]) -> bool:
        """Take confirms; returns whether any of them was awaited."""
        ...

    def failed(self, errors: list[tuple[int, int]]) -> None:
        """Publishing ids and their codes; the connection ends after this call."""

    def lost(self, error: Lost) -> None: ...


class StreamConnection(asyncio.Protocol):
    """One connection; made by `dial.Dialer`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._unsent: list[bytes] = []
        self._correlation = 0
        self._requests: dict[int, Pending] = {}
        self._tuned: asyncio.Future[schema.Tune] = self._loop.create_future()
        self._tuned.add_done_callback(_retrieve)
        self._heartbeat: asyncio.TimerHandle | None = None
        self._heartbeat_s = 0.0
        self._received_at = self._loop.time()
        self._unasked_left = float(UNASKED_FRAMES)
        self._unasked_at = self._received_at
        self._free_slots = list(range(SLOTS - 1, -1, -1))
        self.publishers: dict[int, Publisher] = {}
        self.subscriptions: dict[int, Callable[[bytes], None]] = {}
        self.subscribed: set[int] = set()
        """Subscriptions whose end the server has not confirmed: a chunk may be on its way."""
        self.frame_bytes_max = 0
        """Longest frame that the server accepts."""
        self.advertised: tuple[str, int] | None = None
        """Host and port of the node, as it names itself to clients; None: it does not."""
        self.secure = False
        self.limits: ReuseLimits | None = None
        self._is_retired = False
        self._has_served = False
        """Whether it had responses since it was established."""
        self._sent_at = 0.0
        """When it was idle last."""
        self.lost: Lost | None = None
        """Why the connection ended; None: it is open."""

    @property
    def is_usable(self) -> bool:
        """Whether it may carry another call; one that may not ends when nothing is awaited."""
        if self.lost is not None or self._is_retired:
            return False
        if self.limits is None or self.limits.allow(self):
            return True
        self._is_retired = True
        self._end_retired()
        return False

    @property
    def address(self) -> str | None:
        """IP address of the node."""
        return peer_address(self._transport)

    def _end_retired(self) -> None:
        if self.lost is None and (self._requests or self.publishers or self.subscribed):
            self._loop.call_later(RETIRED_CHECK_S, self._end_retired)
        else:
            self.abort("another connection replaces it")

    # ------------------------------------------------------------------ slots

    @property
    def is_full(self) -> bool:
        return not self._free_slots

    def take_slot(self) -> int:
        return self._free_slots.pop()

    def free_slot(self, slot: int) -> None:
        self._free_slots.append(slot)

    # ------------------------------------------------------------------ sending

    def request(self, frame_type: Callable[..., schema.Frame], **fields: Any) -> Pending:
        """Send a request; the future has its response, or raises `Rejected` or `Lost`."""
        pending: Pending = self._loop.create_future()
        pending.add_done_callback(_retrieve)
        if self.lost is not None:
            pending.set_exception(self.lost)
            return pending
        self._begin()
        self._correlation += 1
        self._requests[self._correlation] = pending
        self.send(encode_frame(frame_type(correlation_id=self._correlation, **fields)))
        return pending

    async def exchange(
        self, frame_type: Callable[..., schema.Frame], response: type[F], **fields: Any
    ) -> F:
        """Send a request and return its response."""
        return cast("F", await self.request(frame_type, **fields))

    def publish(self, slot: int, publisher: Publisher, frames: bytes) -> None:
        """Send messages, whose results the publisher receives."""
        self._begin()
        self.publishers[slot] = publisher
        self.send(frames)

    def _begin(self) -> None:
        """Note when the first of the requests is sent whose responses are awaited."""
        if not (self._requests or self.publishers):
            self._sent_at = self._loop.time()

    def send(self, data: bytes) -> None:
        """Send frames, together with all others of this iteration of the event loop."""
        if self.lost is not None:
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)

    def _flush(self) -> None:
        if self.lost is None and self._unsent and self._transport is not None:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    async def tuned(self) -> schema.Tune:
        """Wait for the server's limits, which follow the authentication."""
        return await asyncio.shield(self._tuned)

    def start_heartbeats(self, heartbeat_s: float) -> None:
        """Send a heartbeat in time, and end the connection when the server's do not arrive."""
        self._heartbeat_s = heartbeat_s
        if heartbeat_s and self.lost is None:
            self._heartbeat = self._loop.call_later(heartbeat_s / 2, self._beat)

    def _beat(self) -> None:
        silent_s = self._loop.time() - self._received_at
        if silent_s > self._heartbeat_s * SILENT_HEARTBEATS:
            self.abort(f"no heartbeat of the server for {silent_s:.0f} s")
            return
        self.send(encode_frame(schema.Heartbeat()))
        self._heartbeat = self._loop.call_later(self._heartbeat_s / 2, self._beat)

    # ------------------------------------------------------------------ the end

    def abort(self, detail: str, error: BaseException | None = None) -> None:
        """End the connection; nothing is sent after this call."""
        self._end(Lost(detail, error))

    def _end(self, lost: Lost) -> None:
        if self.lost is not None:
            return
        self.lost = lost
        self._unsent.clear()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._transport is not None:
            self._transport.abort()
        waiting: list[asyncio.Future[Any]] = [*self._requests.values(), self._tuned]
        for pending in waiting:
            if not pending.done():
                pending.set_exception(self.lost)
        self._requests.clear()
        for publisher in list(self.publishers.values()):
            publisher.lost(self.lost)
        self.publishers.clear()
        self.subscriptions.clear()

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self.lost is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        now = self._loop.time()
        is_sudden = self._received_at <= self._sent_at and now < self._sent_at + RESEND_WITHIN_S
        lost = Lost("the connection was closed", exc)
        lost.while_idle = self._has_served and is_sudden
        self._end(lost)

    def data_received(self, data: bytes) -> None:
        self._received_at = self._loop.time()
        received = self._received
        received += data
        place = 0
        while self.lost is None and len(received) - place >= _HEADER.size:
            size, key, _ = _HEADER.unpack_from(received, place)
            if not 4 <= size <= self._frame_bytes_max(key):
                self.abort(f"the server sent a frame of {size} bytes: is it the stream port?")
                return
            if len(received) - place < 4 + size:
                break
            frame = bytes(memoryview(received)[place + 4 : place + 4 + size])
            place += 4 + size
            try:
                self._frame_received(key, frame)
            # Whatever a frame of another layout leads to, also inside rstream.
            except Exception as error:
                self.abort(f"the server sent a malformed frame ({type(error).__name__})", error)
        del received[:place]

    def _frame_bytes_max(self, key: int) -> int:
        is_chunk = bool(self.subscribed) and key == Key.Deliver.value
        return CHUNK_BYTES_MAX if is_chunk else FRAME_BYTES_MAX

    def _count_unasked(self) -> None:
        """End the connection if the server sends frames that nothing awaits again and again."""
        now = self._received_at
        left = self._unasked_left + (now - self._unasked_at) * UNASKED_FRAMES_PER_S
        self._unasked_left, self._unasked_at = min(left, UNASKED_FRAMES) - 1, now
        if self._unasked_left < 0:
            self.abort(TOO_MANY)

    def _frame_received(self, key: int, frame: bytes) -> None:
        if key & _RESPONSE:
            self._response_received(key & ~_RESPONSE, frame)
        elif key == Key.PublishConfirm.value:
            publisher, count = frame[4], int.from_bytes(frame[5:9])
            ids = struct.unpack_from(f">{count}Q", frame, 9)
            listener = self.publishers.get(publisher)
            self._has_served = True
            if listener is None or not listener.confirmed(ids):
                self._count_unasked()
        elif key == Key.PublishError.value:
            self._publish_failed(frame[4], [*struct.iter_unpack(">QH", frame[9:])])
        elif key == Key.Deliver.value:
            if (receive := self.subscriptions.get(frame[4])) is not None:
                receive(frame[5:])
            else:
                self._count_unasked()
        elif key == Key.MetadataUpdate.value:
            update = cast("schema.MetadataUpdate", decode_frame(frame)).metadata_info
            self.abort(f"stream {update.stream} was deleted, or its leader ended or moved")
        elif key == Key.Close.value:
            close = cast("schema.Close", decode_frame(frame))
            self.abort(f"the server closed the connection: {close.reason}")
        elif key == Key.Tune.value:
            if not self._tuned.done():
                self._tuned.set_result(cast("schema.Tune", decode_frame(frame)))
            else:
                self._count_unasked()
        elif key == Key.Heartbeat.value:
            self._count_unasked()
        else:
            self.abort(f"the server sent an unknown frame ({key})")

    def _publish_failed(self, publisher: int, errors: list[tuple[int, int]]) -> None:
        if (listener := self.publishers.get(publisher)) is not None:
            listener.failed(errors)
        codes = ", ".join(map(str, sorted({code for _, code in errors})))
        self.abort(f"the server refused a message of another lane (code {codes})")

    def _response_received(self, key: int, frame: bytes) -> None:
        pending = self._requests.pop(int.from_bytes(frame[4:8]), None)
        if pending is None or pending.done():
            self._count_unasked()
            return
        # Only Metadata has a code for each stream.  Of the others, the rest is absent if the
        # request failed.
        code = _OK if key == Key.Metadata.value else int.from_bytes(frame[8:10])
        self._has_served = self.limits is not None
        if code == _OK:
            pending.set_result(decode_frame(frame))
        else:
            pending.set_exception(Rejected(code, Key(key).name))


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the exception as retrieved: a request may have no waiter any more."""
    if not future.cancelled():
        future.exception()

"""The receivers: they take every delivery into the books, and fail when they are told to.

One port for a group of endpoints, each endpoint at a path of its own.  HTTP is
read by hand, because a thousand requests a second share the processors with
the relays and the database that are to be watched.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from uuid import UUID

from outbox.core.delivery.signature import SignatureError, verify
from outbox.devtools.chaos.ledger import Arrival, Outcome
from outbox.devtools.chaos.port_gate import Door
from outbox.devtools.chaos.responses import ANSWERS, OK, status_line
from outbox.receiver.message import BadMessage, parse

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Sequence

    from outbox.devtools.chaos.ledger import Books, Request
    from outbox.devtools.chaos.responses import Answer
    from outbox.receiver.proxy import Passed

HEAD_BYTES_MAX = 65536
DOUBT_S = 1.0
"""An answer given shorter than this before its connection was reset may be lost."""
REJECTS = 3
"""So many events are refused for good at one time."""
ENDLESS_CHUNK = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
ENDLESS_EVERY_S = 0.02


@dataclass(slots=True)
class Desk:
    """One endpoint's place."""

    number: int
    secret: bytes = b""
    mood: str = ""
    """The fault that it answers with; empty: none."""
    mood_until: float = 0.0
    rejects: int = 0
    """How many more it refuses for good."""


class Receivers:
    """All endpoints of the run.

    Args:
        groups: how many ports there are; an endpoint's is its number modulo this.
        forward: passes a delivery on and returns what came back; None: it ends here.
    """

    def __init__(
        self,
        books: Books,
        groups: int,
        rng: random.Random,
        forward: Callable[[dict[str, str], bytes], Awaitable[Passed]] | None = None,
    ) -> None:
        self.books = books
        self.rng = rng
        self.forward = forward
        self.desks: dict[str, Desk] = {}
        self.doors = [Door(lambda n=n: _Guest(self, n)) for n in range(groups)]  # type: ignore[misc]
        self.guests: set[_Guest] = set()
        self.rejected: set[bytes] = set()
        """Events that are refused for good, each time but on a replay."""
        self.tasks: set[asyncio.Task[None]] = set()

    def add(self, number: int) -> str:
        """A place for one more endpoint; returns its URL."""
        self.desks[f"/e{number}"] = Desk(number)
        return f"http://127.0.0.1:{self.doors[number % len(self.doors)].port}/e{number}"

    def desk(self, number: int) -> Desk:
        """The place of an endpoint."""
        return self.desks[f"/e{number}"]

    async def open(self) -> None:
        """Listen at all ports."""
        for door in self.doors:
            await door.open()

    def shut(self, group: int) -> None:
        """Nobody listens at a port any more, and its connections are reset."""
        self.doors[group].shut()
        for guest in [each for each in self.guests if each.group == group]:
            guest.reset("refuse")

    def close(self) -> None:
        """The end."""
        for door in self.doors:
            door.close()
        for guest in list(self.guests):
            guest.reset("the end")
        for task in self.tasks:
            task.cancel()

    def take(self, path: str, headers: Headers, body: bytes) -> tuple[Desk, Request] | None:
        """Take a delivery into the books; None: it is none."""
        desk = self.desks.get(path)
        if desk is None:
            self.books.reject(f"a request for {path[:80]}")
            return None
        try:
            verify(headers, body, [desk.secret], time.time())
            (message,) = parse(headers, body)
            data = message.data
            arrival = Arrival(
                endpoint=desk.number,
                lane=message.lane,
                seq=message.sequence,
                previous_seq=message.previous_sequence,
                delivery_id=message.delivery_id,
                event_id=UUID(message.event_id).bytes,
                key=data["key"],
                version=data["version"],
                replay=message.replay_of is not None or message.backfill is not None,
                at=time.monotonic(),
            )
        except (SignatureError, BadMessage, KeyError, TypeError, ValueError) as error:
            self.books.reject(f"{path}: {error}")
            return None
        request, others = self.books.arrive(arrival)
        if others:
            self._look_again(request, others, 2)
        return desk, request

    def _look_again(self, request: Request, others: Sequence[Request], rounds: int) -> None:
        """A sender that left before it sent the next request is heard of a round later."""
        if rounds:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._look_again, request, others, rounds - 1)
            return
        for other in others:
            if other.left_at is None:
                self.books.overlap(other, request)

    def answering(self, desk: Desk, request: Request, event: bytes) -> Answer:
        """How a request is going to be answered."""
        if event in self.rejected and request.seq not in request.lane.replays:
            return ANSWERS["reject"]
        if desk.mood and time.monotonic() >= desk.mood_until:
            desk.mood = ""
        if desk.mood == "reject":
            if desk.rejects > 0 and request.seq not in request.lane.replays:
                desk.rejects -= 1
                self.rejected.add(event)
                return ANSWERS["reject"]
            return OK
        return ANSWERS[desk.mood] if desk.mood else OK


class Headers(dict[str, str]):
    """Names in lower case, found whatever their case."""

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        return super().get(name.lower(), default)


class _Guest(asyncio.Protocol):
    """One connection of a relay."""

    def __init__(self, receivers: Receivers, group: int) -> None:
        self._receivers = receivers
        self._books = receivers.books
        self.group = group
        self._unread = b""
        self._transport: asyncio.Transport | None = None
        self._request: Request | None = None
        self._answered_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._receivers.guests.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._receivers.guests.discard(self)
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        if self._request is not None:
            self._books.leave(self._request, time.monotonic())

    def data_received(self, data: bytes) -> None:
        self._unread = self._unread + data if self._unread else data
        end = self._unread.find(b"\r\n\r\n")
        if end < 0:
            if len(self._unread) > HEAD_BYTES_MAX:
                self._books.reject("a head without an end")
                self.reset("")
            return
        lines = self._unread[:end].decode("latin-1").split("\r\n")
        headers = Headers()
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        total = end + 4 + int(headers.get("Content-Length") or 0)
        if len(self._unread) < total:
            return
        body = self._unread[end + 4 : total]
        self._unread = self._unread[total:]
        self._serve(lines[0].split(" ")[1], headers, body)

    def _serve(self, path: str, headers: Headers, body: bytes) -> None:
        taken = self._receivers.take(path, headers, body)
        if taken is None:
            self._write(status_line(400))
            return
        desk, request = taken
        self._request = request
        event = UUID(headers.get("X-Event") or "").bytes
        answering = self._receivers.answering(desk, request, event)
        if answering is OK and self._receivers.forward is not None:
            task = asyncio.get_running_loop().create_task(self._pass_on(request, headers, body))
            self._receivers.tasks.add(task)
            task.add_done_callback(self._receivers.tasks.discard)
            return
        answering(self, self._receivers.rng)

    async def _pass_on(self, request: Request, headers: Headers, body: bytes) -> None:
        assert self._receivers.forward is not None
        status = (await self._receivers.forward(headers, body)).status
        outcome = Outcome.GOOD if 200 <= status <= 299 else Outcome.BAD
        label = "ok" if outcome is Outcome.GOOD else f"your receiver said {status}"
        if not request.open:
            # It came too late to be heard.
            self._books.answer(request, Outcome.BAD, f"{label}, too late", time.monotonic())
            return
        self.finish(outcome, label, status_line(status))

    # ------------------------------------------------------------- answering

    def expect(self, outcome: Outcome, label: str) -> None:
        """The answer is decided, and not given yet."""
        if self._request is not None:
            self._books.answer(self._request, outcome, label, time.monotonic(), ends=False)

    def finish(self, outcome: Outcome, label: str, data: bytes, *, close: bool = False) -> None:
        """Give the answer."""
        if self._request is not None:
            self._answered_at = time.monotonic()
            self._books.answer(self._request, outcome, label, self._answered_at)
        self._write(data)
        if close and self._transport is not None:
            self._transport.close()

    def drip(self, label: str, data: bytes, every_s: float) -> None:
        """Give a good answer byte by byte; nobody knows whether it is waited for."""
        if self._transport is None or self._transport.is_closing():
            return
        if len(data) == 1:
            self.finish(Outcome.UNSURE, label, data)
            return
        self._write(data[:1])
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(every_s, self.drip, label, data[1:], every_s)

    def pour(self) -> None:
        """Write for ever."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() == 0:
            self._transport.write(ENDLESS_CHUNK)
        self._timer = asyncio.get_running_loop().call_later(ENDLESS_EVERY_S, self.pour)

    def reset(self, label: str) -> None:
        """RST instead of an answer, or right behind one."""
        request, transport = self._request, self._transport
        if request is not None:
            if request.open:
                self._books.answer(request, Outcome.BAD, label, time.monotonic())
            elif time.monotonic() - self._answered_at < DOUBT_S:
                self._books.doubt(request, label)
        if transport is not None and not transport.is_closing():
            # With nothing to linger for, closing sends RST.
            connection: socket.socket = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

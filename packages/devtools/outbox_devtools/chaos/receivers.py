"""Receivers of a chaos run: record every delivery in the ledger, and respond with faults.

One port per group of endpoints, one path per endpoint.  HTTP is parsed by hand, because a
thousand requests per second share the processors with the relays and the database under test.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast
from uuid import UUID

from outbox.core.messages.signature import SignatureError, verify
from outbox.core.model.headers import DEFAULT_PREFIX
from outbox.receiver.message import BadMessage
from outbox.receiver.verification import parse_signed
from outbox_devtools.chaos.ledger import Arrival, ResponseOutcome
from outbox_devtools.chaos.port_gate import PortGate
from outbox_devtools.chaos.responses import FAILURES, OK, RESPONSES, status_line

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Sequence

    from outbox.receiver.proxy import ProxiedResponse
    from outbox_devtools.chaos.ledger import Ledger, ReceivedRequest
    from outbox_devtools.chaos.plan import PlannedEndpoint
    from outbox_devtools.chaos.responses import ResponseScript

HEAD_BYTES_MAX = 65536
UNSURE_S = 1.0
"""A response sent less than this before a reset of its connection may be lost."""
REJECTS = 3
"""Events refused permanently by one fault."""
ENDLESS_CHUNK = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
ENDLESS_EVERY_S = 0.02


@dataclass(slots=True)
class EndpointStub:
    """State of one endpoint."""

    number: int
    fail_share: float = 0.0
    """Share of requests that fail at random."""
    rejects: int = 0
    """Remaining events to reject permanently."""
    rejected: set[bytes] = field(default_factory=set)
    """Events refused permanently, except on a replay."""
    secret: bytes = b""
    fault: str = ""
    """The fault that it responds with until `fault_until`."""
    fault_until: float = 0.0


class Receivers:
    """All endpoints of a run.

    Args:
        groups: number of ports; an endpoint uses the one of its number modulo this.
        forward: forwards a delivery upstream; None: the run responds itself.
    """

    def __init__(
        self,
        ledger: Ledger,
        groups: int,
        rng: random.Random,
        forward: Callable[[dict[str, str], bytes], Awaitable[ProxiedResponse]] | None = None,
    ) -> None:
        self.ledger = ledger
        self.rng = rng
        self.forward = forward
        self.endpoints: dict[str, EndpointStub] = {}
        self.gates = [PortGate(lambda n=n: ReceiverConnection(self, n)) for n in range(groups)]  # type: ignore[misc]
        self.connections: set[ReceiverConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    def add(self, number: int, planned: PlannedEndpoint) -> str:
        """Add an endpoint; returns its URL."""
        self.endpoints[f"/e{number}"] = EndpointStub(number, planned.fail_share, planned.rejects)
        return f"http://127.0.0.1:{self.gates[number % len(self.gates)].port}/e{number}"

    def endpoint(self, number: int) -> EndpointStub:
        """Return the state of an endpoint."""
        return self.endpoints[f"/e{number}"]

    async def open(self) -> None:
        """Listen on all ports."""
        for gate in self.gates:
            await gate.open()

    def shut(self, group: int) -> None:
        """Close a port and reset its connections."""
        self.gates[group].shut()
        for connection in [each for each in self.connections if each.group == group]:
            connection.reset("refuse")

    def close(self) -> None:
        """Close all ports and connections."""
        for gate in self.gates:
            gate.close()
        for connection in list(self.connections):
            connection.reset("closed")
        for task in self.tasks:
            task.cancel()

    def record_delivery(
        self, path: str, headers: Headers, body: bytes
    ) -> tuple[EndpointStub, ReceivedRequest] | None:
        """Record a request in the ledger; None: it is not a valid delivery."""
        stub = self.endpoints.get(path)
        if stub is None:
            self.ledger.record_rejection(f"a request for {path[:80]}")
            return None
        try:
            signed = verify(headers, body, [stub.secret], time.time())
            read = {name.lower(): value for name, value in headers.items()}
            (message,) = parse_signed(read, body, DEFAULT_PREFIX, signed, [stub.secret])
            data = message.data
            arrival = Arrival(
                endpoint=stub.number,
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
            self.ledger.record_rejection(f"{path}: {error}")
            return None
        request, others = self.ledger.record_arrival(arrival)
        if others:
            self._recheck_overlaps(request, others, 2)
        return stub, request

    def _recheck_overlaps(
        self, request: ReceivedRequest, others: Sequence[ReceivedRequest], rounds: int
    ) -> None:
        """Record overlaps two loop iterations later.

        The disconnect of a sender may be read after its next request arrived.
        """
        if rounds:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._recheck_overlaps, request, others, rounds - 1)
            return
        for other in others:
            if other.left_at is None:
                self.ledger.record_overlap(other, request)

    def choose_response(
        self, stub: EndpointStub, request: ReceivedRequest, event: bytes
    ) -> ResponseScript:
        """Select the response to a request."""
        if request.seq not in request.lane.replays:
            if stub.rejects > 0 and event not in stub.rejected:
                stub.rejects -= 1
                stub.rejected.add(event)
            if event in stub.rejected:
                return RESPONSES["reject"]
        if time.monotonic() < stub.fault_until:
            return RESPONSES[stub.fault]
        return self.rng.choice(FAILURES) if self.rng.random() < stub.fail_share else OK


class Headers(dict[str, str]):
    """Case-insensitive headers; the keys are lower-case."""

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        return super().get(name.lower(), default)


class ReceiverConnection(asyncio.Protocol):
    """One connection of a relay."""

    def __init__(self, receivers: Receivers, group: int) -> None:
        self._receivers = receivers
        self._ledger = receivers.ledger
        self.group = group
        self._unread = b""
        self._transport: asyncio.Transport | None = None
        self._request: ReceivedRequest | None = None
        self._responded_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._receivers.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._receivers.connections.discard(self)
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        if self._request is not None:
            self._ledger.record_disconnect(self._request, time.monotonic())

    def data_received(self, data: bytes) -> None:
        self._unread = self._unread + data if self._unread else data
        end = self._unread.find(b"\r\n\r\n")
        if end < 0:
            if len(self._unread) > HEAD_BYTES_MAX:
                self._ledger.record_rejection("request headers too large")
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
        taken = self._receivers.record_delivery(path, headers, body)
        if taken is None:
            self._write(status_line(400))
            return
        stub, request = taken
        self._request = request
        event = UUID(headers.get("X-Event-Id") or "").bytes
        respond = self._receivers.choose_response(stub, request, event)
        if respond is OK and self._receivers.forward is not None:
            task = asyncio.get_running_loop().create_task(self._forward(request, headers, body))
            self._receivers.tasks.add(task)
            task.add_done_callback(self._receivers.tasks.discard)
            return
        respond(self, self._receivers.rng)

    async def _forward(self, request: ReceivedRequest, headers: Headers, body: bytes) -> None:
        assert self._receivers.forward is not None
        status = (await self._receivers.forward(headers, body)).status
        outcome = ResponseOutcome.GOOD if 200 <= status <= 299 else ResponseOutcome.BAD
        label = "ok" if outcome is ResponseOutcome.GOOD else f"your receiver responded {status}"
        if not request.open:
            # The relay closed the connection before the response.
            self._ledger.record_response(
                request, ResponseOutcome.BAD, f"{label}, too late", time.monotonic()
            )
            return
        self.finish(outcome, label, status_line(status))

    # ------------------------------------------------------------- responses

    def expect(self, outcome: ResponseOutcome, label: str) -> None:
        """Record a response that is chosen but not sent yet."""
        if self._request is not None:
            self._ledger.record_response(
                self._request, outcome, label, time.monotonic(), ends=False
            )

    def finish(
        self, outcome: ResponseOutcome, label: str, data: bytes, *, close: bool = False
    ) -> None:
        """Send a response."""
        if self._request is not None:
            self._responded_at = time.monotonic()
            self._ledger.record_response(self._request, outcome, label, self._responded_at)
        self._write(data)
        if close and self._transport is not None:
            self._transport.close()

    def drip(self, label: str, data: bytes, every_s: float) -> None:
        """Send a response byte by byte; the relay may time out before its end."""
        if self._transport is None or self._transport.is_closing():
            return
        if len(data) == 1:
            self.finish(ResponseOutcome.UNSURE, label, data)
            return
        self._write(data[:1])
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(every_s, self.drip, label, data[1:], every_s)

    def stream_endlessly(self) -> None:
        """Send chunks until the connection is closed."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() == 0:
            self._transport.write(ENDLESS_CHUNK)
        self._timer = asyncio.get_running_loop().call_later(ENDLESS_EVERY_S, self.stream_endlessly)

    def reset(self, label: str) -> None:
        """Send RST instead of a response, or right after one."""
        request, transport = self._request, self._transport
        if request is not None:
            if request.open:
                self._ledger.record_response(request, ResponseOutcome.BAD, label, time.monotonic())
            elif time.monotonic() - self._responded_at < UNSURE_S:
                self._ledger.mark_unsure(request, label)
        if transport is not None and not transport.is_closing():
            # SO_LINGER with a time of 0 makes close send RST.
            sock: socket.socket = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

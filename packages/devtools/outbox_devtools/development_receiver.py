"""Development receiver of `outbox listen`: the receiver library, with faults, output and totals.

Deliveries are verified, parsed and recorded by `outbox.receiver`, in an in-memory inbox.  What
this module adds:

* signatures are verified only if there is a secret;
* fault injection fails random attempts, before the effect (the sender has to retry) or after it
  (the retry is a duplicate);
* requests are forwarded to another receiver, and what that one accepted is recorded;
* every request is reported, and totals are kept.

A batch is processed one by one; X-Accepted-Through reports partial success.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import struct
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from aiohttp import web

from outbox.core.messages.batch import ACCEPTED_THROUGH
from outbox.core.messages.signature import SignatureError, verify
from outbox.core.model.headers import DEFAULT_PREFIX
from outbox.errors import UsageError
from outbox.receiver.inbox.inbox import Inbox
from outbox.receiver.inbox.memory import MemoryDatabase
from outbox.receiver.lane_order import OrderKind, SequenceState
from outbox.receiver.proxy import describe_status
from outbox.receiver.requests import unverified
from outbox.receiver.verification import parse_signed
from outbox.web.address import Address
from outbox.web.serving import listen, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from outbox.receiver.lane_order import Observation, StoredLane
    from outbox.receiver.message import Message
    from outbox.receiver.proxy import ProxiedResponse

DEVELOPMENT_BODY_BYTES_MAX = 65 * 1024 * 1024
"""The largest payload that can be configured, plus the envelope."""


class ReceiverFault(StrEnum):
    """How an attempt is made to fail."""

    ERROR = "error"
    """500"""
    UNAVAILABLE = "unavailable"
    """503 with Retry-After: 0"""
    RESET = "reset"
    """The connection is reset without a response."""


_STATUS = {
    ReceiverFault.ERROR: 500,
    ReceiverFault.UNAVAILABLE: 503,
    ReceiverFault.RESET: None,
}


class HandledOutcome(StrEnum):
    """Outcome of a delivery at the development receiver."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """Processed before, and dropped."""
    CONFLICT = "conflict"
    """Its sequence number was used by another delivery, or lies beyond the end of its lane."""
    FAILED = "failed"
    """Injected fault before the effect, or not accepted upstream."""
    REJECTED = "rejected"
    """Not signed, not a delivery, or changed in transit."""


@dataclass(frozen=True, slots=True)
class HandledRequest:
    """One delivery or other request, with its outcome."""

    outcome: HandledOutcome
    status: int | None
    """Status of the response; None: no response."""
    message: Message | None = None
    """The message; None if it was rejected."""
    observation: Observation | None = None
    """Result of the order check; None if it was not processed."""
    fault: ReceiverFault | None = None
    """Injected fault; unless the outcome is FAILED, only the response is lost."""
    reason: str = ""
    """Why it failed or was rejected."""


@dataclass(frozen=True, slots=True)
class OrderTotals:
    """Totals of the order check over all lanes."""

    received: int
    """All deliveries observed; the next five fields count kinds of them."""
    duplicates: int
    gaps: int
    out_of_order: int
    """Old deliveries that had been missing: a higher number overtook them."""
    late: int
    """Old deliveries that had been a hole or unknown: copies that were delayed."""
    conflicts: int
    missing: int
    """Numbers missing now, among the newest `lane_order.RANGES_MAX` ranges of each lane."""
    holes: int
    """Likewise: dead-lettered numbers that were neither delivered late nor replayed."""


@dataclass(frozen=True, slots=True)
class DevelopmentTotals:
    """Counters up to now."""

    requests: int
    accepted: int
    duplicates: int
    failed: int
    rejected: int
    lost: int
    """Processed deliveries whose response was lost by an injected fault."""
    order: OrderTotals

    @property
    def good(self) -> bool:
        """Nothing is missing, out of order, conflicting or rejected."""
        order = self.order
        return not (order.missing or order.out_of_order or order.conflicts or self.rejected)


class DevelopmentReceiver:
    """HTTP receiver at any path; see the top of this module.

    Args:
        secrets: keys for verification; empty: signatures are not verified.
        fail_rate: share of valid requests that fail, half of them after the effect.
        faults: the ways to fail.
        latency_s: delay before each response, in seconds.
        rng: source of the random choices.
        on_request: called for every delivery with its outcome, before the response.
        forward: forwards a request upstream.  A status other than 2xx is returned
            unchanged, and only what upstream accepted is accepted here.
        from_start: all lanes begin after this receiver, so that numbers before the first
            one received are missing.
        header_prefix: prefix of the endpoint's header names.

    Raises:
        UsageError: a rate or a time is out of range.
    """

    def __init__(
        self,
        secrets: Sequence[bytes] = (),
        *,
        fail_rate: float = 0.0,
        faults: Sequence[ReceiverFault] = tuple(ReceiverFault),
        latency_s: float = 0.0,
        rng: random.Random | None = None,
        on_request: Callable[[HandledRequest], None] | None = None,
        forward: Callable[[Mapping[str, str], bytes], Awaitable[ProxiedResponse]] | None = None,
        from_start: bool = False,
        header_prefix: str = DEFAULT_PREFIX,
    ) -> None:
        if not 0.0 <= fail_rate <= 1.0:
            raise UsageError(f"fail rate: must be between 0 and 1, not {fail_rate:g}")
        if not 0.0 <= latency_s <= 3600.0:
            raise UsageError(f"latency: must be between 0 and 3600 s, not {latency_s:g}")
        if fail_rate and not faults:
            raise UsageError("fail rate: choose at least one fault")
        self.secrets = tuple(secrets)
        self._fail_rate = fail_rate
        self._faults = tuple(faults)
        self._latency_s = latency_s
        self._rng = rng or random.Random()  # noqa: S311  not used for secrets
        self.on_request = on_request
        self._forward = forward
        self._prefix = header_prefix
        self._inbox = Inbox(from_start=from_start)
        # A sender may retry for days; only the number of X-Delivery values is limited.
        self._database = MemoryDatabase(math.inf)
        self._outcomes = dict.fromkeys(HandledOutcome, 0)
        self._kinds = dict.fromkeys(OrderKind, 0)
        self._was = dict.fromkeys(SequenceState, 0)
        self._lost = 0

    def lanes(self) -> dict[str, StoredLane]:
        """Return the order check of each lane, by name."""
        with self._database.transaction() as transaction:
            return self._inbox.lanes(transaction)

    def totals(self) -> DevelopmentTotals:
        """The counts up to now."""
        states = [lane.state for lane in self.lanes().values()]
        order = OrderTotals(
            received=sum(self._kinds.values()),
            duplicates=self._kinds[OrderKind.DUPLICATE],
            gaps=self._kinds[OrderKind.GAP],
            out_of_order=self._was[SequenceState.MISSING],
            late=self._was[SequenceState.HOLE] + self._was[SequenceState.UNKNOWN],
            conflicts=self._kinds[OrderKind.CONFLICT],
            missing=sum(hi - lo + 1 for state in states for lo, hi in state.missing),
            holes=sum(hi - lo + 1 for state in states for lo, hi in state.holes),
        )
        return DevelopmentTotals(
            requests=sum(self._outcomes.values()),
            accepted=self._outcomes[HandledOutcome.ACCEPTED],
            duplicates=self._outcomes[HandledOutcome.DUPLICATE],
            failed=self._outcomes[HandledOutcome.FAILED],
            rejected=self._outcomes[HandledOutcome.REJECTED],
            lost=self._lost,
            order=order,
        )

    @contextlib.asynccontextmanager
    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Listen for requests; yields the URL.  Port 0 selects a free port.

        Raises:
            CannotRun: the address is in use or not available.
        """
        async with self.serve_on(await listen(Address(host, port))) as url:
            yield url

    @contextlib.asynccontextmanager
    async def serve_on(self, sockets: list[socket.socket]) -> AsyncIterator[str]:
        """Serve on listening sockets, which are closed at the end; yields the URL."""
        application = web.Application(client_max_size=DEVELOPMENT_BODY_BYTES_MAX)
        application.router.add_route("*", "/{path:.*}", self._handle)
        async with serving(application, sockets) as address:
            yield address.url

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(
                status=405, headers={"Allow": "POST"}, text="send deliveries by POST\n"
            )
        body = await request.read()
        try:
            signed = None
            if self.secrets:
                signed = verify(request.headers, body, self.secrets, time.time())
            headers = {name.lower(): value for name, value in request.headers.items()}
            messages = parse_signed(headers, body, self._prefix, signed, self.secrets)
        except SignatureError as error:
            response = unverified(error)
            return self._reject(response.status, response.text, response.headers)
        except ValueError as error:
            return self._reject(400, str(error))
        fault, late = self._draw_fault()
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        takes, stop = len(messages), None
        if fault is not None and not late:
            # A batch fails after a random number of its deliveries.
            takes = self._rng.randrange(takes)
            stop = HandledRequest(
                HandledOutcome.FAILED, _STATUS[fault], messages[takes], fault=fault
            )
        elif self._forward is not None:
            passed = await self._forward(request.headers, body)
            takes = passed.accepted_count(messages)
            if takes < len(messages) and not passed.is_success:
                reason = describe_status(passed.status)
                stop = HandledRequest(
                    HandledOutcome.FAILED, passed.status, messages[takes], reason=reason
                )
        for message in messages[:takes]:
            self._count(self._record(message, fault if stop is None else None))
        if stop is not None:
            self._count(stop)
        accepted = {}
        # Also for a batch of one: a plain 2xx would acknowledge it.
        if takes < len(messages) and (stop is None or len(messages) > 1):
            accepted[ACCEPTED_THROUGH] = str(messages[0].sequence + takes - 1)
        if stop is not None and stop.fault is None:
            return web.Response(
                status=stop.status or 500, headers=accepted, text=f"{stop.reason}\n"
            )
        return _build_response(request, fault, accepted)

    def _draw_fault(self) -> tuple[ReceiverFault | None, bool]:
        """Choose the fault of a request, if any, and whether it fails after the effect."""
        if not self._fail_rate or self._rng.random() >= self._fail_rate:
            return None, False
        return self._rng.choice(self._faults), self._rng.random() < 0.5

    def _record(self, message: Message, fault: ReceiverFault | None) -> HandledRequest:
        # No await within the transaction: none ever waits for the lock of another.
        with self._database.transaction() as transaction:
            result = self._inbox.receive(transaction, message)
        observation = result.observation
        if observation is not None:
            self._kinds[observation.kind] += 1
            if observation.was is not None:
                self._was[observation.was] += 1
        outcome = HandledOutcome.ACCEPTED if result.fresh else HandledOutcome(result.outcome)
        status = 200 if fault is None else _STATUS[fault]
        return HandledRequest(outcome, status, message, observation, fault)

    def _reject(
        self, status: int, reason: str, headers: tuple[tuple[str, str], ...] = ()
    ) -> web.Response:
        self._count(HandledRequest(HandledOutcome.REJECTED, status, reason=reason))
        return web.Response(status=status, text=f"{reason}\n", headers=dict(headers))

    def _count(self, handled: HandledRequest) -> None:
        self._outcomes[handled.outcome] += 1
        if handled.fault is not None and handled.outcome is not HandledOutcome.FAILED:
            self._lost += 1
        if self.on_request is not None:
            self.on_request(handled)


def _build_response(
    request: web.Request, fault: ReceiverFault | None, headers: Mapping[str, str]
) -> web.Response:
    if fault is ReceiverFault.RESET and request.transport is not None:
        # SO_LINGER with a time of 0 makes close send RST.
        connection: socket.socket = request.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
    if fault is ReceiverFault.UNAVAILABLE:
        later = {"Retry-After": "0", **headers}
        return web.Response(status=503, headers=later, text="unavailable\n")
    if fault is not None:
        return web.Response(status=500, headers=headers, text="failed\n")
    return web.Response(headers=headers, text="ok\n")

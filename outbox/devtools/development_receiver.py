"""A receiver for development: verifies, counts, drops duplicates, and fails.

What a good receiver does, in this order:

1. verify the signature, and that headers and body agree; 4xx if not;
2. take in the sequence number, which shows what is missing;
3. drop what was processed before, by `X-Delivery`, and still answer 2xx;
4. answer 2xx only when the effect is there.

Of a batch it does so one by one, and says how far it came if it fails on the way.

It can be told to fail at random, before the effect (the sender has to try
again) or after it (so that duplicates come, and have to be dropped).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from aiohttp import web

from outbox.core.delivery import receiver_checkpoint
from outbox.core.delivery.batch import ACCEPTED_THROUGH
from outbox.core.delivery.signature import SignatureError, verify
from outbox.errors import UsageError
from outbox.receiver.lane_order import Observation, OrderBook, OrderTotals
from outbox.receiver.message import Message, parse
from outbox.receiver.proxy import behind
from outbox.web.address import Address
from outbox.web.serving import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from outbox.core.delivery.receiver_checkpoint import Mark
    from outbox.receiver.proxy import Passed

BODY_BYTES_MAX = 65 * 1024 * 1024
"""The largest payload that can be allowed, and what is around it."""
SEEN_MAX = 1_000_000


class Fault(StrEnum):
    """How an attempt goes wrong on purpose."""

    ERROR = "error"
    """500"""
    UNAVAILABLE = "unavailable"
    """503 with Retry-After: 0"""
    RESET = "reset"
    """The connection is reset without an answer."""
    HANG = "hang"
    """No answer until the sender gives up, which takes its whole time-out."""


QUICK_FAULTS = (Fault.ERROR, Fault.UNAVAILABLE, Fault.RESET)


_STATUS = {Fault.ERROR: 500, Fault.UNAVAILABLE: 503, Fault.RESET: None, Fault.HANG: None}


class Outcome(StrEnum):
    """What became of a request."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """Had been processed before, and so was dropped."""
    FAILED = "failed"
    """On purpose, with nothing done."""
    REFUSED = "refused"
    """A good request that this receiver will never take."""
    CHECKPOINT = "checkpoint"
    """Told how far lanes are; `reason` says what that shows to be missing."""
    REJECTED = "rejected"
    """Not signed, not a delivery, or changed on its way."""


@dataclass(frozen=True, slots=True)
class Handled:
    """One delivery, or what was no delivery, and what became of it."""

    outcome: Outcome
    status: int | None
    """What is answered; None: nothing."""
    message: Message | None = None
    """None when it was rejected."""
    observation: Observation | None = None
    """How it stands in its lane; None when nothing was done."""
    fault: Fault | None = None
    """With `accepted` or `duplicate`: only the answer was lost."""
    reason: str = ""
    """Why it was refused or rejected, or what a checkpoint shows."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What came, up to now."""

    requests: int
    accepted: int
    duplicates: int
    failed: int
    refused: int
    rejected: int
    checkpoints: int
    lost: int
    """Accepted ones and duplicates whose answer was lost on purpose."""
    order: OrderTotals

    @property
    def good(self) -> bool:
        """Nothing missing, out of order, contradictory or rejected."""
        order = self.order
        return not (order.missing or order.out_of_order or order.conflicts or self.rejected)


class DevelopmentReceiver:
    """Takes deliveries at any path; see the top of this module.

    `secrets` are the keys that may have signed (none: signatures are not
    looked at).  Of all good requests `fail_rate` fail in one of the ways in
    `faults`, half of them after the effect.  `refuse` may name a reason never
    to take a delivery (422).  `on_request` is called for every delivery when
    its outcome is known, before the answer is sent.
    `from_start` says that all lanes begin after this receiver, so that a first
    number other than 1 means that some are missing.  `forward` passes a request on, and
    gives what came back; anything but 2xx is answered as it is, and what was not accepted
    behind is not taken here.

    Raises:
        UsageError: a rate or a time is out of its bounds.
    """

    def __init__(
        self,
        secrets: Sequence[bytes] = (),
        *,
        fail_rate: float = 0.0,
        faults: Sequence[Fault] = QUICK_FAULTS,
        latency_s: float = 0.0,
        rng: random.Random | None = None,
        refuse: Callable[[Message], str | None] | None = None,
        on_request: Callable[[Handled], None] | None = None,
        forward: Callable[[Mapping[str, str], bytes], Awaitable[Passed]] | None = None,
        from_start: bool = False,
        clock: Callable[[], float] = time.time,
        seen_max: int = SEEN_MAX,
    ) -> None:
        if not 0.0 <= fail_rate <= 1.0:
            raise UsageError(f"fail rate: must be between 0 and 1, not {fail_rate:g}")
        if not 0.0 <= latency_s <= 3600.0:
            raise UsageError(f"latency: must be between 0 and 3600 s, not {latency_s:g}")
        if fail_rate and not faults:
            raise UsageError("fail rate: there is no way to fail among the faults")
        self.secrets = tuple(secrets)
        self._fail_rate = fail_rate
        self._faults = tuple(faults)
        self._latency_s = latency_s
        self._rng = rng or random.Random()  # noqa: S311  nothing secret hangs on it
        self._refuse = refuse
        self.on_request = on_request
        self._forward = forward
        self._clock = clock
        self._seen_max = seen_max
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._book = OrderBook(from_start=from_start)
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._lost = 0

    @property
    def order(self) -> OrderBook:
        """What is known of each lane."""
        return self._book

    def totals(self) -> Totals:
        """The counts up to now."""
        return Totals(
            requests=sum(self._outcomes.values()),
            accepted=self._outcomes[Outcome.ACCEPTED],
            duplicates=self._outcomes[Outcome.DUPLICATE],
            failed=self._outcomes[Outcome.FAILED],
            refused=self._outcomes[Outcome.REFUSED],
            rejected=self._outcomes[Outcome.REJECTED],
            checkpoints=self._outcomes[Outcome.CHECKPOINT],
            lost=self._lost,
            order=self._book.totals(),
        )

    @contextlib.asynccontextmanager
    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Listen, and give the URL; port 0 takes a free one.

        Raises:
            CannotRun: the address is taken or not ours.
        """
        application = web.Application(client_max_size=BODY_BYTES_MAX)
        application.router.add_route("*", "/{path:.*}", self._handle)
        # A hanging answer ends when the sender gives up.
        async with serving(application, Address(host, port), guarded=False) as address:
            yield address.url

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(
                status=405, headers={"Allow": "POST"}, text="send deliveries by POST\n"
            )
        body = await request.read()
        try:
            if self.secrets:
                verify(request.headers, body, self.secrets, self._clock())
            marks = receiver_checkpoint.parse(body)
            messages = () if marks is not None else parse(request.headers, body)
        except SignatureError as error:
            return self._reject(401, str(error))
        except ValueError as error:
            return self._reject(400, str(error))
        if not messages:
            return await self._compare(marks or (), request, body)
        fault, late = self._draw()
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        takes, stop = self._wanted(messages)
        if fault is not None and not late and takes:
            # Of a batch it has some before it fails.
            takes = self._rng.randrange(takes) if takes > 1 else 0
            stop = Handled(Outcome.FAILED, _STATUS[fault], messages[takes], fault=fault)
        elif takes and self._forward is not None:
            passed = await self._forward(request.headers, body)
            takes = min(takes, passed.taken(messages))
            if takes < len(messages) and not passed.is_success:
                told = behind(passed.status)
                stop = Handled(Outcome.FAILED, passed.status, messages[takes], reason=told)
        # From here to the count nothing awaits, so two copies at once
        # cannot both be the first.
        for message in messages[:takes]:
            self._count(self._take_in(message, fault if stop is None else None))
        if stop is not None:
            self._count(stop)
        accepted = {}
        # Of one that is alone it says so, too, or 2xx would acknowledge it.
        if takes < len(messages) and (stop is None or len(messages) > 1):
            accepted[ACCEPTED_THROUGH] = str(messages[0].sequence + takes - 1)
        if stop is not None and stop.fault is None:
            return web.Response(
                status=stop.status or 500, headers=accepted, text=f"{stop.reason}\n"
            )
        return await _answer(request, fault, accepted)

    def _wanted(self, messages: Sequence[Message]) -> tuple[int, Handled | None]:
        """How many it would take, and what becomes of the first that it refuses."""
        for n, message in enumerate(messages):
            if self._refuse is not None and (reason := self._refuse(message)):
                return n, Handled(Outcome.REFUSED, 422, message, reason=reason)
        return len(messages), None

    async def _compare(
        self, marks: Sequence[Mark], request: web.Request, body: bytes
    ) -> web.Response:
        """Hold what came against how far the sender says its lanes are."""
        if self._forward is not None:
            passed = await self._forward(request.headers, body)
            if not passed.is_success:
                told = behind(passed.status)
                self._count(Handled(Outcome.FAILED, passed.status, reason=told))
                return web.Response(status=passed.status, text=f"{told}\n")
        missing = [
            f"{lo}-{hi} of {mark.lane}" for mark in marks for lo, hi in self._book.hear_of(mark)
        ]
        told = f"missing: {', '.join(missing)}" if missing else "nothing is missing"
        self._count(Handled(Outcome.CHECKPOINT, 200, reason=told))
        return web.Response(text="ok\n")

    def _draw(self) -> tuple[Fault | None, bool]:
        """Whether and how to fail, and if so, whether after the effect."""
        if not self._fail_rate or self._rng.random() >= self._fail_rate:
            return None, False
        return self._rng.choice(self._faults), self._rng.random() < 0.5

    def _take_in(self, message: Message, fault: Fault | None) -> Handled:
        # The number first: a replay of what is here already still closes its hole.
        observation = self._book.observe(
            message.lane,
            message.sequence,
            message.previous_sequence,
            message.delivery_id,
            message.replay_of,
            lane_ends=message.lane_ends,
        )
        outcome = Outcome.DUPLICATE if message.delivery_id in self._seen else Outcome.ACCEPTED
        self._seen[message.delivery_id] = None
        self._seen.move_to_end(message.delivery_id)
        if len(self._seen) > self._seen_max:
            self._seen.popitem(last=False)
        status = 200 if fault is None else _STATUS[fault]
        return Handled(outcome, status, message, observation, fault)

    def _reject(self, status: int, reason: str) -> web.Response:
        self._count(Handled(Outcome.REJECTED, status, reason=reason))
        return web.Response(status=status, text=f"{reason}\n")

    def _count(self, handled: Handled) -> None:
        self._outcomes[handled.outcome] += 1
        if handled.fault is not None and handled.outcome is not Outcome.FAILED:
            self._lost += 1
        if self.on_request is not None:
            self.on_request(handled)


async def _answer(
    request: web.Request, fault: Fault | None, headers: Mapping[str, str]
) -> web.Response:
    if fault is Fault.HANG:
        # Until the sender closes the connection, which cancels this.
        await asyncio.get_running_loop().create_future()
    if fault is Fault.RESET and request.transport is not None:
        # With nothing to linger for, closing sends RST.
        connection: socket.socket = request.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
    if fault is Fault.UNAVAILABLE:
        later = {"Retry-After": "0", **headers}
        return web.Response(status=503, headers=later, text="unavailable\n")
    if fault is not None:
        return web.Response(status=500, headers=headers, text="failed\n")
    return web.Response(headers=headers, text="ok\n")

"""The receivers, and the network to them.

A receiver processes a request when it arrives; its response may be lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.core.model.response import AttemptResult, Failure
from outbox.relay.delivery.admission import PREEMPTED
from tests.support.runs import send_run

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from outbox.destinations.interface import Following, Request
    from tests.sim.books import Sent
    from tests.sim.checks import Checker
    from tests.sim.clockwork import Process, World


TOLERANCE_S = 300
WRONG_TIME = 401
"""The response to a signature whose time is not tolerated, and to nothing else."""


@dataclass
class Receiver:
    """The receiver of an endpoint; the shares are shares of its requests."""

    name: str
    busy: float = 0.05
    """503."""
    resets: float = 0.02
    """Processed, and the connection reset before the response."""
    garbage: float = 0.01
    hangs: float = 0.003
    refuses: float = 0.01
    """Share of the events for which it always responds 400."""
    parts: float = 0.1
    """Share of the batches of which it accepts only the first deliveries."""
    unsolicited: float = 0.001
    """Sends data that belongs to no request."""
    slow_s: float = 0.02
    down_until: float = 0.0
    """Refuses connections until then."""
    hanging_until: float = 0.0
    busy_until: float = 0.0
    """Responds 429 with Retry-After until then."""
    seen: set[str] = field(default_factory=set)
    """Deliveries that it processed."""


class _CheckedRun:
    """A `Following`; after unsolicited data, no request follows."""

    def __init__(
        self, run: Following, first: Request, unsolicited: Counter[object], checker: Checker
    ) -> None:
        self._run = run
        self._key = first.recipient.on_unsolicited
        self._unsolicited = unsolicited
        self._before = unsolicited[self._key]
        self._checker = checker
        self.sent = run.sent

    def follow(self, response: AttemptResult) -> Request | None:
        request = self._run.follow(response)
        if request is not None and self._unsolicited[self._key] > self._before:
            self._checker.run_continues(request)
        return request


class Transport:
    """Sends the requests of one relay to the receivers."""

    def __init__(
        self,
        world: World,
        process: Process,
        receivers: dict[str, Receiver],
        checker: Checker,
        rng: random.Random,
    ) -> None:
        self._world = world
        self._process = process
        self._receivers = receivers
        self._checker = checker
        self._rng = rng
        # How often unsolicited data was reported, by the function that it was reported to: each
        # acquisition of an endpoint has its own.
        self._unsolicited: Counter[object] = Counter()

    async def send(
        self,
        request: Request,
        following: Following | None = None,
        before_write: Callable[[], object] | None = None,
    ) -> AttemptResult:
        """Send a request, and those that follow it; returns the last result."""
        if following is not None:
            following = _CheckedRun(following, request, self._unsolicited, self._checker)
        return await send_run(self._send, request, following, before_write)

    async def _send(self, request: Request) -> AttemptResult:
        world, rng = self._world, self._rng
        receiver = self._receivers[request.recipient.url]
        sent = self._checker.begins(self._process, request)
        started_at = world.now
        arrived: asyncio.Future[AttemptResult] = asyncio.get_running_loop().create_future()

        def back(response: AttemptResult | None) -> None:
            if response is not None and not arrived.done():
                arrived.set_result(response)

        def receive_unsolicited() -> None:
            if request.recipient.on_unsolicited is not None:
                request.recipient.on_unsolicited()
                self._unsolicited[request.recipient.on_unsolicited] += 1

        def arrive() -> None:
            if rng.random() < receiver.unsolicited:
                world.after(self._trip_s(), self._process, receive_unsolicited)
            delay_s, response = self._process_it(receiver, sent, world.now - started_at)
            world.after(delay_s, self._process, back, response)

        try:
            world.after(self._trip_s(), None, arrive)
            try:
                async with asyncio.timeout(request.recipient.timeout_s):
                    response = await arrived
            except TimeoutError:
                response = AttemptResult.failed(
                    Failure.TIMEOUT, "no response", world.now - started_at
                )
            if rng.random() < 0.2:
                await asyncio.sleep(0)
        except asyncio.CancelledError as error:
            if PREEMPTED in error.args:
                self._checker.preempted(sent)
            raise
        finally:
            self._checker.ends(sent)
        self._checker.responded(sent, response)
        return response

    async def aclose(self) -> None:
        """Nothing to close."""

    def _trip_s(self) -> float:
        u = self._rng.random()
        return 0.002 * u if u < 0.97 else 0.5 * self._rng.random()

    def _process_it(
        self, receiver: Receiver, sent: Sent, elapsed_s: float
    ) -> tuple[float, AttemptResult | None]:
        """Process a request; returns the delay of the result, and the result (None: none)."""
        rng, now = self._rng, self._world.now
        u = rng.random()
        delay_s = self._trip_s() + receiver.slow_s * rng.random()

        def failed(failure: Failure, detail: str) -> tuple[float, AttemptResult]:
            return delay_s, AttemptResult.failed(failure, detail, elapsed_s + delay_s)

        def completed(status: int, **rest: Any) -> tuple[float, AttemptResult]:
            return delay_s, AttemptResult.completed(status, elapsed_s + delay_s, **rest)

        if now < receiver.down_until:
            return failed(Failure.CONNECT, "connection refused")
        if now < receiver.hanging_until:
            return 0.0, None
        if now < receiver.busy_until:
            return completed(
                429, headers=(("retry-after", str(int(receiver.busy_until - now) + 1)),)
            )
        what = "ok"
        for share, trouble in (
            (receiver.busy, "busy"),
            (receiver.resets, "reset"),
            (receiver.garbage, "garbage"),
            (receiver.hangs, "hang"),
        ):
            if 0 <= u < share:
                what = trouble
            u -= share
        if what == "busy":
            return completed(503, body=b"busy")
        if abs(sent.signed_at - self._world.wall()) > TOLERANCE_S:
            return completed(WRONG_TIME)
        if what == "garbage":
            return failed(Failure.PROTOCOL, "not HTTP")
        # It accepts a part of the batch.
        most = len(sent.attempts)
        if most > 1 and rng.random() < receiver.parts:
            most = rng.randrange(most + 1)
        headers: tuple[tuple[str, str], ...] = ()
        through, status = sent.first.seq - 1, 200
        for attempt in sent.attempts[:most]:
            if attempt.outbox_number % 97 < 97 * receiver.refuses:
                status = 400
                break
            self._checker.processed(attempt)
            through = attempt.seq
        if what == "hang":
            return 0.0, None
        if what == "reset":
            return failed(Failure.RESET, "reset")
        if through < sent.last.seq and (status == 200 or rng.random() < 0.5):
            headers = (("x-accepted-through", str(through)),)
        again = all(each.again and not each.is_replay for each in sent.attempts)
        if status == 200 and again and through == sent.last.seq and rng.random() < 0.1:
            status = 409
        return completed(status, headers=headers)

"""The admission queue: `outbox.core.admission.request_scheduler` on the event loop."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from outbox.core.model.response import AttemptResult, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from outbox.core.admission.endpoint_queue import EndpointQueue, Slot, WaitReason
    from outbox.core.admission.request_scheduler import RequestScheduler
    from outbox.core.delivery.endpoint import Endpoint


T = TypeVar("T")

log = structlog.get_logger("outbox.dispatcher")

EXHAUSTED_S = 10.0
"""Time after a failure of our own for which the relay is not ready; then it is logged again."""

PREEMPTED_DETAIL = "no response yet; preempted to free its slot"
PREEMPTED = "preempted"
"""Message of the cancellation that ends a request to free its slot."""


class AdmissionQueue:
    """The tasks that wait for slots, the tasks that send, and the scheduler's timer.

    Args:
        on_exhausted: called when requests fail, because this process lacks resources.
    """

    def __init__(
        self, scheduler: RequestScheduler, on_exhausted: Callable[[], None] = lambda: None
    ) -> None:
        self.scheduler = scheduler
        self._on_exhausted = on_exhausted
        # Kept, because `get_running_loop` makes a system call (getpid) each time.
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Slot, asyncio.Future[bool]] = {}
        self._sending: dict[Slot, asyncio.Task[Any]] = {}
        self._timer: asyncio.TimerHandle | None = None
        # Not `TimerHandle.when`, which uvloop's handle of a time in the past does not have.
        self._timer_at = 0.0
        self._exhausted_at, self._exhausted_detail = -inf, ""

    def begin(self, slot: Slot) -> bool:
        """Start a request if a slot is free; otherwise return False, and call `wait`."""
        granted = self.scheduler.admit(slot, self._loop.time())
        if len(granted) > 1 or self._waiting or self.scheduler.preempted:
            self.start_granted(granted[1:])
        return bool(granted)

    async def wait(self, slot: Slot) -> bool:
        """Wait for the slot; False: the wait was cancelled, and no request has started."""
        loop = self._loop
        future = self._waiting[slot] = loop.create_future()
        self._set_timer()
        try:
            granted: bool = await future
        except BaseException:
            if slot.waiting:
                del self._waiting[slot]
                self.start_granted(self.scheduler.cancel_waiting([slot], loop.time()))
            elif slot.open:
                # The slot was granted just before the task was cancelled.
                self.end(slot, responded=False)
            raise
        return granted

    async def send(self, slot: Slot, sending: Coroutine[Any, Any, T]) -> T | AttemptResult:
        """Send an admitted request and return its result.

        A preempted request counts as timed out, unless the response's head had arrived.
        """
        if slot.preempted:
            sending.close()
            return AttemptResult.failed(Failure.TIMEOUT, PREEMPTED_DETAIL, 0.0)
        task = asyncio.current_task(self._loop)
        assert task is not None
        # Not `asyncio.timeout`, whose timer costs more than the rest of this method.
        cancelling = task.cancelling()
        self._sending[slot] = task
        try:
            return await sending
        except asyncio.CancelledError as cancelled:
            # Another cancellation of the task takes precedence over the preemption.
            if not slot.preempted or task.uncancel() > cancelling:
                raise
            head = next((each for each in cancelled.args if isinstance(each, AttemptResult)), None)
            return head or AttemptResult.failed(
                Failure.TIMEOUT, PREEMPTED_DETAIL, self._loop.time() - slot.started_at
            )
        finally:
            del self._sending[slot]

    def end(self, slot: Slot, *, responded: bool) -> None:
        """Release the slot of a completed request, which may admit others.

        Args:
            responded: the receiver responded, so that the duration classifies its endpoint.
        """
        granted = self.scheduler.end(slot, self._loop.time(), responded=responded)
        if granted or self._waiting or self.scheduler.preempted:
            self.start_granted(granted)

    def record_exhausted(self, slot: Slot, detail: str) -> None:
        """Record that a request failed, because this process lacks resources; before `end`.

        Args:
            detail: the system's message.
        """
        now = self._loop.time()
        self.scheduler.record_exhausted(slot, now)
        is_new = now >= self._exhausted_at + EXHAUSTED_S
        self._exhausted_at, self._exhausted_detail = now, detail
        if is_new:
            self._on_exhausted()
            log.error(
                "this process lacks resources for connections; fewer requests are open",
                reason=detail,
                open_max=self.scheduler.open_max,
            )

    @property
    def exhausted(self) -> str | None:
        """What this process has lacked just now; None: nothing."""
        is_recent = self._loop.time() < self._exhausted_at + EXHAUSTED_S
        return self._exhausted_detail if is_recent else None

    def change_endpoint(self, queue: EndpointQueue, endpoint: Endpoint) -> None:
        """Apply an endpoint's changed limits."""
        now = self._loop.time()
        limits = (endpoint.in_flight_max, endpoint.rate_per_s)
        self.start_granted(self.scheduler.change_endpoint(queue, endpoint.tenant, *limits, now))

    def wait_reason(self, queue: EndpointQueue) -> WaitReason | None:
        """Why the lanes of an endpoint wait; None: none waits."""
        return self.scheduler.wait_reason(queue, self._loop.time())

    def cancel_waiting(self, slots: Iterable[Slot]) -> None:
        """Cancel waiting requests; their tasks then re-check whether to send at all."""
        waiting = [slot for slot in slots if slot.waiting]
        granted = self.scheduler.cancel_waiting(waiting, self._loop.time())
        for slot in waiting:
            self._resolve(slot, granted=False)
        self.start_granted(granted)

    def start_granted(self, granted: Iterable[Slot]) -> None:
        """Wake the tasks whose slots were granted."""
        for slot in granted:
            self._resolve(slot, granted=True)
        self._preempt()
        if self._waiting:
            self._set_timer()

    def _preempt(self) -> None:
        for slot in self.scheduler.pop_preempted():
            # A request that is not being sent yet checks `preempted` when it is.
            if slot in self._sending:
                self._sending[slot].cancel(PREEMPTED)

    def _resolve(self, slot: Slot, *, granted: bool) -> None:
        future = self._waiting.pop(slot)
        # A cancelled task releases its granted slot itself.
        if not future.done():
            future.set_result(granted)

    def _set_timer(self) -> None:
        """Set the scheduler's timer; firing too early is harmless."""
        at = self.scheduler.wake_at()
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(at, self._wake), at

    def _wake(self) -> None:
        self._timer = None
        self.start_granted(self.scheduler.wake(self._loop.time()))
        self._set_timer()

    def close(self) -> None:
        """Cancel the timer; no task waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

"""The time of the event loop, of which each tenant has a share.

All requests of a process run on one event loop: while it parses the body of one, the others wait.
So the time that a tenant's requests take is measured, and a tenant that has taken more than its
share waits before its next request.  It does so only while others send requests: of an idle server,
a tenant may use all.

What is measured are the steps of the coroutine that processes a request.  Reading the head, logging
in and writing the response take about the same for each request, and count with `REQUEST_S`: so
refused requests count, too.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from outbox_api.limits import CONNECTION_WAIT_S, SHARE, WAIT_RETRY_S
from outbox_api.problem import Refusal
from outbox_api.rate_limit import too_many_requests
from outbox_api.token_bucket import Allowance, TokenBuckets

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from outbox_api.rate_limit import Holder

LOOP_SHARE = Allowance(per_s=1 / SHARE, burst=0.1)
"""Seconds of the event loop for a holder."""
REQUEST_S = 0.001
"""What a request takes besides the steps that are measured."""
PRESENT_S = 1.0
"""How long a holder counts as present after a request."""
MEASURED_HOLDERS_MAX = 10_000
"""Holders whose time is kept."""

Result = TypeVar("Result")


class LoopTime:
    """The shares of the holders in a process.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._used = TokenBuckets(LOOP_SHARE, keys_max=MEASURED_HOLDERS_MAX)
        self._locks: dict[Holder, asyncio.Lock] = {}
        self._waiting: Counter[Holder] = Counter()
        # The holder of the last request is the last one.
        self._seen_at: OrderedDict[Holder, float] = OrderedDict()

    def note(self, holder: Holder) -> None:
        """Note a request of a holder: others wait for it if they are above their share."""
        now = self._clock()
        self._seen_at[holder] = now
        self._seen_at.move_to_end(holder)
        while now - next(iter(self._seen_at.values())) > PRESENT_S:
            self._seen_at.popitem(last=False)

    async def run(
        self, holder: Holder, process: Callable[[], Coroutine[Any, Any, Result]]
    ) -> Result:
        """Process a request when its holder has time left, and charge the holder.

        Raises:
            Problem: there was none left for too long.
        """
        self.note(holder)
        await self._wait_for_turn(holder)
        return await _Measured(process(), self._clock, partial(self._charge, holder))

    async def _wait_for_turn(self, holder: Holder) -> None:
        """Wait until the holder has time left; its requests one after the other."""
        lock = self._locks.setdefault(holder, asyncio.Lock())
        self._waiting[holder] += 1
        try:
            async with asyncio.timeout(CONNECTION_WAIT_S), lock:
                await asyncio.sleep(self._wait_s(holder))
                self._charge(holder, REQUEST_S)
        except TimeoutError:
            raise too_many_requests(
                f"this {holder[0]} takes more than its share of the API's processor time",
                WAIT_RETRY_S,
                Refusal.CONCURRENCY,
            ) from None
        finally:
            self._waiting[holder] -= 1
            if not self._waiting[holder]:
                del self._waiting[holder], self._locks[holder]

    def _wait_s(self, holder: Holder) -> float:
        """Seconds until it has time left; 0 if nobody else is present."""
        now = self._clock()
        others = (at for each, at in reversed(self._seen_at.items()) if each != holder)
        if now - next(others, float("-inf")) > PRESENT_S:
            return 0.0
        return self._used.wait_s(holder, now, 0)

    def _charge(self, holder: Holder, seconds: float) -> None:
        self._used.charge(holder, self._clock(), seconds)


class _Measured(Generic[Result]):
    """An awaitable that runs a coroutine, and reports the time of its steps at the end.

    Between two steps the event loop runs other tasks: that time does not count.
    """

    def __init__(
        self,
        steps: Coroutine[Any, Any, Result],
        clock: Callable[[], float],
        charge: Callable[[float], None],
    ) -> None:
        self._steps = steps
        self._clock = clock
        self._charge = charge

    def __await__(self) -> Generator[Any, Any, Result]:
        steps, clock, took_s = self._steps, self._clock, 0.0
        sent, raised = None, None
        try:
            while True:
                began_at = clock()
                try:
                    awaited = steps.send(sent) if raised is None else steps.throw(raised)
                except StopIteration as end:
                    result: Result = end.value
                    return result
                finally:
                    took_s += clock() - began_at
                    # A reference cycle, through the traceback, would keep the body in memory.
                    raised = None
                try:
                    sent = yield awaited
                except BaseException as error:
                    raised = error
        finally:
            steps.close()
            self._charge(took_s)

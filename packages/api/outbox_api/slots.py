"""Slots of a scarce resource that several holders, such as tenants, share.

A holder has at most a quarter of the slots, and at least one, so that its requests leave slots to
others.  Of the holders that wait, the one is served whose requests have had slots for the shortest
time, its next one included, which is assumed to take as long as its last one (weighted fair
queueing): short requests do not wait until each other holder has had a long one.  The number of
requests that wait for a holder is bounded: the next one is refused at once.

Two invariants hold after every call, also when a request that waits is cancelled:

* No request waits while there is a free slot that its holder may have.
* A slot is free, or a request has it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from outbox_api.limits import CONNECTION_WAIT_S, SHARE, WAIT_RETRY_S, WAITING_MAX
from outbox_api.problem import Refusal, unavailable
from outbox_api.rate_limit import too_many_requests

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox_api.rate_limit import Holder


HOLDERS_MAX = 1000
"""Holders of which the time is kept, besides those that are ahead."""


class SharedSlots:
    """The slots of a resource.

    Args:
        what: what a slot is, for messages.
    """

    def __init__(self, slots: int, what: str) -> None:
        self.free = slots
        self.held: Counter[Holder] = Counter()
        self.waiting: OrderedDict[Holder, deque[asyncio.Future[None]]] = OrderedDict()
        """Requests that wait, by holder; no queue is empty."""
        # Virtual time: that of a holder is the seconds of its slots, and not before that of the
        # holder that was served last, so that nobody saves it up.
        self._served_s: dict[Holder, float] = {}
        self._last_took_s: dict[Holder, float] = {}
        self._now_s = 0.0
        self._what = what
        self._each_max = max(1, slots // SHARE)

    @asynccontextmanager
    async def slot(self, holder: Holder) -> AsyncIterator[None]:
        """Have a slot for the block.

        Raises:
            Problem: too many requests of this holder wait, or there was no slot in time.
        """
        clock = asyncio.get_running_loop().time
        await self._acquire(holder)
        began_at = clock()
        try:
            yield
        finally:
            self._release(holder, clock() - began_at)

    async def _acquire(self, holder: Holder) -> None:
        if self._may_have(holder):
            self._give(holder)
            return
        queue = self.waiting.setdefault(holder, deque())
        if len(queue) >= WAITING_MAX:
            reason = f"this {holder[0]} has {WAITING_MAX} requests that wait for a {self._what}"
            raise too_many_requests(reason, WAIT_RETRY_S, Refusal.CONCURRENCY)
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            async with asyncio.timeout(CONNECTION_WAIT_S):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._release(holder)  # The slot came together with the cancellation.
            else:
                self._leave(holder, turn)
            if not isinstance(error, TimeoutError):
                raise
            reason = f"no {self._what} within {CONNECTION_WAIT_S:g} s, because of other requests"
            if self.held[holder] >= self._each_max:
                raise too_many_requests(
                    f"{reason} of this {holder[0]}", WAIT_RETRY_S, Refusal.CONCURRENCY
                ) from None
            raise unavailable(f"{reason}; try again") from None

    def _may_have(self, holder: Holder) -> bool:
        return self.free > 0 and self.held[holder] < self._each_max

    def _starts_at(self, holder: Holder) -> float:
        """The virtual time at which its next request starts."""
        return max(self._served_s.get(holder, 0.0), self._now_s)

    def _ends_at(self, holder: Holder) -> float:
        """When it ends, if it takes as long as the last one."""
        return self._starts_at(holder) + self._last_took_s.get(holder, 0.0)

    def _give(self, holder: Holder) -> None:
        self._now_s = self._served_s[holder] = self._starts_at(holder)
        self.free -= 1
        self.held[holder] += 1

    def _release(self, holder: Holder, had_s: float = 0.0) -> None:
        self.free += 1
        self.held[holder] -= 1
        self.held = +self.held
        self._served_s[holder] += had_s
        self._last_took_s[holder] = had_s
        if len(self._served_s) > HOLDERS_MAX:
            for each in [h for h, at in self._served_s.items() if at <= self._now_s]:
                if each not in self.held:
                    del self._served_s[each], self._last_took_s[each]
        # Those that are skipped have their share, which is at least a slot: they are few.
        while ready := list(filter(self._may_have, self.waiting)):
            next_holder = min(ready, key=self._ends_at)
            if (turn := self._next_turn(next_holder)) is not None:
                self._give(next_holder)
                turn.set_result(None)
                return

    def _next_turn(self, holder: Holder) -> asyncio.Future[None] | None:
        """Remove the request of a holder that waits longest; None: all have been cancelled.

        The future of a cancelled request is done at once, but the request runs on later.
        """
        queue = self.waiting.pop(holder)
        while queue:
            turn = queue.popleft()
            if not turn.done():
                if queue:
                    self.waiting[holder] = queue  # At the end: it has been served.
                return turn
        return None

    def _leave(self, holder: Holder, turn: asyncio.Future[None]) -> None:
        queue = self.waiting.get(holder)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self.waiting[holder]

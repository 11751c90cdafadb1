"""Turns: work that arrives at once is done piece by piece, in several iterations of the event loop.

Deliveries share the loop with the listeners.  A loop runs everything that is ready in one
iteration: a hundred requests at once would hold up each delivery for the time of all of them.
"""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class Turns:
    """Gives one turn per iteration of a loop, in the order of `wait`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._given = False
        """Whether the turn of this iteration was given."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    def wait(self) -> asyncio.Future[None]:
        """Wait for a turn; the future is done if this iteration still has one."""
        turn = self._loop.create_future()
        if self._given:
            self._waiting.append(turn)
        else:
            self._given = True
            turn.set_result(None)
            self._loop.call_soon(self._give)
        return turn

    def _give(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # Otherwise its task was cancelled.
                turn.set_result(None)
                self._loop.call_soon(self._give)
                return
        self._given = False


class TimeShare:
    """Runs pieces of work until their time in one iteration of a loop is over; the others wait.

    Args:
        share_s: the time that they have in an iteration, in seconds; the last piece may exceed it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, share_s: float) -> None:
        self._loop = loop
        self._share_s = self._left_s = share_s
        self._scheduled = False
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def has_time(self) -> bool:
        """Whether work is run at once."""
        return not self._waiting and self._left_s > 0

    def run(self, work: Callable[[], None]) -> None:
        """Run it now if this iteration has time left, and otherwise later, in order."""
        if self.has_time:
            self._run(work)
        else:
            self._waiting.append(work)

    def _run(self, work: Callable[[], None]) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._begin_iteration)
        began_at = monotonic()
        try:
            work()
        finally:
            self._left_s -= monotonic() - began_at

    def _begin_iteration(self) -> None:
        self._scheduled = False
        self._left_s = self._share_s
        while self._waiting and self._left_s > 0:
            self._run(self._waiting.popleft())

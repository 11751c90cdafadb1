"""Turns: work that arrives at once is done one piece per iteration of the event loop.

Deliveries share the loop with the listeners.  A loop runs everything that is ready in one
iteration: a hundred requests at once would hold up each delivery for the time of all of them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


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

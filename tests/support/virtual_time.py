"""An event loop on which hours pass in no time: whenever nothing is ready, its
clock jumps to the next timer.

Timers and tasks only.  A real socket or a thread has no chance to answer
before the clock jumps, so everything under test has to be pure asyncio.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`loop.time()` starts at `start_s` and moves only by jumps."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        selector = selectors.DefaultSelector()
        self._poll = selector.select
        selector.select = self._select  # type: ignore[method-assign]
        super().__init__(selector)
        # Timers due within this of now run.  The default, a nanosecond, is less
        # than a float can tell at epoch seconds, and no timer would ever be due.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._now_s

    def _select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._poll(0)
        if not ready and timeout is None:
            raise RuntimeError("deadlock: every task waits, and no timer is set")
        if not ready and timeout:
            self._now_s += timeout
        return ready


def run_virtual(main: Coroutine[Any, Any, T], start_s: float = 0.0) -> T:
    """`asyncio.run` on virtual time.  Raises RuntimeError when nothing can ever happen again."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(start_s)) as runner:
        return runner.run(main)

"""An event loop on virtual time: whenever it is idle, its clock jumps to the next timer.

It supports timers and tasks only. A real socket or a thread cannot respond before the clock jumps,
so everything under test must be pure asyncio.
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
        # Timers due within this resolution run. The default, a nanosecond, is below the precision
        # of a float at epoch seconds, so no timer would ever be due.
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
    """`asyncio.run` on virtual time. Raises RuntimeError on a deadlock (no timers left)."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(start_s)) as runner:
        return runner.run(main)

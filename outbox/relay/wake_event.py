"""A bell: rung by a notification, a command or a shutdown, heard once."""

from __future__ import annotations

import asyncio


class Bell:
    """Wakes the one task that waits for it; a ring that nobody waits for is kept."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake the listener, now or when it next waits."""
        self._rung.set()

    def clear(self) -> None:
        """Forget a ring that was not heard yet."""
        self._rung.clear()

    async def wait(self, timeout_s: float) -> bool:
        """Whether it rang within `timeout_s` seconds; the ring is consumed."""
        if self._rung.is_set():
            self._rung.clear()
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        except TimeoutError:
            return False
        self._rung.clear()
        return True

"""A wake event: set by a notification, a command or a shutdown, and consumed by one wait.

For the flag by which producers know whether a notification is needed, see
`outbox.relay.sequencing.sequencer`.
"""

from __future__ import annotations

import asyncio


class WakeEvent:
    """Wakes the one task that waits for it; stays set until a wait consumes it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake the waiting task, now or at its next wait."""
        self._event.set()

    def clear(self) -> None:
        """Discard a set event that no wait has consumed."""
        self._event.clear()

    async def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds; return whether the event was set, and consume it."""
        if self._event.is_set():
            self._event.clear()
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True

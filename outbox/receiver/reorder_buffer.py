"""Reorder buffer: holds the requests of early deliveries until the missing ones arrive.

The request itself is held open, so no unprocessed event is stored, and the sender keeps
the event until the response.  The number of held requests is bounded; the caller sets the
deadline of each.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from outbox.receiver.errors import Busy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator


class ReorderBuffer:
    """Requests waiting for a sequence number of a lane; `held_max` at most."""

    def __init__(self, held_max: int) -> None:
        self._max = held_max
        self.held = 0
        """Requests held now."""
        self.waiters: dict[tuple[str, int], set[asyncio.Event]] = {}
        """Events to set when a number arrives, by lane and sequence number."""

    @contextlib.contextmanager
    def hold(self, lane: str, sequence: int) -> Iterator[Callable[[float], Awaitable[None]]]:
        """Register for a sequence number; yields a function that waits for it.

        Register before checking the inbox: a number that arrives in between would
        otherwise be missed.  The function takes a deadline (loop time, seconds).

        Raises:
            Busy: from the waiting function, when `held_max` requests are held.
        """
        arrived = asyncio.Event()
        waiters = self.waiters.setdefault((lane, sequence), set())
        waiters.add(arrived)

        async def wait(until: float) -> None:
            if self.held >= self._max:
                raise Busy(f"{self.held} deliveries are held for missing ones before them")
            self.held += 1
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        await arrived.wait()
            finally:
                self.held -= 1

        try:
            yield wait
        finally:
            waiters.discard(arrived)
            if not waiters and self.waiters.get((lane, sequence)) is waiters:
                del self.waiters[lane, sequence]

    def received(self, lane: str, sequence: int) -> None:
        """Wake the requests that wait for this number; they check the inbox again."""
        for arrived in self.waiters.get((lane, sequence), ()):
            arrived.set()

"""The reorder buffer: deliveries that came too early wait for those before them.

What waits is the request itself, so nothing is kept that is not processed yet, and the
sender holds the event until it is.  The number of those who wait is bounded, and how
long they do is up to the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from outbox.receiver.decisions import Busy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator


class Waiting:
    """Who waits for which number of which lane; `held_max` at most."""

    def __init__(self, held_max: int) -> None:
        self._max = held_max
        self.held = 0
        """So many wait just now."""
        self.wanted: dict[tuple[str, int], set[asyncio.Event]] = {}
        """For which number of which lane somebody listens."""

    @contextlib.contextmanager
    def hold(self, lane: str, sequence: int) -> Iterator[Callable[[float], Awaitable[None]]]:
        """Listen for a number; gives what waits for it, until a time of the loop.

        One listens before one looks whether it is here, or it could come in between.

        Raises:
            Busy: by waiting, when too many wait already.
        """
        came = asyncio.Event()
        wanted = self.wanted.setdefault((lane, sequence), set())
        wanted.add(came)

        async def wait(until: float) -> None:
            if self.held >= self._max:
                raise Busy(f"{self.held} deliveries wait for others before them")
            self.held += 1
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        await came.wait()
            finally:
                self.held -= 1

        try:
            yield wait
        finally:
            wanted.discard(came)
            if not wanted and self.wanted.get((lane, sequence)) is wanted:
                del self.wanted[lane, sequence]

    def received(self, lane: str, sequence: int) -> None:
        """A number is here: those who waited for it look again."""
        for came in self.wanted.get((lane, sequence), ()):
            came.set()

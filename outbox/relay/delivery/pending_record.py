"""A record that waits for the recorder to write it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from outbox.core.delivery.commands import RunResults

if TYPE_CHECKING:
    from outbox.core.delivery.commands import Record
    from outbox.core.delivery.lane import Lane


class PendingRecord:
    """A record, or the results of a delivery run, that is not durable yet; `done` exists only if
    a task waits for it.
    """

    __slots__ = ("done", "epoch", "lane", "record")

    def __init__(self, lane: Lane, epoch: int, record: Record | RunResults) -> None:
        self.lane = lane
        self.epoch = epoch
        self.record = record
        self.done: asyncio.Future[None] | None = None

    async def written(self) -> None:
        """Wait until it is durable; cancelling one waiter does not affect others."""
        if self.done is None:
            self.done = asyncio.get_running_loop().create_future()
        await asyncio.shield(self.done)

    @property
    def rows(self) -> int:
        """Rows of the attempt log, at most."""
        return len(self.record) if isinstance(self.record, RunResults) else 1

"""A record that waits for the recorder to write it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from outbox.core.delivery.commands import RunResults
from outbox.core.model.stored_response import stored_bytes

if TYPE_CHECKING:
    from outbox.core.delivery.commands import Record
    from outbox.core.delivery.lane import Lane


class PendingRecord:
    """A record, or the results of a delivery run, that is not durable yet; `done` exists only if
    a task waits for it.
    """

    __slots__ = ("done", "epoch", "lane", "record", "response_bytes")

    def __init__(self, lane: Lane, epoch: int, record: Record | RunResults) -> None:
        self.lane = lane
        self.epoch = epoch
        self.record = record
        self.response_bytes = _response_bytes(record)
        """What its responses take in memory."""
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


def _response_bytes(record: Record | RunResults) -> int:
    if not isinstance(record, RunResults):
        return 0 if record.attempt is None else stored_bytes(record.attempt.response)
    # Receivers repeat the same response, which is one object.
    counted = {id(each): each for each in record.responses}
    return sum(map(stored_bytes, counted.values()))

"""What a delivery is on its way: a prepared request, a completed attempt, a pending record."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from outbox.core.delivery.commands import Successes
from outbox.core.model.stored_response import stored_bytes

if TYPE_CHECKING:
    from outbox.core.brokers.port import Appended
    from outbox.core.delivery.commands import End, Open, Record, Send
    from outbox.core.delivery.lane import Lane
    from outbox.core.messages.message import Prepared
    from outbox.core.messages.signature import SigningKey
    from outbox.core.model.response import AttemptResult
    from outbox.destinations.interface import Request
    from outbox.telemetry.tracing import AttemptSpan


class PreparedRequest(NamedTuple):
    """A delivery's first attempt, built while the previous delivery is in flight."""

    send: Send
    message: Prepared
    at_s: int
    """The epoch second in its signature."""
    keys: list[SigningKey]
    request: Request


class Attempt(NamedTuple):
    """A completed attempt."""

    send: Send | Open | End
    """What was sent; after a request run, its last request.  An Open has failed."""
    started_at: float
    """Epoch seconds."""
    response: AttemptResult
    """The response, without the secrets that the endpoint's own headers carry."""
    preempted: bool
    """The request was cancelled to free its slot; the response is not the receiver's."""
    span: AttemptSpan | None
    appended: Appended | None = None
    """What a broker stored; None: an HTTP request, or an Open."""


class PendingRecord:
    """A record, or the results of a request run, that is not durable yet; `done` exists only if
    a task waits for it.
    """

    __slots__ = ("done", "epoch", "lane", "record", "response_bytes", "rows")

    def __init__(self, lane: Lane, epoch: int, record: Record | Successes) -> None:
        self.lane = lane
        self.epoch = epoch
        self.record = record
        self.rows = 1
        """Rows of the attempt log, at most."""
        self.response_bytes = 0
        """What its responses take in memory."""
        if isinstance(record, Successes):
            self.rows = len(record)
            # Receivers repeat the same response, which is one object.
            counted = {id(row.response): row.response for row in record.rows}
            self.response_bytes = sum(map(stored_bytes, counted.values()))
        elif record.attempt is not None:
            self.response_bytes = stored_bytes(record.attempt.response)
        self.done: asyncio.Future[None] | None = None

    async def written(self) -> None:
        """Wait until it is durable; cancelling one waiter does not affect others."""
        if self.done is None:
            self.done = asyncio.get_running_loop().create_future()
        await asyncio.shield(self.done)

"""Processing of deliveries in transactions: shared by HTTP receivers and readers of streams.

1. open a transaction and record the delivery: lock its lane, look up and insert its
   sequence number and its `X-Delivery`;
2. if it is new, run the handlers in the same transaction;
3. commit.

An error before the commit rolls everything back.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from outbox.errors import UsageError
from outbox.receiver.errors import HandlerFailed
from outbox.receiver.handlers import DELIVERY_PARAMETERS, check_handler, parse_types
from outbox.receiver.inbox.inbox import EXPIRE_ROWS, Inbox
from outbox.receiver.inbox.process import DeliveryOutcome
from outbox.receiver.reporting import log

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager
    from typing import TypeVar

    from outbox.receiver.handlers import HandlerRegistry
    from outbox.receiver.inbox.process import DeliveryResult
    from outbox.receiver.message import Message

    Handler = TypeVar("Handler", bound=Callable[..., Any])

EXPIRE_STEPS_MAX = 20
EXPIRE_EVERY = 1000
"""Deliveries between two deletions of expired rows."""


class NotRecorded(Exception):
    """Rolls back: deliveries before it are missing, or one of a batch conflicts."""

    def __init__(self, taken: DeliveryResult) -> None:
        super().__init__(taken.outcome)
        self.taken = taken


@contextlib.asynccontextmanager
async def _whole(
    transaction: Callable[[], AbstractAsyncContextManager[Any]],
) -> AsyncIterator[Any]:
    """Open a transaction, and raise if it suppressed an error of its block.

    psycopg does so with `psycopg.Rollback`: nothing is committed, and nothing is raised.
    """
    is_whole = False
    async with transaction() as connection:
        yield connection
        is_whole = True
    if not is_whole:
        raise UsageError("a handler rolled the transaction back; raise Refuse or another error")


class DeliveryProcessor:
    """Records deliveries in the inbox and runs their handlers, in one transaction.

    Args:
        transaction: opens a transaction and yields its connection.
        creation_lock: held while the tables are created.
        handlers: the registered handlers.
    """

    def __init__(
        self,
        transaction: Callable[[], AbstractAsyncContextManager[Any]],
        creation_lock: Callable[[], AbstractAsyncContextManager[Any]],
        handlers: HandlerRegistry,
        inbox: Inbox | None = None,
    ) -> None:
        self.inbox = inbox or Inbox()
        self._transaction = partial(_whole, transaction)
        self._creation_lock = creation_lock
        self._handlers = handlers
        self._is_ready = False
        # Deliveries come in threads, too.
        self._count_mutex = threading.Lock()
        self._received_count = 0

    def on(self, pattern: str) -> Callable[[Handler], Handler]:
        """Register a handler for event types: `order.paid`, `order.*`, `**`.

        The handler is called with the `Message` and the connection whose transaction
        records the delivery.  An exception rolls back both.  Over HTTP `Refuse` makes the
        event a dead letter (422), `Busy` postpones it (503), any other is retried (500).
        A `StreamReceiver` skips a refused event, and retries after any other exception.

        Args:
            pattern: dot-separated; `*` is one segment, a last `**` one or more.

        Raises:
            UsageError: the pattern is invalid, or the handler does not fit this receiver.
        """
        text, types = parse_types(pattern)

        def add(handler: Handler) -> Handler:
            self._check_handler(handler, DELIVERY_PARAMETERS)
            self._handlers.add(text, types, handler)
            return handler

        return add

    # --------------------------------------------------------------- of each subclass

    def _check_handler(self, handler: Callable[..., Any], parameters: Sequence[str]) -> None:
        """Raise UsageError if this receiver cannot call the handler."""
        check_handler(handler, parameters)

    async def _call(self, handler: Callable[..., Any], *arguments: Any) -> None:
        """Call a handler."""
        raise NotImplementedError

    def _committed(self, message: Message) -> None:
        """Called after the commit of a delivery of a lane."""

    # ------------------------------------------------------------------- transactions

    async def _create_tables(self) -> None:
        async with self._creation_lock():
            if not self._is_ready:
                async with self._transaction() as connection:
                    await self.inbox.create_async(connection)
                self._is_ready = True

    async def _process(
        self, message: Message, *, gaps: bool, from_start: bool = False
    ) -> DeliveryResult:
        (taken,) = await self._process_together((message,), gaps=gaps, from_start=from_start)
        return taken

    async def _process_together(
        self, messages: Sequence[Message], *, gaps: bool, from_start: bool = False
    ) -> list[DeliveryResult]:
        """Record and process deliveries in one transaction.

        Args:
            gaps: whether they are processed also when deliveries before them are missing.
            from_start: the inbox is older than their lanes, see `Inbox`.

        Raises:
            NotRecorded: deliveries before them are missing, or one of several conflicts.
        """
        all_taken: list[DeliveryResult] = []
        async with self._transaction() as connection:
            run = await self._receive_run(connection, messages)
            for n, message in enumerate(messages):
                taken = (
                    run[n]
                    if run is not None
                    else await self.inbox.receive_async(
                        connection, message, gaps=gaps, from_start=from_start
                    )
                )
                conflicts = taken.outcome is DeliveryOutcome.CONFLICT
                if taken.outcome is DeliveryOutcome.EARLY or (conflicts and len(messages) > 1):
                    raise NotRecorded(taken)
                all_taken.append(taken)
                if taken.fresh:
                    for handler in self._handlers.matching(message.type):
                        await self._call_handler(handler, message, connection)
            fresh = [n for n, taken in enumerate(all_taken) if taken.fresh]
            if fresh:
                # The first one: a handler of any later one may have rolled it back.
                await self.inbox.confirm_async(connection, messages[fresh[0]].delivery_id)
        for message in messages:
            self._committed(message)
        return all_taken

    async def _receive_run(
        self, connection: Any, messages: Sequence[Message]
    ) -> list[DeliveryResult] | None:
        """Record several deliveries at once; None: each has to be recorded alone."""
        if len(messages) < 2:
            return None
        return await self.inbox.receive_run_async(connection, messages)

    async def _call_handler(self, handler: Callable[..., Any], *arguments: Any) -> None:
        """Call a handler.

        An OSError becomes HandlerFailed, because drivers raise OSError, too; so does a
        cancellation of something that the handler waits for, if its caller was not cancelled.
        """
        try:
            await self._call(handler, *arguments)
        except OSError as error:
            raise HandlerFailed("the handler's own I/O failed") from error
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise HandlerFailed("the handler waits for something that was cancelled") from error

    async def _expire_after(self, taken: int) -> None:
        """Count received deliveries; delete expired rows after the first, then every EXPIRE_EVERY.

        Args:
            taken: deliveries that were received now.
        """
        with self._count_mutex:
            before = self._received_count
            self._received_count += taken
            is_time = before == 0 or before // EXPIRE_EVERY < self._received_count // EXPIRE_EVERY
        if is_time:
            await self._expire()

    async def _expire(self) -> None:
        try:
            for _ in range(EXPIRE_STEPS_MAX):
                async with self._transaction() as connection:
                    if await self.inbox.expire_async(connection) < EXPIRE_ROWS:
                        break
        except Exception:
            # The delivery is committed; expired rows are deleted at a later attempt.
            log.exception("expired rows were not deleted")


def is_cancelled() -> bool:
    """Whether the current task was cancelled; False without a running event loop."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0

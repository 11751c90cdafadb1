"""`AsyncReceiver`: the request pipeline on asyncio; see `outbox.receiver.pipeline`."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

from outbox.receiver.catch_up import (
    CatchUpResult,
    FetchedOutcome,
    FetchPage,
    MarkUnavailable,
    ProcessDelivery,
    catch_up,
    lanes_behind,
)
from outbox.receiver.databases import async_transactions
from outbox.receiver.decisions import (
    HELD_MAX,
    HOLD_S,
    NO_DATABASE_S,
    Busy,
    Gaps,
    NoDatabase,
    log,
    log_catch_up,
    partial_response,
    request_log_row,
)
from outbox.receiver.fetch import CannotFetch, DeliverySource
from outbox.receiver.inbox.inbox import EXPIRE_ROWS
from outbox.receiver.inbox.process import DeliveryOutcome, DeliveryResult
from outbox.receiver.lane_order import LaneState
from outbox.receiver.pipeline import (
    CANCELLED_RESPONSE,
    EXPIRE_STEPS_MAX,
    FETCH_UNAVAILABLE,
    NOT_FETCHABLE_YET,
    BatchSplit,
    EarlyDelivery,
    ReceiverBase,
    can_share_transaction,
)
from outbox.receiver.reorder_buffer import ReorderBuffer
from outbox.receiver.requests import RequestOutcome, Response
from outbox.receiver.verification import Verified

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeVar

    from outbox.core.delivery.receiver_checkpoint import LaneMark
    from outbox.receiver.inbox.process import StoredLane
    from outbox.receiver.message import Message
    from outbox.receiver.requests import Request

    Handler = TypeVar("Handler", bound=Callable[..., Any])

POLL_S = 0.25
"""Poll interval of a held request: another process may have received the missing one."""


class AsyncReceiver(ReceiverBase):
    """Receiver for asyncio: idempotent, ordered processing of deliveries.

    Args:
        secrets: the endpoint's secret, `whsec_…`; a list while one is being rotated.
        database: the database of the effects: a pool of asyncpg or psycopg, an engine or
            sessionmaker of SQLAlchemy, `MemoryDatabase()`, or a function that returns an
            async context manager which opens a transaction and yields its connection.
        inbox: table prefix and retention; see `Inbox`.
        fetch: where missing deliveries are fetched; required by `Gaps.CATCH_UP` and
            `catch_up`.
        gaps: policy for a delivery when deliveries before it are missing.
        hold_s: with `Gaps.HOLD`, how long its request is held, in seconds.
        held_max: requests held at once; more get 503.
        log_requests: insert each signed request into the inbox's `request` table.
        tolerance_s: maximum age of a signature, in seconds.
        header_prefix: prefix of the endpoint's header names, if it is not `X-`; several while
            the endpoint's prefix is being changed.
        body_bytes_max: larger bodies get 413.
        in_flight_max: requests processed at once; more get 503.
        on_delivery: called after the commit with each `Message` and its `DeliveryResult`.
        meter_provider: OpenTelemetry MeterProvider; None selects the global one.

    Raises:
        UsageError: an argument is out of range.
    """

    def __init__(
        self,
        secrets: str | Sequence[str],
        database: Any,
        *,
        gaps: Gaps = Gaps.REPORT,
        hold_s: float = HOLD_S,
        held_max: int = HELD_MAX,
        **options: Any,
    ) -> None:
        super().__init__(secrets, gaps=gaps, **options)
        self._transaction = async_transactions(database)
        self._hold_s = hold_s
        self._reorder_buffer = ReorderBuffer(held_max)
        self._start = asyncio.Lock()

    async def start(self) -> None:
        """Create the missing tables; otherwise the first request does so."""
        async with self._start:
            if not self._is_ready:
                async with self._transaction() as connection:
                    await self.inbox.create_async(connection)
                self._is_ready = True

    async def handle(self, request: Request) -> Response:
        """Process a request and return its response; never raises for a bad request."""
        began = self._rules.begin()
        if isinstance(began, Response):
            return began
        response = CANCELLED_RESPONSE
        try:
            verified = self._rules.read(request)
            if isinstance(verified, Response):
                response = verified
            else:
                response = await self._respond(verified, request.body)
            if self._log_requests and isinstance(verified, Verified):
                await self._log(verified, response)
            return response
        finally:
            self._rules.end(response, began)

    async def _respond(self, verified: Verified, body: bytes) -> Response:
        rules = self._rules
        try:
            if not self._is_ready:
                await self._ensure_started()
            if verified.checkpoint is not None:
                return await self._compare(verified.checkpoint)
            messages = verified.messages
            if messages:
                response = await self._receive_messages(messages)
            else:
                response = rules.delivery_committed(
                    None, await self._receive_foreign(verified, body)
                )
        except Exception as error:
            return rules.failed(error, verified.message_id)
        if rules.is_time_to_expire(len(messages) or 1):
            await self._expire()
        return response

    async def _ensure_started(self) -> None:
        try:
            await self.start()
        except Exception as error:
            raise NoDatabase from error

    async def _receive_messages(self, messages: Sequence[Message]) -> Response:
        """Process messages in one transaction, or else each in its own transaction."""
        together = (
            await self._process_in_one_transaction(messages)
            if can_share_transaction(messages)
            else None
        )
        if together is not None:
            for message in messages:
                self._reorder_buffer.received(message.lane, message.sequence)
            return self._rules.batch_committed(messages, together)
        taken: list[DeliveryResult] = []
        for n, message in enumerate(messages):
            try:
                taken.append(await self._receive(message))
            except Exception as error:
                response = self._rules.failed(error, message.delivery_id)
                self._rules.batch_committed(messages, taken)
                return partial_response(messages, n, response)
            self._reorder_buffer.received(message.lane, message.sequence)
            if taken[-1].outcome is DeliveryOutcome.CONFLICT:
                break
        return self._rules.batch_committed(messages, taken)

    async def _process_in_one_transaction(
        self, messages: Sequence[Message]
    ) -> list[DeliveryResult] | None:
        """Process a batch.  None: rolled back, so each delivery has to be processed alone."""
        all_taken: list[DeliveryResult] = []
        try:
            async with self._transaction() as connection:
                for message in messages:
                    taken = await self.inbox.receive_async(
                        connection, message, gaps=self._gaps is Gaps.REPORT
                    )
                    if taken.outcome in (DeliveryOutcome.EARLY, DeliveryOutcome.CONFLICT):
                        raise BatchSplit
                    all_taken.append(taken)
                    if taken.fresh:
                        for handler in self._rules.handlers.matching(message.type):
                            await _await_if_needed(handler(message, connection))
                await self.inbox.confirm_async(connection)
        except Exception:
            # Not logged: the failing delivery is found by processing each one alone.
            return None
        return all_taken

    async def _receive(self, message: Message) -> DeliveryResult:
        """Process a delivery, after the missing ones before it if the policy requires it."""
        if self._gaps is Gaps.REPORT:
            return await self._process(message, gaps=True)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._hold_s
        while True:
            with self._reorder_buffer.hold(message.lane, message.previous_sequence) as wait_until:
                try:
                    too_late = self._gaps is Gaps.HOLD and loop.time() >= ends_at
                    return await self._process(message, gaps=too_late)
                except EarlyDelivery:
                    if self._gaps is Gaps.CATCH_UP:
                        if await self._catch_up_before(message):
                            return await self._process(message, gaps=True)
                        if loop.time() >= ends_at:
                            raise Busy(NOT_FETCHABLE_YET) from None
                    with self._rules.not_in_flight():
                        await wait_until(min(ends_at, loop.time() + POLL_S))

    async def catch_up(self, lane: str | None = None) -> list[CatchUpResult]:
        """Fetch and process the missing deliveries of one lane, or of all lanes.

        Call it when a receiver starts, especially after a restore from a backup.  Fetched
        deliveries are processed in order and once, also while new ones arrive.  It does
        nothing for a receiver whose inbox is empty.

        Args:
            lane: its name; None selects all lanes that are behind.

        Returns:
            One result per lane that was behind.

        Raises:
            CannotFetch: the relay cannot be reached, or rejected the request.
            UsageError: the receiver was created without `fetch=`.
        """
        fetch = self._require_fetch_client()
        await self.start()
        async with self._transaction() as connection:
            known = await self.inbox.lanes_async(connection)
        if lane is not None:
            lanes = [lane]
        else:
            lanes = lanes_behind(known, [progress async for progress in fetch.lanes_async()])
        return [await self._catch_up(fetch, each, known) for each in lanes]

    async def _catch_up(
        self, fetch: DeliverySource, lane: str, known: Mapping[str, StoredLane]
    ) -> CatchUpResult:
        commands = catch_up(lane, known[lane].state if lane in known else LaneState())
        result: Any = None
        while True:
            try:
                command = commands.send(result)
            except StopIteration as end:
                return log_catch_up(end.value)
            match command:
                case FetchPage(after):
                    result = await fetch.page_async(lane, after)
                case ProcessDelivery(request):
                    result = await self._process_fetched(request)
                case MarkUnavailable(numbers):
                    async with self._transaction() as connection:
                        result = await self.inbox.mark_unavailable_async(connection, lane, numbers)

    async def _compare(self, marks: Sequence[LaneMark]) -> Response:
        """Compare a checkpoint with the inbox; with `Gaps.CATCH_UP` fetch what is missing."""
        async with self._transaction() as connection:
            compared = await self.inbox.compare_async(connection, marks)
        response = self._rules.checkpoint_compared(compared, fetches=self._gaps is Gaps.CATCH_UP)
        for lane in self._lanes_to_fetch(compared):
            try:
                await self.catch_up(lane)
            except CannotFetch as error:
                # The next checkpoint reveals the same missing numbers.
                log.error("lane %s: missing deliveries cannot be fetched now: %s", lane, error)
            finally:
                self._fetching.discard(lane)
        return response

    async def _process_fetched(self, request: Request) -> FetchedOutcome:
        """Process a fetched delivery; missing ones before it were already requested."""
        verified = self._rules.read(request)
        if isinstance(verified, Response) or len(verified.messages) != 1:
            raise CannotFetch("the relay's delivery is not signed with this receiver's secret")
        (message,) = verified.messages
        try:
            taken = await self._process(message, gaps=True)
        except Exception as error:
            response = self._rules.failed(error, verified.message_id)
            # The sender has already recorded it as delivered: it will not retry.
            return (
                FetchedOutcome.REFUSED
                if response.outcome is RequestOutcome.REFUSED
                else FetchedOutcome.RETRYABLE
            )
        self._reorder_buffer.received(message.lane, message.sequence)
        return self._rules.fetched(message, taken)

    async def _catch_up_before(self, message: Message) -> bool:
        """Fetch the missing deliveries before this one.

        Returns:
            True if it can be processed now; False if the relay has not yet recorded the
            acknowledgements of the deliveries before it.
        """
        try:
            (caught_up,) = await self.catch_up(message.lane)
        except CannotFetch as error:
            log.warning("sequence %d of %s is postponed: %s", message.sequence, message.lane, error)
            raise Busy(FETCH_UNAVAILABLE, retry_after_s=NO_DATABASE_S) from None
        if caught_up.failed is not None:
            raise Busy(f"sequence {caught_up.failed} of its lane cannot be processed")
        # The relay writes acknowledgements in groups: the newest may not be durable yet.
        return caught_up.acknowledged >= message.previous_sequence

    async def _process(self, message: Message, *, gaps: bool) -> DeliveryResult:
        began = False
        try:
            async with self._transaction() as connection:
                taken = await self.inbox.receive_async(connection, message, gaps=gaps)
                if taken.outcome is DeliveryOutcome.EARLY:
                    raise EarlyDelivery
                began = True
                if taken.fresh:
                    for handler in self._rules.handlers.matching(message.type):
                        await _await_if_needed(handler(message, connection))
                    await self.inbox.confirm_async(connection)
        except Exception as error:
            if began or isinstance(error, EarlyDelivery):
                raise
            raise NoDatabase from error
        return taken

    async def _receive_foreign(self, verified: Verified, body: bytes) -> DeliveryResult:
        async with self._transaction() as connection:
            taken = await self.inbox.receive_foreign_async(connection, verified.message_id)
            if taken.fresh and self._rules.foreign is not None:
                await _await_if_needed(self._rules.foreign(verified, body, connection))
                await self.inbox.confirm_async(connection)
        return taken

    async def _expire(self) -> None:
        try:
            for _ in range(EXPIRE_STEPS_MAX):
                async with self._transaction() as connection:
                    if await self.inbox.expire_async(connection) < EXPIRE_ROWS:
                        break
        except Exception:
            # The delivery is committed; expired rows are deleted at a later attempt.
            log.exception("expired rows were not deleted")

    async def _log(self, verified: Verified, response: Response) -> None:
        try:
            async with self._transaction() as connection:
                await self.inbox.log_async(connection, **request_log_row(verified, response))
        except Exception:
            log.exception("a request was not logged")


async def _await_if_needed(done: Any) -> None:
    """Await the result of a handler if it is a coroutine function."""
    if inspect.isawaitable(done):
        await done

"""Request pipeline of `AsyncReceiver` and `Receiver`, written once as coroutines.

1. verify the signature, and that headers and body agree;
2. open a transaction and record the delivery: lock its lane, look up and insert its
   sequence number and its `X-Delivery`;
3. if it is new, run the handlers in the same transaction;
4. commit, and only then respond 2xx.

An error before the commit rolls everything back, and the sender retries.

The deliveries of a batch are processed in one transaction.  If one fails, the transaction is
rolled back and each delivery is processed in its own transaction, up to the one that fails;
X-Accepted-Through reports how far that got.  A batch that contains a replay from another
lane is always processed one by one, because of the lock order (`can_share_transaction`).

The decisions are sans-IO: `decisions` for requests, `lane_order` for lanes, and the plans of
`inbox.process` for statements.  `AsyncReceiver` awaits the coroutines; `Receiver` runs them in
a thread (`blocking`).  They differ in how they open a transaction, call a handler, fetch, and
wait for missing deliveries.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from outbox.errors import UsageError
from outbox.receiver.catch_up import CatchUpResult, FetchedOutcome, catch_up, lanes_behind
from outbox.receiver.decisions import (
    UNAVAILABLE_S,
    Gaps,
    ReceiverRules,
    can_share_transaction,
    parse_gaps,
    partial_response,
)
from outbox.receiver.errors import Busy, UnhandledType, UnreadablePayload
from outbox.receiver.fetch import CannotFetch
from outbox.receiver.handlers import FOREIGN_PARAMETERS
from outbox.receiver.inbox.process import DeliveryOutcome, foreign_delivery_id
from outbox.receiver.lane_order import LaneState
from outbox.receiver.processing import DeliveryProcessor, NotRecorded
from outbox.receiver.reporting import log, log_catch_up, request_log_row
from outbox.receiver.requests import RequestOutcome, Response

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from outbox.core.model.int_ranges import Range
    from outbox.receiver.fetch import DeliverySource, LanePage, LaneProgress, PageItem
    from outbox.receiver.inbox.inbox import Inbox
    from outbox.receiver.inbox.process import DeliveryResult
    from outbox.receiver.lane_order import LaneGaps, StoredLane
    from outbox.receiver.message import Message
    from outbox.receiver.processing import Handler
    from outbox.receiver.reporting import ReceiverTotals
    from outbox.receiver.requests import Request
    from outbox.receiver.verification import Verified


CANCELLED_RESPONSE = Response(RequestOutcome.FAILED, 500, "the request was cancelled")
FETCH_UNAVAILABLE = "the missing deliveries before it cannot be fetched now"
NOT_FETCHABLE_YET = "deliveries acknowledged a moment ago cannot be fetched yet"


class ReceiverBase(DeliveryProcessor):
    """The request pipeline; a subclass runs it on asyncio or in threads.

    Args:
        transaction: opens a transaction and yields its connection.
        creation_lock: held while the tables are created.
    """

    def __init__(
        self,
        secrets: str | Sequence[str],
        transaction: Callable[[], AbstractAsyncContextManager[Any]],
        creation_lock: Callable[[], AbstractAsyncContextManager[Any]],
        *,
        inbox: Inbox | None = None,
        fetch: DeliverySource | None = None,
        gaps: Gaps = Gaps.REPORT,
        log_requests: bool = False,
        **rules: Any,
    ) -> None:
        gaps = parse_gaps(gaps)
        if gaps is Gaps.CATCH_UP and fetch is None:
            raise UsageError("fetch: Gaps.CATCH_UP needs fetch=FetchClient(url, token)")
        self._rules = ReceiverRules(secrets, **rules)
        super().__init__(transaction, creation_lock, self._rules.handlers, inbox)
        self._fetch = fetch
        self._gaps = gaps
        self._log_requests = log_requests

    @property
    def totals(self) -> ReceiverTotals:
        """Counters since the receiver was created."""
        return self._rules.reports.totals

    @property
    def body_bytes_max(self) -> int:
        """Largest request body accepted, in bytes."""
        return self._rules.body_bytes_max

    def on_foreign(self, handler: Handler) -> Handler:
        """Register a handler for requests of other Standard Webhooks senders.

        It is called with the `Verified` request, its body and the connection.  These
        requests have no lanes, so they are deduplicated but not checked for order.
        """
        self._check_handler(handler, FOREIGN_PARAMETERS)
        self._rules.foreign = handler
        return handler

    # --------------------------------------------------------------- of each subclass

    async def _lanes(self, fetch: DeliverySource) -> list[LaneProgress]:
        raise NotImplementedError

    async def _page(self, fetch: DeliverySource, lane: str, after: int) -> LanePage:
        raise NotImplementedError

    async def _delivery(self, fetch: DeliverySource, lane: str, sequence: int) -> PageItem:
        raise NotImplementedError

    # ------------------------------------------------------------------------ requests

    async def _handle(self, request: Request) -> Response:
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
                if self._log_requests:
                    await self._log(verified, response)
            return response
        finally:
            self._rules.end(response, began)

    async def _respond(self, verified: Verified, body: bytes) -> Response:
        rules = self._rules
        try:
            if not self._is_ready:
                await self._create_tables()
            if verified.messages:
                response = await self._receive_messages(verified.messages)
            else:
                response = rules.delivery_committed(
                    None, await self._receive_foreign(verified, body)
                )
        except Exception as error:
            return rules.failed(error, verified.message_id)
        await self._expire_after(len(verified.messages) or 1)
        return response

    async def _receive_messages(self, messages: Sequence[Message]) -> Response:
        """Process messages in one transaction, or else each in its own transaction."""
        taken: list[DeliveryResult] = []
        if can_share_transaction(messages):
            # Not logged: the failing delivery is found by processing each one alone.
            with contextlib.suppress(Exception):
                taken = await self._process_together(messages, gaps=self._gaps is Gaps.REPORT)
        if taken:
            return self._rules.batch_committed(messages, taken)
        for n, message in enumerate(messages):
            try:
                taken.append(await self._receive(message))
            except Exception as error:
                response = self._rules.failed(error, message.delivery_id)
                self._rules.batch_committed(messages, taken)
                return partial_response(messages, n, response)
            if taken[-1].outcome is DeliveryOutcome.CONFLICT:
                break
        return self._rules.batch_committed(messages, taken)

    async def _receive(self, message: Message) -> DeliveryResult:
        """Process a delivery, after the missing ones before it if the policy requires it."""
        try:
            return await self._process(message, gaps=self._gaps is Gaps.REPORT)
        except NotRecorded:
            if await self._catch_up_before(message):
                return await self._process(message, gaps=True)
            raise Busy(NOT_FETCHABLE_YET) from None

    async def _receive_foreign(self, verified: Verified, body: bytes) -> DeliveryResult:
        async with self._transaction() as connection:
            taken = await self.inbox.receive_foreign_async(connection, verified.message_id)
            if taken.fresh and self._rules.foreign is not None:
                await self._call_handler(self._rules.foreign, verified, body, connection)
                delivery_id = foreign_delivery_id(verified.message_id)
                await self.inbox.confirm_async(connection, delivery_id)
        return taken

    async def _log(self, verified: Verified, response: Response) -> None:
        try:
            async with self._transaction() as connection:
                await self.inbox.log_async(connection, **request_log_row(verified, response))
        except Exception:
            log.exception("a request was not logged")

    # ---------------------------------------------------------------------- catching up

    async def _catch_up(self, lane: str | None) -> list[CatchUpResult]:
        fetch = self._fetch
        if fetch is None:
            raise UsageError("fetch: catching up needs fetch=FetchClient(url, token)")
        await self._create_tables()
        async with self._transaction() as connection:
            known = await self.inbox.lanes_async(connection)
        if lane is not None:
            lanes = [lane]
        else:
            progress, from_start = await self._lanes(fetch), self.inbox.from_start
            lanes = lanes_behind(known, progress, from_start=from_start)
        return [await self._catch_up_lane(fetch, each, known) for each in lanes]

    async def _catch_up_lane(
        self, fetch: DeliverySource, lane: str, known: Mapping[str, StoredLane]
    ) -> CatchUpResult:
        state = known[lane].state if lane in known else LaneState()
        fetch_page = partial(self._page, fetch, lane)
        record = partial(self._record_gaps, lane)
        done = await catch_up(lane, state, fetch_page, self._process_fetched, record)
        log_catch_up(done)
        return done

    async def _record_gaps(self, lane: str, gaps: LaneGaps) -> tuple[Range, ...]:
        async with self._transaction() as connection:
            return await self.inbox.record_gaps_async(connection, lane, gaps)

    async def _process_fetched(self, request: Request) -> FetchedOutcome:
        """Process a fetched delivery; missing ones before it were already requested."""
        message = self._read_fetched(request)
        try:
            taken = await self._process(message, gaps=True)
        except Exception as error:
            response = self._rules.failed(error, message.delivery_id)
            # The sender has already recorded it as delivered: it will not retry.  A new version of
            # the receiver may have the handler, or read the payload.
            is_refused = response.outcome is RequestOutcome.REFUSED and not isinstance(
                error, (UnhandledType, UnreadablePayload)
            )
            return FetchedOutcome.REFUSED if is_refused else FetchedOutcome.RETRYABLE
        return self._rules.fetched(message, taken)

    async def _fetch_payload(self, message: Message) -> Any:
        fetch = self._fetch
        if fetch is None:
            raise UsageError("fetch: a payload is fetched with fetch=FetchClient(url, token)")
        item = await self._delivery(fetch, message.lane, message.sequence)
        if item.request is None:
            reason = "is gone, and nothing has erased it" if item.missing else "was erased"
            raise CannotFetch(f"the event of delivery {message.delivery_id} {reason}")
        found = self._read_fetched(item.request)
        if found.delivery_id != message.delivery_id:
            raise CannotFetch(f"the relay returned another delivery than {message.delivery_id}")
        return found.data

    def _read_fetched(self, request: Request) -> Message:
        verified = self._rules.read(request, fetched=True)
        if isinstance(verified, Response):
            raise CannotFetch(f"the relay's response is refused: {verified.text}")
        if len(verified.messages) != 1:
            raise CannotFetch("the relay's response is not one delivery")
        return verified.messages[0]

    async def _catch_up_before(self, message: Message) -> bool:
        """Fetch the missing deliveries before this one.

        Returns:
            True if it can be processed now; False if the relay has not yet recorded the
            acknowledgements of the deliveries before it.
        """
        try:
            (caught_up,) = await self._catch_up(message.lane)
        except CannotFetch as error:
            log.warning("sequence %d of %s is postponed: %s", message.sequence, message.lane, error)
            raise Busy(FETCH_UNAVAILABLE, retry_after_s=UNAVAILABLE_S) from None
        if caught_up.failed is not None:
            raise Busy(f"sequence {caught_up.failed} of its lane cannot be processed")
        # The relay writes acknowledgements in groups: the newest may not be durable yet.
        return caught_up.acknowledged >= message.previous_sequence

"""`Receiver`: the request pipeline in threads; see `outbox.receiver.pipeline`."""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Any

from outbox.errors import UsageError
from outbox.receiver.catch_up import (
    CatchUpResult,
    FetchedOutcome,
    FetchPage,
    MarkUnavailable,
    ProcessDelivery,
    catch_up,
    lanes_behind,
)
from outbox.receiver.databases import transactions
from outbox.receiver.decisions import (
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


class Receiver(ReceiverBase):
    """Receiver for threads: for Flask, Django, or SQLite.

    Args:
        secrets: the endpoint's secret, `whsec_…`; a list while one is being rotated.
        database: the database of the effects: a `ConnectionPool` of psycopg_pool, an
            engine or sessionmaker of SQLAlchemy, the path of a SQLite file,
            `MemoryDatabase()`, or a function that returns a context manager which opens a
            transaction and yields its connection.
        options: those of `AsyncReceiver` except `hold_s`, `held_max` and `Gaps.HOLD`,
            because a held request would block a thread.

    Raises:
        UsageError: an argument is out of range.
    """

    def __init__(self, secrets: str | Sequence[str], database: Any, **options: Any) -> None:
        super().__init__(secrets, **options)
        if self._gaps is Gaps.HOLD:
            raise UsageError("gaps: HOLD would block a thread; use AsyncReceiver, or CATCH_UP")
        self._transaction = transactions(database)
        self._start = threading.Lock()

    def _check_handler(self, handler: Callable[..., Any]) -> None:
        if inspect.iscoroutinefunction(handler):
            raise UsageError("the handler is a coroutine function: use AsyncReceiver")

    def start(self) -> None:
        """Create the missing tables; otherwise the first request does so."""
        with self._start:
            if not self._is_ready:
                with self._transaction() as connection:
                    self.inbox.create(connection)
                self._is_ready = True

    def handle(self, request: Request) -> Response:
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
                response = self._respond(verified, request.body)
            if self._log_requests and isinstance(verified, Verified):
                self._log(verified, response)
            return response
        finally:
            self._rules.end(response, began)

    def _respond(self, verified: Verified, body: bytes) -> Response:
        rules = self._rules
        try:
            if not self._is_ready:
                self._ensure_started()
            if verified.checkpoint is not None:
                return self._compare(verified.checkpoint)
            messages = verified.messages
            if messages:
                response = self._receive_messages(messages)
            else:
                response = rules.delivery_committed(None, self._receive_foreign(verified, body))
        except Exception as error:
            return rules.failed(error, verified.message_id)
        if rules.is_time_to_expire(len(messages) or 1):
            self._expire()
        return response

    def _ensure_started(self) -> None:
        try:
            self.start()
        except Exception as error:
            raise NoDatabase from error

    def catch_up(self, lane: str | None = None) -> list[CatchUpResult]:
        """Fetch and process missing deliveries; see `AsyncReceiver.catch_up`.

        Raises:
            CannotFetch: the relay cannot be reached, or rejected the request.
            UsageError: the receiver was created without `fetch=`.
        """
        fetch = self._require_fetch_client()
        self.start()
        with self._transaction() as connection:
            known = self.inbox.lanes(connection)
        lanes = [lane] if lane is not None else lanes_behind(known, fetch.lanes())
        return [self._catch_up(fetch, each, known) for each in lanes]

    def _catch_up(
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
                    result = fetch.page(lane, after)
                case ProcessDelivery(request):
                    result = self._process_fetched(request)
                case MarkUnavailable(numbers):
                    with self._transaction() as connection:
                        result = self.inbox.mark_unavailable(connection, lane, numbers)

    def _compare(self, marks: Sequence[LaneMark]) -> Response:
        with self._transaction() as connection:
            compared = self.inbox.compare(connection, marks)
        response = self._rules.checkpoint_compared(compared, fetches=self._gaps is Gaps.CATCH_UP)
        for lane in self._lanes_to_fetch(compared):
            try:
                self.catch_up(lane)
            except CannotFetch as error:
                # The next checkpoint reveals the same missing numbers.
                log.error("lane %s: missing deliveries cannot be fetched now: %s", lane, error)
            finally:
                self._fetching.discard(lane)
        return response

    def _process_fetched(self, request: Request) -> FetchedOutcome:
        verified = self._rules.read(request)
        if isinstance(verified, Response) or len(verified.messages) != 1:
            raise CannotFetch("the relay's delivery is not signed with this receiver's secret")
        (message,) = verified.messages
        try:
            taken = self._process(message, gaps=True)
        except Exception as error:
            response = self._rules.failed(error, verified.message_id)
            # The sender has already recorded it as delivered: it will not retry.
            return (
                FetchedOutcome.REFUSED
                if response.outcome is RequestOutcome.REFUSED
                else FetchedOutcome.RETRYABLE
            )
        return self._rules.fetched(message, taken)

    def _receive_messages(self, messages: Sequence[Message]) -> Response:
        """Process messages in one transaction, or else each in its own transaction."""
        together = (
            self._process_in_one_transaction(messages) if can_share_transaction(messages) else None
        )
        if together is not None:
            return self._rules.batch_committed(messages, together)
        taken: list[DeliveryResult] = []
        for n, message in enumerate(messages):
            try:
                taken.append(self._receive(message))
            except Exception as error:
                response = self._rules.failed(error, message.delivery_id)
                self._rules.batch_committed(messages, taken)
                return partial_response(messages, n, response)
            if taken[-1].outcome is DeliveryOutcome.CONFLICT:
                break
        return self._rules.batch_committed(messages, taken)

    def _process_in_one_transaction(
        self, messages: Sequence[Message]
    ) -> list[DeliveryResult] | None:
        """Process a batch.  None: rolled back, so each delivery has to be processed alone."""
        all_taken: list[DeliveryResult] = []
        try:
            with self._transaction() as connection:
                for message in messages:
                    taken = self.inbox.receive(connection, message, gaps=self._gaps is Gaps.REPORT)
                    if taken.outcome in (DeliveryOutcome.EARLY, DeliveryOutcome.CONFLICT):
                        raise BatchSplit
                    all_taken.append(taken)
                    if taken.fresh:
                        for handler in self._rules.handlers.matching(message.type):
                            _require_no_coroutine(handler(message, connection))
                self.inbox.confirm(connection)
        except Exception:
            # Not logged: the failing delivery is found by processing each one alone.
            return None
        return all_taken

    def _receive(self, message: Message) -> DeliveryResult:
        """Process a delivery, after the missing ones before it if the policy requires it."""
        if self._gaps is Gaps.REPORT:
            return self._process(message, gaps=True)
        try:
            return self._process(message, gaps=False)
        except EarlyDelivery:
            try:
                (caught_up,) = self.catch_up(message.lane)
            except CannotFetch as error:
                log.warning(
                    "sequence %d of %s is postponed: %s", message.sequence, message.lane, error
                )
                raise Busy(FETCH_UNAVAILABLE, retry_after_s=NO_DATABASE_S) from None
        if caught_up.failed is not None:
            raise Busy(f"sequence {caught_up.failed} of its lane cannot be processed")
        if caught_up.acknowledged < message.previous_sequence:
            raise Busy(NOT_FETCHABLE_YET)
        return self._process(message, gaps=True)

    def _process(self, message: Message, *, gaps: bool) -> DeliveryResult:
        began = False
        try:
            with self._transaction() as connection:
                taken = self.inbox.receive(connection, message, gaps=gaps)
                if taken.outcome is DeliveryOutcome.EARLY:
                    raise EarlyDelivery
                began = True
                if taken.fresh:
                    for handler in self._rules.handlers.matching(message.type):
                        _require_no_coroutine(handler(message, connection))
                    self.inbox.confirm(connection)
        except Exception as error:
            if began or isinstance(error, EarlyDelivery):
                raise
            raise NoDatabase from error
        return taken

    def _receive_foreign(self, verified: Verified, body: bytes) -> DeliveryResult:
        with self._transaction() as connection:
            taken = self.inbox.receive_foreign(connection, verified.message_id)
            if taken.fresh and self._rules.foreign is not None:
                _require_no_coroutine(self._rules.foreign(verified, body, connection))
                self.inbox.confirm(connection)
        return taken

    def _expire(self) -> None:
        try:
            for _ in range(EXPIRE_STEPS_MAX):
                with self._transaction() as connection:
                    if self.inbox.expire(connection) < EXPIRE_ROWS:
                        break
        except Exception:
            # The delivery is committed; expired rows are deleted at a later attempt.
            log.exception("expired rows were not deleted")

    def _log(self, verified: Verified, response: Response) -> None:
        try:
            with self._transaction() as connection:
                self.inbox.log(connection, **request_log_row(verified, response))
        except Exception:
            log.exception("a request was not logged")


def _require_no_coroutine(done: Any) -> None:
    """Refuse a coroutine returned by a handler: a threaded receiver cannot await it."""
    if inspect.isawaitable(done):
        if inspect.iscoroutine(done):
            done.close()
        raise UsageError("a handler returned a coroutine: use AsyncReceiver")

"""`Receiver`: from a request to its answer, in threads; see `outbox.receiver.pipeline`."""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Any

from outbox.errors import UsageError
from outbox.receiver.catch_up import Ask, CaughtUp, Fate, Forgo, Process, catch_up, to_catch_up
from outbox.receiver.databases import transactions
from outbox.receiver.decisions import (
    NO_DATABASE_S,
    Busy,
    Gaps,
    NoDatabase,
    log,
    logged,
    stopped,
    tell_caught_up,
)
from outbox.receiver.fetch import CannotFetch, Source
from outbox.receiver.inbox.inbox import EXPIRE_ROWS
from outbox.receiver.inbox.process import Outcome, Taken
from outbox.receiver.lane_order import LaneState
from outbox.receiver.pipeline import (
    EXPIRE_STEPS_MAX,
    NO_FETCH,
    NOT_FINISHED,
    NOT_YET,
    Apart,
    Common,
    Early,
    go_together,
)
from outbox.receiver.requests import Answer, Ended
from outbox.receiver.verification import Verified

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeVar

    from outbox.core.delivery.receiver_checkpoint import Mark
    from outbox.receiver.inbox.process import KeptLane
    from outbox.receiver.message import Message
    from outbox.receiver.requests import Request

    Handler = TypeVar("Handler", bound=Callable[..., Any])


class Receiver(Common):
    """Takes deliveries in threads: for Flask, Django, or SQLite.

    Args:
        secrets: the endpoint's `whsec_…`; several while one is being replaced.
        database: where the effects are: a `ConnectionPool` of psycopg_pool, an engine or
            a sessionmaker of SQLAlchemy, the path of a SQLite file, `MemoryDatabase()`,
            or a function that gives a context manager around a transaction.
        options: those of `AsyncReceiver`, but for holding: a thread that waits is one
            less that works.

    Raises:
        UsageError: an argument is out of its bounds.
    """

    def __init__(self, secrets: str | Sequence[str], database: Any, **options: Any) -> None:
        super().__init__(secrets, **options)
        if self._gaps is Gaps.HOLD:
            raise UsageError("gaps: in threads nobody can be held; use AsyncReceiver, or CATCH_UP")
        self._transaction = transactions(database)
        self._start = threading.Lock()

    def _require_fit(self, handler: Callable[..., Any]) -> None:
        if inspect.iscoroutinefunction(handler):
            raise UsageError("the handler is a coroutine function: use AsyncReceiver")

    def start(self) -> None:
        """Make the tables that are not there yet; done by the first request otherwise."""
        with self._start:
            if not self._is_ready:
                with self._transaction() as connection:
                    self.inbox.create(connection)
                self._is_ready = True

    def handle(self, request: Request) -> Answer:
        """Process a request, and say what to answer."""
        began = self._rules.begin()
        if isinstance(began, Answer):
            return began
        answer = NOT_FINISHED
        try:
            verified = self._rules.read(request)
            if isinstance(verified, Answer):
                answer = verified
            else:
                answer = self._answer(verified, request.body)
            if self._log_requests and isinstance(verified, Verified):
                self._log(verified, answer)
            return answer
        finally:
            self._rules.end(answer, began)

    def _answer(self, verified: Verified, body: bytes) -> Answer:
        rules = self._rules
        try:
            if not self._is_ready:
                self._begin()
            if verified.checkpoint is not None:
                return self._compare(verified.checkpoint)
            messages = verified.messages
            if messages:
                answer = self._take_all(messages)
            else:
                answer = rules.taken(None, self._take_foreign(verified, body))
        except Exception as error:
            return rules.failed(error, verified.message_id)
        if rules.is_time_to_expire(len(messages) or 1):
            self._expire()
        return answer

    def _begin(self) -> None:
        try:
            self.start()
        except Exception as error:
            raise NoDatabase from error

    def catch_up(self, lane: str | None = None) -> list[CaughtUp]:
        """Fetch and process what is missing; see `AsyncReceiver.catch_up`.

        Raises:
            CannotFetch: the relay does not answer.
            UsageError: this receiver does not know where to fetch.
        """
        fetch = self._where_to_fetch()
        self.start()
        with self._transaction() as connection:
            known = self.inbox.lanes(connection)
        wanted = [lane] if lane is not None else to_catch_up(known, fetch.lanes())
        return [self._catch_up(fetch, each, known) for each in wanted]

    def _catch_up(self, fetch: Source, lane: str, known: Mapping[str, KeptLane]) -> CaughtUp:
        steps = catch_up(lane, known[lane].state if lane in known else LaneState())
        came: Any = None
        while True:
            try:
                step = steps.send(came)
            except StopIteration as end:
                return tell_caught_up(end.value)
            match step:
                case Ask(after):
                    came = fetch.page(lane, after)
                case Process(request):
                    came = self._process_fetched(request)
                case Forgo(numbers):
                    with self._transaction() as connection:
                        came = self.inbox.forgo(connection, lane, numbers)

    def _compare(self, marks: Sequence[Mark]) -> Answer:
        with self._transaction() as connection:
            compared = self.inbox.compare(connection, marks)
        answer = self._rules.compared(compared, fetches=self._gaps is Gaps.CATCH_UP)
        for lane in self._to_fetch(compared):
            try:
                self.catch_up(lane)
            except CannotFetch as error:
                # The next one says the same.
                log.error("lane %s: what is missing cannot be fetched now: %s", lane, error)
            finally:
                self._fetching.discard(lane)
        return answer

    def _process_fetched(self, request: Request) -> Fate:
        verified = self._rules.read(request)
        if isinstance(verified, Answer) or len(verified.messages) != 1:
            raise CannotFetch("what the relay gave is not signed with this receiver's secret")
        (message,) = verified.messages
        try:
            taken = self._process(message, gaps=True)
        except Exception as error:
            answer = self._rules.failed(error, verified.message_id)
            # The sender has it as delivered, and will not send it again whatever is said.
            return Fate.NEVER if answer.ended is Ended.REFUSED else Fate.LATER
        return self._rules.fetched(message, taken)

    def _take_all(self, messages: Sequence[Message]) -> Answer:
        """Take them in one transaction; if that does not go, each by itself."""
        together = self._process_together(messages) if go_together(messages) else None
        if together is not None:
            return self._rules.all_taken(messages, together)
        taken: list[Taken] = []
        for n, message in enumerate(messages):
            try:
                taken.append(self._take(message))
            except Exception as error:
                answer = self._rules.failed(error, message.delivery_id)
                self._rules.all_taken(messages, taken)
                return stopped(messages, n, answer)
            if taken[-1].outcome is Outcome.CONFLICT:
                break
        return self._rules.all_taken(messages, taken)

    def _process_together(self, messages: Sequence[Message]) -> list[Taken] | None:
        """What a batch came to; None: one of its deliveries is not like the others."""
        all_taken: list[Taken] = []
        try:
            with self._transaction() as connection:
                for message in messages:
                    taken = self.inbox.take(connection, message, gaps=self._gaps is Gaps.TELL)
                    if taken.outcome in (Outcome.EARLY, Outcome.CONFLICT):
                        raise Apart
                    all_taken.append(taken)
                    if taken.fresh:
                        for handler in self._rules.handlers.of(message.type):
                            _require_finished(handler(message, connection))
                self.inbox.confirm(connection)
        except Exception:
            # Whose fault it was shows, and is told, when each goes by itself.
            return None
        return all_taken

    def _take(self, message: Message) -> Taken:
        """Take it, after what is before it if that is wanted first."""
        if self._gaps is Gaps.TELL:
            return self._process(message, gaps=True)
        try:
            return self._process(message, gaps=False)
        except Early:
            try:
                (caught_up,) = self.catch_up(message.lane)
            except CannotFetch as error:
                log.warning(
                    "number %d of %s has to wait: %s", message.sequence, message.lane, error
                )
                raise Busy(NO_FETCH, retry_after_s=NO_DATABASE_S) from None
        if caught_up.failed is not None:
            raise Busy(f"number {caught_up.failed} of its lane cannot be processed")
        if caught_up.acknowledged < message.previous_sequence:
            raise Busy(NOT_YET)
        return self._process(message, gaps=True)

    def _process(self, message: Message, *, gaps: bool) -> Taken:
        began = False
        try:
            with self._transaction() as connection:
                taken = self.inbox.take(connection, message, gaps=gaps)
                if taken.outcome is Outcome.EARLY:
                    raise Early
                began = True
                if taken.fresh:
                    for handler in self._rules.handlers.of(message.type):
                        _require_finished(handler(message, connection))
                    self.inbox.confirm(connection)
        except Exception as error:
            if began or isinstance(error, Early):
                raise
            raise NoDatabase from error
        return taken

    def _take_foreign(self, verified: Verified, body: bytes) -> Taken:
        with self._transaction() as connection:
            taken = self.inbox.take_foreign(connection, verified.message_id)
            if taken.fresh and self._rules.foreign is not None:
                _require_finished(self._rules.foreign(verified, body, connection))
                self.inbox.confirm(connection)
        return taken

    def _expire(self) -> None:
        try:
            for _ in range(EXPIRE_STEPS_MAX):
                with self._transaction() as connection:
                    if self.inbox.expire(connection) < EXPIRE_ROWS:
                        break
        except Exception:
            # What was received is committed, and this is done again later.
            log.exception("what has expired was not deleted")

    def _log(self, verified: Verified, answer: Answer) -> None:
        try:
            with self._transaction() as connection:
                self.inbox.log(connection, **logged(verified, answer))
        except Exception:
            log.exception("a request was not written down")


def _require_finished(done: Any) -> None:
    """Nobody awaits it here, so nothing would be done of it."""
    if inspect.isawaitable(done):
        if inspect.iscoroutine(done):
            done.close()
        raise UsageError("a handler gave a coroutine: use AsyncReceiver")

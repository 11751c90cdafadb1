"""`AsyncReceiver` and `Receiver`: from a request to its answer.

1. verify the signature, and that headers and body agree;
2. open a transaction, and take the delivery: its lane is locked, its number and its
   `X-Delivery` are looked up and written down;
3. if it is fresh, let the handlers do their work in the same transaction;
4. commit, and only then answer 2xx.

Whatever fails before the commit leaves nothing behind, and the sender tries again.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import TYPE_CHECKING, Any

from outbox.core.order import LaneState
from outbox.core.pattern import parse as parse_pattern
from outbox.errors import UsageError
from outbox.receiver.catching_up import Ask, CaughtUp, Fate, Forgo, Process, catch_up, to_catch_up
from outbox.receiver.databases import async_transactions, transactions
from outbox.receiver.fetching import CannotFetch, Source
from outbox.receiver.inbox.inbox import EXPIRE_ROWS, Inbox
from outbox.receiver.inbox.taking import Outcome, Taken
from outbox.receiver.receiving import (
    HELD_MAX,
    HOLD_S,
    NO_DATABASE_S,
    Busy,
    Gaps,
    NoDatabase,
    ReceiverTotals,
    Rules,
    choice,
    log,
    logged,
    tell_caught_up,
)
from outbox.receiver.requests import Answer, Ended
from outbox.receiver.verifying import Verified
from outbox.receiver.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TypeVar

    from outbox.core.checkpoint import Mark
    from outbox.receiver.inbox.taking import Compared, KeptLane
    from outbox.receiver.message import Message
    from outbox.receiver.requests import Request

    Handler = TypeVar("Handler", bound=Callable[..., Any])


NOT_FINISHED = Answer(Ended.FAILED, 500, "the request was called off")
EXPIRE_STEPS_MAX = 20
NO_FETCH = "what is missing before it cannot be fetched just now"
NOT_YET = "what was acknowledged a moment ago cannot be fetched yet"
LOOK_S = 0.25
"""Another process may have received what one waits for: one looks so often."""


class _Early(Exception):
    """Rolls back: what should come before is not here yet."""


class _Base:
    def __init__(
        self,
        secrets: str | Sequence[str],
        *,
        inbox: Inbox | None = None,
        fetch: Source | None = None,
        gaps: Gaps = Gaps.TELL,
        log_requests: bool = False,
        **rules: Any,
    ) -> None:
        gaps = choice(gaps)
        if gaps is Gaps.CATCH_UP and fetch is None:
            raise UsageError("fetch: to catch up a receiver has to know where, and its token")
        self.inbox = inbox or Inbox()
        self._fetch = fetch
        self._gaps = gaps
        self._rules = Rules(secrets, **rules)
        self._log_requests = log_requests
        self._is_ready = False
        # Lanes that a checkpoint made it catch up with, which can take longer than a sender waits.
        self._fetching: set[str] = set()

    @property
    def totals(self) -> ReceiverTotals:
        """What came since this receiver began."""
        return self._rules.totals

    @property
    def body_bytes_max(self) -> int:
        """An adapter need not read more."""
        return self._rules.body_bytes_max

    def _to_fetch(self, compared: Compared) -> Iterator[str]:
        """Lanes to catch up with because of a checkpoint; not while that is under way."""
        if self._gaps is Gaps.CATCH_UP:
            for lane in compared.missing:
                if lane not in self._fetching:
                    self._fetching.add(lane)
                    yield lane

    def _where_to_fetch(self) -> Source:
        if self._fetch is None:
            raise UsageError("fetch: this receiver does not know where to fetch what is missing")
        return self._fetch

    def on(self, pattern: str) -> Callable[[Handler], Handler]:
        """Let a function process what the pattern stands for: `order.paid`, `order.*`, `**`.

        It is called with the `Message` and the connection, in whose transaction the
        delivery is taken.  What it raises rolls both back: `Refuse` for ever, `Busy`
        for a moment, anything else to be tried again later.

        Raises:
            UsageError: the pattern is none.
        """
        wanted = parse_pattern(pattern)

        def add(handler: Handler) -> Handler:
            self._require_fit(handler)
            self._rules.handlers.add(wanted, handler)
            return handler

        return add

    def on_foreign(self, handler: Handler) -> Handler:
        """Let a function process requests of other Standard Webhooks senders.

        It is called with the `Verified` request, its body and the connection.  They have
        no lanes, so only copies are told.
        """
        self._require_fit(handler)
        self._rules.foreign = handler
        return handler

    def _require_fit(self, handler: Callable[..., Any]) -> None:
        """Whether this receiver can call it."""


class AsyncReceiver(_Base):
    """Takes deliveries with asyncio.

    Args:
        secrets: the endpoint's `whsec_…`; several while one is being replaced.
        database: where the effects are: a pool of asyncpg or psycopg, an engine or a
            sessionmaker of SQLAlchemy, `MemoryDatabase()`, or a function that gives an
            async context manager around a transaction.
        inbox: how its tables are called, and how long copies are known.
        gaps: what becomes of a delivery before which others are missing.
        hold_s: with `Gaps.HOLD`, for how long it waits for them, in seconds.
        held_max: so many may wait at once.
        log_requests: write each request that is signed down in the inbox's table `request`.
        tolerance_s: how old a signature may be.
        body_bytes_max: larger bodies are refused.
        in_flight_max: so many requests at once; the others are asked to come back.
        told: called with each delivery that was taken, and what it was.
        meter_provider: of OpenTelemetry, where its metrics go; by default the global one.

    Raises:
        UsageError: an argument is out of its bounds.
    """

    def __init__(
        self,
        secrets: str | Sequence[str],
        database: Any,
        *,
        gaps: Gaps = Gaps.TELL,
        hold_s: float = HOLD_S,
        held_max: int = HELD_MAX,
        **options: Any,
    ) -> None:
        super().__init__(secrets, gaps=gaps, **options)
        self._transaction = async_transactions(database)
        self._hold_s = hold_s
        self._waiting = Waiting(held_max)
        self._start = asyncio.Lock()

    async def start(self) -> None:
        """Make the tables that are not there yet; done by the first request otherwise."""
        async with self._start:
            if not self._is_ready:
                async with self._transaction() as connection:
                    await self.inbox.create_async(connection)
                self._is_ready = True

    async def handle(self, request: Request) -> Answer:
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
                answer = await self._answer(verified, request.body)
            if self._log_requests and isinstance(verified, Verified):
                await self._log(verified, answer)
            return answer
        finally:
            self._rules.end(answer, began)

    async def _answer(self, verified: Verified, body: bytes) -> Answer:
        rules = self._rules
        try:
            if not self._is_ready:
                await self._begin()
            if verified.checkpoint is not None:
                return await self._compare(verified.checkpoint)
            message = verified.message
            if message is None:
                taken = await self._take_foreign(verified, body)
            else:
                taken = await self._take(message)
                self._waiting.received(message.lane, message.sequence)
        except Exception as error:
            return rules.failed(error, verified.message_id)
        if rules.is_time_to_expire():
            await self._expire()
        return rules.taken(message, taken)

    async def _begin(self) -> None:
        try:
            await self.start()
        except Exception as error:
            raise NoDatabase from error

    async def _take(self, message: Message) -> Taken:
        """Take it at once, or when those before it are here."""
        if self._gaps is Gaps.TELL:
            return await self._process(message, gaps=True)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._hold_s
        while True:
            with self._waiting.hold(message.lane, message.previous_sequence) as came:
                try:
                    too_late = self._gaps is Gaps.HOLD and loop.time() >= ends_at
                    return await self._process(message, gaps=too_late)
                except _Early:
                    if self._gaps is Gaps.CATCH_UP:
                        if await self._caught_up(message):
                            return await self._process(message, gaps=True)
                        if loop.time() >= ends_at:
                            raise Busy(NOT_YET) from None
                    with self._rules.not_in_flight():
                        await came(min(ends_at, loop.time() + LOOK_S))

    async def catch_up(self, lane: str | None = None) -> list[CaughtUp]:
        """Fetch and process what is missing, of one lane or of all of them.

        Call it when a receiver starts, above all from a backup: what its lanes were sent
        since then is processed in order, each once, like what is sent meanwhile.  A
        receiver that has received nothing yet has nothing to catch up with.

        Raises:
            CannotFetch: the relay does not answer.
            UsageError: this receiver does not know where to fetch.
        """
        fetch = self._where_to_fetch()
        await self.start()
        async with self._transaction() as connection:
            known = await self.inbox.lanes_async(connection)
        if lane is not None:
            wanted = [lane]
        else:
            wanted = to_catch_up(known, [standing async for standing in fetch.lanes_async()])
        return [await self._catch_up(fetch, each, known) for each in wanted]

    async def _catch_up(self, fetch: Source, lane: str, known: Mapping[str, KeptLane]) -> CaughtUp:
        steps = catch_up(lane, known[lane].state if lane in known else LaneState())
        came: Any = None
        while True:
            try:
                step = steps.send(came)
            except StopIteration as end:
                return tell_caught_up(end.value)
            match step:
                case Ask(after):
                    came = await fetch.page_async(lane, after)
                case Process(request):
                    came = await self._process_fetched(request)
                case Forgo(numbers):
                    async with self._transaction() as connection:
                        came = await self.inbox.forgo_async(connection, lane, numbers)

    async def _compare(self, marks: Sequence[Mark]) -> Answer:
        """A checkpoint: what it shows to be missing is told, and fetched if that is wanted."""
        async with self._transaction() as connection:
            compared = await self.inbox.compare_async(connection, marks)
        answer = self._rules.compared(compared, fetches=self._gaps is Gaps.CATCH_UP)
        for lane in self._to_fetch(compared):
            try:
                await self.catch_up(lane)
            except CannotFetch as error:
                # The next one says the same.
                log.error("lane %s: what is missing cannot be fetched now: %s", lane, error)
            finally:
                self._fetching.discard(lane)
        return answer

    async def _process_fetched(self, request: Request) -> Fate:
        """Process it now, whatever is missing before it: that was asked for already."""
        verified = self._rules.read(request)
        if isinstance(verified, Answer) or verified.message is None:
            raise CannotFetch("what the relay gave is not signed with this receiver's secret")
        try:
            taken = await self._process(verified.message, gaps=True)
        except Exception as error:
            answer = self._rules.failed(error, verified.message_id)
            # The sender has it as delivered, and will not send it again whatever is said.
            return Fate.NEVER if answer.ended is Ended.REFUSED else Fate.LATER
        self._waiting.received(verified.message.lane, verified.message.sequence)
        return self._rules.fetched(verified.message, taken)

    async def _caught_up(self, message: Message) -> bool:
        """Fetch what is before a delivery; whether there is any use in waiting longer."""
        try:
            (caught_up,) = await self.catch_up(message.lane)
        except CannotFetch as error:
            log.warning("number %d of %s has to wait: %s", message.sequence, message.lane, error)
            raise Busy(NO_FETCH, retry_after_s=NO_DATABASE_S) from None
        if caught_up.failed is not None:
            raise Busy(f"number {caught_up.failed} of its lane cannot be processed")
        # What was acknowledged a moment ago may not be written yet.
        return caught_up.acknowledged >= message.previous_sequence

    async def _process(self, message: Message, *, gaps: bool) -> Taken:
        began = False
        try:
            async with self._transaction() as connection:
                taken = await self.inbox.take_async(connection, message, gaps=gaps)
                if taken.outcome is Outcome.EARLY:
                    raise _Early
                began = True
                if taken.fresh:
                    for handler in self._rules.handlers.of(message.type):
                        await _finished(handler(message, connection))
                    await self.inbox.confirm_async(connection)
        except Exception as error:
            if began or isinstance(error, _Early):
                raise
            raise NoDatabase from error
        return taken

    async def _take_foreign(self, verified: Verified, body: bytes) -> Taken:
        async with self._transaction() as connection:
            taken = await self.inbox.take_foreign_async(connection, verified.message_id)
            if taken.fresh and self._rules.foreign is not None:
                await _finished(self._rules.foreign(verified, body, connection))
                await self.inbox.confirm_async(connection)
        return taken

    async def _expire(self) -> None:
        try:
            for _ in range(EXPIRE_STEPS_MAX):
                async with self._transaction() as connection:
                    if await self.inbox.expire_async(connection) < EXPIRE_ROWS:
                        break
        except Exception:
            # What was received is committed, and this is done again later.
            log.exception("what has expired was not deleted")

    async def _log(self, verified: Verified, answer: Answer) -> None:
        try:
            async with self._transaction() as connection:
                await self.inbox.log_async(connection, **logged(verified, answer))
        except Exception:
            log.exception("a request was not written down")


class Receiver(_Base):
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
            message = verified.message
            taken = self._take_foreign(verified, body) if message is None else self._take(message)
        except Exception as error:
            return rules.failed(error, verified.message_id)
        if rules.is_time_to_expire():
            self._expire()
        return rules.taken(message, taken)

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
        if isinstance(verified, Answer) or verified.message is None:
            raise CannotFetch("what the relay gave is not signed with this receiver's secret")
        try:
            taken = self._process(verified.message, gaps=True)
        except Exception as error:
            answer = self._rules.failed(error, verified.message_id)
            # The sender has it as delivered, and will not send it again whatever is said.
            return Fate.NEVER if answer.ended is Ended.REFUSED else Fate.LATER
        return self._rules.fetched(verified.message, taken)

    def _take(self, message: Message) -> Taken:
        """Take it, after what is before it if that is wanted first."""
        if self._gaps is Gaps.TELL:
            return self._process(message, gaps=True)
        try:
            return self._process(message, gaps=False)
        except _Early:
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
                    raise _Early
                began = True
                if taken.fresh:
                    for handler in self._rules.handlers.of(message.type):
                        _require_finished(handler(message, connection))
                    self.inbox.confirm(connection)
        except Exception as error:
            if began or isinstance(error, _Early):
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


async def _finished(done: Any) -> None:
    """Whether a handler is a coroutine or not, it has ended."""
    if inspect.isawaitable(done):
        await done

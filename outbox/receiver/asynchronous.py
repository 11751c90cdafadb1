"""`AsyncReceiver`: from a request to its answer, with asyncio; see `outbox.receiver.pipeline`."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

from outbox.receiver.catch_up import Ask, CaughtUp, Fate, Forgo, Process, catch_up, to_catch_up
from outbox.receiver.databases import async_transactions
from outbox.receiver.decisions import (
    HELD_MAX,
    HOLD_S,
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
from outbox.receiver.reorder_buffer import Waiting
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

LOOK_S = 0.25
"""Another process may have received what one waits for: one looks so often."""


class AsyncReceiver(Common):
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
            messages = verified.messages
            if messages:
                answer = await self._take_all(messages)
            else:
                answer = rules.taken(None, await self._take_foreign(verified, body))
        except Exception as error:
            return rules.failed(error, verified.message_id)
        if rules.is_time_to_expire(len(messages) or 1):
            await self._expire()
        return answer

    async def _begin(self) -> None:
        try:
            await self.start()
        except Exception as error:
            raise NoDatabase from error

    async def _take_all(self, messages: Sequence[Message]) -> Answer:
        """Take them in one transaction; if that does not go, each by itself."""
        together = await self._process_together(messages) if go_together(messages) else None
        if together is not None:
            for message in messages:
                self._waiting.received(message.lane, message.sequence)
            return self._rules.all_taken(messages, together)
        taken: list[Taken] = []
        for n, message in enumerate(messages):
            try:
                taken.append(await self._take(message))
            except Exception as error:
                answer = self._rules.failed(error, message.delivery_id)
                self._rules.all_taken(messages, taken)
                return stopped(messages, n, answer)
            self._waiting.received(message.lane, message.sequence)
            if taken[-1].outcome is Outcome.CONFLICT:
                break
        return self._rules.all_taken(messages, taken)

    async def _process_together(self, messages: Sequence[Message]) -> list[Taken] | None:
        """What a batch came to; None: one of its deliveries is not like the others."""
        all_taken: list[Taken] = []
        try:
            async with self._transaction() as connection:
                for message in messages:
                    taken = await self.inbox.take_async(
                        connection, message, gaps=self._gaps is Gaps.TELL
                    )
                    if taken.outcome in (Outcome.EARLY, Outcome.CONFLICT):
                        raise Apart
                    all_taken.append(taken)
                    if taken.fresh:
                        for handler in self._rules.handlers.of(message.type):
                            await _finished(handler(message, connection))
                await self.inbox.confirm_async(connection)
        except Exception:
            # Whose fault it was shows, and is told, when each goes by itself.
            return None
        return all_taken

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
                except Early:
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
        if isinstance(verified, Answer) or len(verified.messages) != 1:
            raise CannotFetch("what the relay gave is not signed with this receiver's secret")
        (message,) = verified.messages
        try:
            taken = await self._process(message, gaps=True)
        except Exception as error:
            answer = self._rules.failed(error, verified.message_id)
            # The sender has it as delivered, and will not send it again whatever is said.
            return Fate.NEVER if answer.ended is Ended.REFUSED else Fate.LATER
        self._waiting.received(message.lane, message.sequence)
        return self._rules.fetched(message, taken)

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
                    raise Early
                began = True
                if taken.fresh:
                    for handler in self._rules.handlers.of(message.type):
                        await _finished(handler(message, connection))
                    await self.inbox.confirm_async(connection)
        except Exception as error:
            if began or isinstance(error, Early):
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


async def _finished(done: Any) -> None:
    """Whether a handler is a coroutine or not, it has ended."""
    if inspect.isawaitable(done):
        await done

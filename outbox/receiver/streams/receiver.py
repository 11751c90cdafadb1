"""`StreamReceiver`: processes the events that a relay writes to a broker's streams."""

from __future__ import annotations

import asyncio
import contextlib
from math import inf
from typing import TYPE_CHECKING, Any

from outbox.core.model.headers import DEFAULT_PREFIX
from outbox.drivers.databases import async_transactions
from outbox.errors import OutboxError, UsageError
from outbox.receiver.decisions import Gaps, parse_gaps
from outbox.receiver.lane_order import LaneState
from outbox.receiver.reporting import ReceiverReports, log
from outbox.receiver.streams.generations import (
    LaneProgress,
    Schedule,
    counting_order,
    is_new_to_inbox,
    relevant_lanes,
    schedule,
)
from outbox.receiver.streams.lane_reader import (
    LaneReader,
    LaneStopped,
    PlanOutdated,
    StopReason,
    hold_off_s,
    raise_if_cancelled,
    stop_of,
)
from outbox.receiver.streams.processor import LaneActivity, LaneStatus, StreamProcessor
from outbox.receiver.streams.source import SourceOptions, StreamUnavailable, source_factory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping
    from pathlib import Path

    from opentelemetry.metrics import MeterProvider

    from outbox.receiver.handlers import Unhandled
    from outbox.receiver.inbox.inbox import Inbox
    from outbox.receiver.inbox.process import DeliveryResult
    from outbox.receiver.lane_order import StoredLane
    from outbox.receiver.message import Message
    from outbox.receiver.payload import Parse
    from outbox.receiver.processing import Handler
    from outbox.receiver.reporting import ReceiverTotals
    from outbox.receiver.streams.processor import OnRefuse
    from outbox.receiver.streams.source import StreamSource

LANES_POLL_S = 1.0
"""Interval at which new lanes are found."""
INBOX_POLL_S = 10.0
"""Interval at which the inbox is compared with the lanes that are read: another reader or an
operator may have ended lanes, or it was restored from a backup."""
TRANSACTION_MESSAGES_MAX = 100
CONCURRENCY = 8
HOLD_OFF_S_MAX = 30.0
BROKER_TIMEOUT_S = 10.0
WAIT_WARNING_S = 60.0
"""Time until it is logged that a lane waits for the end of another."""
CANCEL_S = 1.0
"""Time until a task is cancelled again."""
_UNREAD = (LaneActivity.WAITING, LaneActivity.ENDED)


class ReadFailed(OutboxError):
    """`drain` could not read all lanes to their end; the message has one line for each of these."""


class StreamReceiver:
    """Reads the streams of an endpoint, and processes each event once and in order.

        reader = StreamReceiver(os.environ["AUDIT_STREAM"], pool)

        @reader.on("order.paid")
        async def paid(delivery, connection): ...

        await reader.run()

    The position in each lane is the highest number of the lane in the inbox.  It is committed with
    the effects, and restored with them from a backup.  Nothing is acknowledged to the broker.

    A lane stops at an event that cannot be processed now, and is read again after a hold-off.  The
    other lanes go on.  Lanes of a new generation are read once those of the older ones have ended.
    Two readers with one inbox process each event once; but both read everything, so the second one
    is a standby and not a share of the work.

    Args:
        url: the endpoint's URL.
        database: the database of the effects, as of `AsyncReceiver`.
        inbox: table prefix and retention; see `Inbox`.
        credentials: `user:password`, a token, or the content of a `.creds` file.
        ca: PEM file of the server's certificate authority, or its content.
        gaps: policy when messages before a message are missing: `Gaps.HOLD` stops the lane,
            `Gaps.REPORT` processes the message, and reports them.
        on_refuse: what happens at an event that a handler refuses: `skip` records it, with an error
            in the log and a row in the inbox's `request` table; `stop` stops the lane.
        unhandled: what happens to an event whose type has no handler: `refuse`, or `ignore`, which
            records it without a word.
        header_prefix: prefix of the endpoint's header names, if it is not `X-`.
        parse: parses the JSON text of a payload, as of `AsyncReceiver`.
        batch_max: messages of a lane in one transaction.
        concurrency: transactions at once; no more than the database pool has connections.
        hold_off_s_max: longest time until a stopped lane, or a broker, is read again, in seconds.
        timeout_s: time-out of one call to the broker, in seconds.
        on_delivery: called after the commit with each `Message` and its `DeliveryResult`.
        meter_provider: OpenTelemetry MeterProvider; None selects the global one.

    Raises:
        UsageError: an argument is not valid, no reader is installed for the URL's scheme, or its
            client library is missing.
    """

    def __init__(
        self,
        url: str,
        database: Any,
        *,
        inbox: Inbox | None = None,
        credentials: str | None = None,
        ca: str | Path | None = None,
        gaps: Gaps | str = Gaps.HOLD,
        on_refuse: OnRefuse = "skip",
        unhandled: Unhandled = "refuse",
        header_prefix: str = DEFAULT_PREFIX,
        parse: Parse | None = None,
        batch_max: int = TRANSACTION_MESSAGES_MAX,
        concurrency: int = CONCURRENCY,
        hold_off_s_max: float = HOLD_OFF_S_MAX,
        timeout_s: float = BROKER_TIMEOUT_S,
        on_delivery: Callable[[Message, DeliveryResult], None] | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        gaps = parse_gaps(gaps)
        if gaps is Gaps.CATCH_UP:
            raise UsageError("gaps: a stream is not fetched; use Gaps.HOLD or Gaps.REPORT")
        if on_refuse not in ("skip", "stop"):
            raise UsageError(f"on_refuse: must be skip or stop, not {on_refuse!r}")
        for name, value in (("batch_max", batch_max), ("concurrency", concurrency)):
            if value < 1:
                raise UsageError(f"{name}: must be 1 or more, not {value}")
        for name, limit in (("hold_off_s_max", hold_off_s_max), ("timeout_s", timeout_s)):
            if not limit > 0:
                raise UsageError(f"{name}: must be more than 0 s, not {limit:g}")
        self._open_source = source_factory(SourceOptions(url, credentials, ca, timeout_s))
        self._processor = StreamProcessor(
            async_transactions(database),
            ReceiverReports(on_delivery, meter_provider),
            inbox=inbox,
            gaps=gaps,
            on_refuse=on_refuse,
            unhandled=unhandled,
            concurrency=concurrency,
        )
        self._header_prefix = header_prefix
        self._parse = parse
        self._batch_max = batch_max
        self._hold_off_s_max = hold_off_s_max
        self._is_interrupted = False
        # Since when lanes wait for the end of older ones, by the loop's clock, until it is logged.
        self._waiting_since: dict[str, float] = {}

    @property
    def totals(self) -> ReceiverTotals:
        """Counters since the reader was created; requests are attempts to process an event."""
        return self._processor.reports.totals

    @property
    def inbox(self) -> Inbox:
        """Where processed events are recorded."""
        return self._processor.inbox

    def status(self) -> list[LaneStatus]:
        """State of each lane, by name; empty before the lanes are found."""
        status = self._processor.status
        return [status[lane] for lane in sorted(status)]

    def on(self, pattern: str) -> Callable[[Handler], Handler]:
        """Register a handler for event types: `order.paid`, `order.*`, `**`.

        The handler is called with the `Message` and the connection whose transaction records the
        event.  An exception rolls back both, and stops the lane: `Refuse` skips the event or stops
        the lane (`on_refuse`), `Busy` names the hold-off, any other error is repeated.

        Args:
            pattern: dot-separated; `*` is one segment, a last `**` one or more.

        Raises:
            UsageError: the pattern is invalid, or the handler cannot be called.
        """
        return self._processor.on(pattern)

    async def start(self) -> None:
        """Create the missing tables; otherwise `run` does so."""
        await self._processor.create_tables()

    async def run(self) -> None:
        """Read until it is cancelled, through failures of the broker and of the database."""
        failures, last = 0, ""
        while True:
            raise_if_cancelled()
            try:
                async with self._source() as source:
                    await self._processor.create_tables()
                    await self._read_forever(source)
            except Exception as error:
                is_plain = isinstance(error, StreamUnavailable | PlanOutdated)
                stop = None if is_plain else stop_of(error, None)
                text = str(error) if stop is None else stop.detail
                if not self._is_interrupted:
                    failures, last = 0, ""
                if text != last:
                    is_known = stop is None or stop.reason is StopReason.UNAVAILABLE
                    log.error("reading is interrupted: %s", text, exc_info=not is_known)
                self._is_interrupted = True
                failures, last = failures + 1 if text == last else 1, text
            await asyncio.sleep(hold_off_s(failures, self._hold_off_s_max))

    async def drain(self) -> None:
        """Read every lane to its end, and return: for scripts and tests.

        Raises:
            ReadFailed: lanes stopped, or wait for the end of older ones; the others were read to
                their end.
            StreamUnavailable: the broker cannot be read.
        """
        await self._processor.create_tables()
        stops: list[LaneStopped] = []
        done: set[str] = set()
        async with self._source() as source:
            while readers := {
                lane: reader
                for lane, reader in (await self._find_readers(source, await source.lanes())).items()
                if lane not in done
            }:
                done |= readers.keys()
                tasks = [asyncio.create_task(each.run_to_end()) for each in readers.values()]
                try:
                    await asyncio.wait(tasks)
                finally:
                    await _cancel(tasks)
                for task in tasks:
                    error = task.exception()
                    if error is None:
                        continue
                    if not isinstance(error, LaneStopped):
                        raise error
                    stops.append(error)
        unread = (LaneActivity.STOPPED, LaneActivity.WAITING)
        left = [each for each in self.status() if each.activity in unread]
        if left:
            waits = LaneActivity.WAITING
            lines = "; ".join(
                f"lane {each.lane}{' waits' if each.activity is waits else ':'} {each.detail}"
                for each in left
            )
            first = stops[0] if stops else None
            raise ReadFailed(lines) from (first and (first.__cause__ or first))

    async def skip(self, lane: str, sequence: int, *, lane_ends: bool = False) -> None:
        """Do not expect the numbers of a lane up to this one any more; an operator's decision.

        Their events are not processed.  It takes effect in all readers of the inbox.

        Args:
            lane: the lane's name.
            sequence: the last number to skip.
            lane_ends: whether its end entry is lost, too: the lane has ended.
        """
        await self._processor.create_tables()
        async with self._processor.transaction() as connection:
            await self.inbox.skip_async(connection, lane, sequence, lane_ends=lane_ends)

    # --------------------------------------------------------------------------- lanes

    @contextlib.asynccontextmanager
    async def _source(self) -> AsyncIterator[StreamSource]:
        source = self._open_source()
        try:
            yield source
        finally:
            await source.aclose()

    async def _read_forever(self, source: StreamSource) -> None:
        """Read all lanes, until one of them cannot read the broker."""
        tasks: dict[str, asyncio.Task[None]] = {}
        found: set[str] = set()
        now, compare_at = asyncio.get_running_loop().time, 0.0
        try:
            while True:
                raise_if_cancelled()
                before, found = found, await source.lanes()
                if self._is_interrupted:
                    self._is_interrupted = False
                    log.warning("reading goes on")
                running = {lane for lane, task in tasks.items() if not task.done()}
                # As a rule nothing has changed: no statement every second.
                is_due = now() >= compare_at
                if is_due or found != before or not found <= running | self._ended():
                    compare_at = now() + INBOX_POLL_S
                    readers = await self._find_readers_or_none(source, found)
                    self._check_plan(running)
                    for lane in readers.keys() - running:
                        tasks[lane] = asyncio.create_task(readers[lane].run())
                        running.add(lane)
                poll = asyncio.create_task(asyncio.sleep(LANES_POLL_S))
                try:
                    # The end of a lane may end the waiting of others.
                    finished, _ = await asyncio.wait(
                        [poll, *(tasks[lane] for lane in running)],
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                finally:
                    poll.cancel()
                for task in finished - {poll}:
                    task.result()
        finally:
            await _cancel(tasks.values())

    async def _find_readers_or_none(
        self, source: StreamSource, found: set[str]
    ) -> dict[str, LaneReader]:
        """See `_find_readers`; none if the database fails, which ends no lane."""
        try:
            return await self._find_readers(source, found)
        except (StreamUnavailable, PlanOutdated):
            raise
        except Exception as error:
            log.warning("the inbox cannot be read now: %s", stop_of(error, None).detail)
            return {}

    def _check_plan(self, running: Collection[str]) -> None:
        """Raise PlanOutdated if a lane that is read must wait for another one."""
        for lane in running:
            status = self._processor.status.get(lane)
            if status is not None and status.activity is LaneActivity.WAITING:
                raise PlanOutdated(f"lane {lane} must wait {status.detail}")

    def _ended(self) -> set[str]:
        status = self._processor.status.values()
        return {each.lane for each in status if each.activity is LaneActivity.ENDED}

    async def _find_readers(self, source: StreamSource, found: set[str]) -> dict[str, LaneReader]:
        """Readers of the lanes that may be read now.

        Args:
            found: the lanes of the broker.
        """
        async with self._processor.transaction() as connection:
            known = await self.inbox.lanes_async(connection)
        lanes = relevant_lanes(found, known)
        unstarted = [lane for lane in lanes if lane not in known or known[lane].state.high == 0]
        with_entries = await source.with_entries(counting_order(unstarted))
        plan = schedule({lane: _progress(lane, known, with_entries) for lane in lanes})
        self._set_status(lanes, known, plan)
        return {
            lane: LaneReader(
                lane,
                source,
                self._processor,
                from_start=is_new_to_inbox(lane, known),
                header_prefix=self._header_prefix,
                parse=self._parse,
                count_max=self._batch_max,
                hold_off_s_max=self._hold_off_s_max,
            )
            for lane in plan.ready
        }

    def _set_status(self, lanes: set[str], known: Mapping[str, StoredLane], plan: Schedule) -> None:
        status, now = self._processor.status, asyncio.get_running_loop().time()
        for lane in self._waiting_since.keys() - plan.waiting.keys():
            del self._waiting_since[lane]
        for lane in status.keys() - lanes:
            self._processor.forget_stop(lane)
            del status[lane]
        for lane in lanes:
            position = known[lane].state.high if lane in known else None
            blocker = plan.waiting.get(lane)
            if blocker is not None:
                detail = f"until lane {blocker} has ended"
                if now - self._waiting_since.setdefault(lane, now) >= WAIT_WARNING_S:
                    self._waiting_since[lane] = inf
                    log.warning("lane %s waits %s", lane, detail)
                status[lane] = LaneStatus(lane, LaneActivity.WAITING, position, detail=detail)
            elif lane not in plan.ready:
                if lane in status:
                    self._processor.forget_stop(lane)
                status[lane] = LaneStatus(lane, LaneActivity.ENDED, position)
            elif lane not in status or status[lane].activity in _UNREAD:
                status[lane] = LaneStatus(lane, LaneActivity.READING, position)


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        # Again, if a library has lost it.
        _, left = await asyncio.wait(left, timeout=CANCEL_S)
    for task in tasks:
        # One error has been raised; asyncio would log the others.
        if not task.cancelled():
            task.exception()


def _progress(
    lane: str, known: Mapping[str, StoredLane], with_entries: Collection[str]
) -> LaneProgress:
    state = known[lane].state if lane in known else LaneState()
    return LaneProgress(state.high > 0, state.ended, lane in with_entries)

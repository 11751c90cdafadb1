"""Reads one lane of a stream: in order, each event once, with a stop at the first failure.

The position is the highest number of the lane in the inbox, so effects, deduplication and position
are committed, and restored, together.

A stop holds up its own lane only.  The lane is read again from the inbox's position after a
hold-off with full jitter, whatever the cause: a gap may have been filled, an operator may have
skipped a number, another reader may have processed the message.

    failed         a handler raised an error, or its transaction failed
    busy           a handler postponed the event
    unavailable    the consumer's database is away or busy
    gap            messages before this one are missing, see `Gaps`
    refused        a handler refused the event, with `on_refuse="stop"`
    bad_message    the message is no delivery of this lane
    conflict       its number was used by another delivery, or lies beyond the end of the lane
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from outbox.core.model.response import one_line
from outbox.drivers.errors import condition_of
from outbox.errors import OutboxError
from outbox.receiver.decisions import can_share_transaction
from outbox.receiver.errors import Busy, HandlerFailed, Refuse
from outbox.receiver.inbox.process import DeliveryOutcome
from outbox.receiver.message import BadMessage, Message
from outbox.receiver.processing import NotRecorded, is_cancelled
from outbox.receiver.streams.entries import LaneEnd, read_entry
from outbox.receiver.streams.source import StreamUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.model.int_ranges import Range
    from outbox.receiver.inbox.process import DeliveryResult
    from outbox.receiver.payload import Parse
    from outbox.receiver.streams.source import StoredEntry, StreamSource

MESSAGE_WAIT_S = 5.0
"""How long one call waits for the next message."""
READ_AHEAD_BYTES = 1 << 20
"""Read-ahead of a lane, by the size of its last messages."""
HOLD_OFF_S = 0.1
"""Mean hold-off before the first repetition; each further one doubles it, up to the largest."""


class StopReason(StrEnum):
    """Why reading of a lane has stopped; see the top of this module."""

    FAILED = "failed"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    GAP = "gap"
    REFUSED = "refused"
    BAD_MESSAGE = "bad_message"
    CONFLICT = "conflict"


class LaneStopped(Exception):
    """Reading of a lane cannot continue now.

    Args:
        sequence: the sequence of the message at which it stopped.
        hold_off_s: the shortest time until it is read again.
    """

    def __init__(
        self, reason: StopReason, sequence: int | None, detail: str, hold_off_s: float = 0.0
    ) -> None:
        super().__init__(detail)
        self.reason = reason
        self.sequence = sequence
        self.detail = one_line(detail)
        self.hold_off_s = hold_off_s


class PlanOutdated(OutboxError):
    """The lanes are not where their readers expect them, as after the restore of the inbox from a
    backup.  All are read again from where the inbox stands.
    """


class EntryProcessor(Protocol):
    """Processes entries in the consumer's database; raises its errors and those of handlers."""

    async def position(self, lane: str) -> int:
        """The highest number of the lane in the inbox."""
        ...

    async def process(
        self, messages: Sequence[Message], *, from_start: bool
    ) -> list[DeliveryResult]:
        """Process messages in one transaction, and report them.

        Raises:
            NotRecorded: messages before them are missing, or one of several conflicts.
        """
        ...

    async def end(self, end: LaneEnd, *, from_start: bool) -> DeliveryResult:
        """Record the end of a lane; raises NotRecorded as well."""
        ...

    async def refuse(self, message: Message, refused: Refuse, *, from_start: bool) -> None:
        """Record a refused message, so that its lane goes on.

        Raises:
            LaneStopped: the lane stops at refused messages.
        """
        ...

    def stopped(self, lane: str, stop: LaneStopped, *, is_repeated: bool) -> None:
        """Count and log a stop."""
        ...

    def advanced(self, lane: str, position: int) -> None:
        """Called when the lane has progressed, also after a stop."""
        ...


class LaneReader:
    """Reads one lane until it has ended.

    Args:
        from_start: the inbox is older than the lane.
        count_max: messages in one transaction.
        hold_off_s_max: bounds the time between two repetitions.
    """

    def __init__(
        self,
        lane: str,
        source: StreamSource,
        processor: EntryProcessor,
        *,
        from_start: bool,
        header_prefix: str,
        parse: Parse | None,
        count_max: int,
        hold_off_s_max: float,
    ) -> None:
        self._lane = lane
        self._source = source
        self._processor = processor
        self._from_start = from_start
        self._header_prefix = header_prefix
        self._read_payload = parse
        # One at first: the size of its messages is not known.
        self._count_max, self._count = count_max, 1
        self._hold_off_s_max = hold_off_s_max
        self._position: int | None = None
        """The lane's position; None: it is read from the inbox."""
        self._recorded = 0
        """The highest position that the inbox has had."""
        self._stopped_at: int | None = None
        """The message at which the lane is stopped; 0: none in particular, None: it is not."""
        self._has_ended = False

    async def run(self) -> None:
        """Read until the lane has ended.

        Raises:
            StreamUnavailable: the broker cannot be read.
            PlanOutdated: the inbox has lost deliveries that it had recorded.
        """
        failures, last = 0, (StopReason.FAILED, -1)
        while not self._has_ended:
            raise_if_cancelled()
            try:
                await self.step(MESSAGE_WAIT_S)
                failures = 0
            except LaneStopped as stop:
                position = stop.sequence or -1
                is_repeated, last = last == (stop.reason, position), (stop.reason, position)
                failures = failures + 1 if is_repeated else 1
                self._processor.stopped(self._lane, stop, is_repeated=is_repeated)
                await asyncio.sleep(
                    max(stop.hold_off_s, hold_off_s(failures, self._hold_off_s_max))
                )

    async def run_to_end(self) -> None:
        """Read what is there.

        Raises:
            LaneStopped: reading of the lane cannot continue.
            StreamUnavailable: the broker cannot be read.
        """
        try:
            while not self._has_ended and await self.step(0.0):
                raise_if_cancelled()
        except LaneStopped as stop:
            self._processor.stopped(self._lane, stop, is_repeated=False)
            raise

    async def step(self, wait_s: float) -> bool:
        """Read and process the next messages; returns whether there were any.

        Raises:
            LaneStopped: the first of them that was not processed is the reason.
            StreamUnavailable: the broker cannot be read.
            PlanOutdated: the inbox has lost deliveries that it had recorded.
        """
        if self._position is None:
            try:
                position = await self._processor.position(self._lane)
            except Exception as error:
                self._stopped_at = self._stopped_at or 0
                raise stop_of(error, None) from error
            if position < self._recorded:
                raise PlanOutdated(
                    f"the inbox has lane {self._lane} up to sequence {position}, but had it up to "
                    f"{self._recorded}"
                )
            self._position = self._recorded = position
            # An inbox that has the lane does not join it in the middle.
            self._from_start |= position > 0
            if self._stopped_at is not None and self._position >= self._stopped_at:
                # An operator has skipped it, or another reader has processed it.
                self._advance(self._position)
        entries = await self._source.read(self._lane, self._position, self._count, wait_s)
        if not entries:
            self._advance(self._position)
            # Read again, of an idle lane: the inbox may have been restored.
            self._position = None
            return False
        try:
            await self._process_entries(entries)
        except LaneStopped as stop:
            self._position, self._stopped_at = None, stop.sequence or 0
            raise
        size = max(len(entry.body) for entry in entries)
        self._count = max(1, min(self._count_max, READ_AHEAD_BYTES // (size + 1)))
        return True

    async def _process_entries(self, entries: Sequence[StoredEntry]) -> None:
        messages: list[Message] = []
        for entry in entries:
            try:
                item = self._parse(entry)
            except BadMessage as error:
                await self._process(messages)
                at = f"sequence {entry.sequence}" if entry.sequence else "an entry"
                detail = f"{at} is no delivery of the lane: {error}"
                raise LaneStopped(StopReason.BAD_MESSAGE, entry.sequence, detail) from error
            if isinstance(item, Message):
                messages.append(item)
                continue
            await self._process(messages)
            messages = []
            await self._end(item)
            return
        await self._process(messages)

    def _parse(self, entry: StoredEntry) -> Message | LaneEnd:
        item = read_entry(entry.headers, entry.body, self._header_prefix, self._read_payload)
        if (item.lane, item.sequence) != (self._lane, entry.sequence):
            raise BadMessage(f"it is sequence {item.sequence} of lane {item.lane[:100]}")
        if isinstance(item, Message) and item.lane_ends:
            # In a stream the end entry ends the lane, which also has the number of lanes.
            return replace(item, lane_ends=False)
        return item

    async def _process(self, messages: Sequence[Message]) -> None:
        """Process messages in one transaction, or else each in its own."""
        if not messages:
            return
        if can_share_transaction(messages):
            try:
                await self._processor.process(messages, from_start=self._from_start)
            except Exception:  # noqa: S110 - the failing message is found by processing each alone.
                pass
            else:
                self._advance(messages[-1].sequence, recorded=True)
                return
        for message in messages:
            await self._process_one(message)
            self._advance(message.sequence, recorded=True)

    async def _process_one(self, message: Message) -> None:
        try:
            (taken,) = await self._processor.process((message,), from_start=self._from_start)
        except Refuse as refused:
            await self._refuse(message, refused)
        except Exception as error:
            raise stop_of(error, message.sequence) from error
        else:
            _check_conflict(taken, message.sequence)

    async def _refuse(self, message: Message, refused: Refuse) -> None:
        try:
            await self._processor.refuse(message, refused, from_start=self._from_start)
        except LaneStopped:
            raise
        except Exception as error:
            raise stop_of(error, message.sequence) from error

    async def _end(self, end: LaneEnd) -> None:
        try:
            taken = await self._processor.end(end, from_start=self._from_start)
        except Exception as error:
            raise stop_of(error, end.sequence) from error
        _check_conflict(taken, end.sequence)
        self._has_ended = True
        self._advance(end.sequence, recorded=True)

    def _advance(self, position: int, *, recorded: bool = False) -> None:
        if recorded:
            self._recorded = position
            self._from_start = True
        if position != self._position or self._stopped_at is not None:
            self._stopped_at = None
            self._processor.advanced(self._lane, position)
        self._position = position


def hold_off_s(failures: int, longest_s: float) -> float:
    """The time until a lane or a broker is read again: exponential, with full jitter."""
    return random.uniform(0, min(longest_s, HOLD_OFF_S * 2 ** min(failures, 30)))  # noqa: S311


def raise_if_cancelled() -> None:
    """Raise a cancellation that a library has lost, as `asyncio.wait_for` does before 3.12."""
    if is_cancelled():
        raise asyncio.CancelledError


def stop_of(error: Exception, sequence: int | None) -> LaneStopped:
    """What an error of processing means for its lane."""
    match error:
        case LaneStopped() | StreamUnavailable():
            raise error
        case NotRecorded():
            return LaneStopped(
                StopReason.GAP,
                sequence,
                f"{_ranges(error.taken.missing)} before sequence {sequence} are not in the stream, "
                "and were delivered: lost, or trimmed before they were read",
            )
        case Busy():
            return LaneStopped(StopReason.BUSY, sequence, str(error), error.retry_after_s)
    if not isinstance(error, HandlerFailed) and condition_of(error) is not None:
        return LaneStopped(StopReason.UNAVAILABLE, sequence, "the database cannot be used now")
    return LaneStopped(StopReason.FAILED, sequence, f"{type(error).__name__}: {error}")


def _check_conflict(taken: DeliveryResult, sequence: int) -> None:
    if taken.outcome is DeliveryOutcome.CONFLICT:
        raise LaneStopped(
            StopReason.CONFLICT,
            sequence,
            f"sequence {sequence} was used by another delivery, or lies beyond the lane's end",
        )


def _ranges(ranges: Sequence[Range]) -> str:
    texts = [str(lo) if lo == hi else f"{lo} to {hi}" for lo, hi in ranges]
    return f"sequences {', '.join(texts)}"

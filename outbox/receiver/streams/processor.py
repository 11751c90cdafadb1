"""Processes the entries of lanes in the consumer's database, and keeps the state of each lane."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from outbox.drivers.blocking import resolve
from outbox.receiver.decisions import Gaps
from outbox.receiver.handlers import HandlerRegistry
from outbox.receiver.inbox.process import DeliveryOutcome
from outbox.receiver.processing import DeliveryProcessor, NotRecorded
from outbox.receiver.reporting import ReceiverReports, log
from outbox.receiver.requests import RequestOutcome, one_line
from outbox.receiver.streams.lane_reader import LaneStopped, StopReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from outbox.receiver.errors import Refuse
    from outbox.receiver.handlers import Unhandled
    from outbox.receiver.inbox.inbox import Inbox
    from outbox.receiver.inbox.process import DeliveryResult
    from outbox.receiver.message import Message
    from outbox.receiver.streams.entries import LaneEnd

    OnRefuse: TypeAlias = Literal["skip", "stop"]

REFUSED_STATUS = 422
"""Status of a refused event in the inbox's `request` table, as over HTTP."""
_OUTCOMES = {
    DeliveryOutcome.FRESH: RequestOutcome.PROCESSED,
    DeliveryOutcome.DUPLICATE: RequestOutcome.DUPLICATE,
    DeliveryOutcome.CONFLICT: RequestOutcome.CONFLICT,
    DeliveryOutcome.EARLY: RequestOutcome.PUT_OFF,
}
_STOP_OUTCOMES = {
    StopReason.FAILED: RequestOutcome.FAILED,
    StopReason.BUSY: RequestOutcome.PUT_OFF,
    StopReason.UNAVAILABLE: RequestOutcome.PUT_OFF,
    StopReason.GAP: RequestOutcome.PUT_OFF,
    StopReason.REFUSED: RequestOutcome.REFUSED,
    StopReason.BAD_MESSAGE: RequestOutcome.REJECTED,
    StopReason.CONFLICT: RequestOutcome.CONFLICT,
}


class LaneActivity(StrEnum):
    """What a reader does with a lane."""

    READING = "reading"
    STOPPED = "stopped"
    """It is read again after a hold-off."""
    WAITING = "waiting"
    """Lanes of an older generation have to end before."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """State of a lane in this process."""

    lane: str
    activity: LaneActivity
    position: int | None = None
    """The last number that was processed; None: not known yet."""
    reason: StopReason | None = None
    """The reason for which the lane is stopped."""
    detail: str | None = None
    """Why it is stopped, or which lane it waits for; one line."""


class StreamProcessor(DeliveryProcessor):
    """Processes entries; see `EntryProcessor`.

    Args:
        transaction: opens a transaction and yields its connection.
        concurrency: transactions at once.
        reports: counts, log and metrics.
    """

    def __init__(
        self,
        transaction: Callable[[], AbstractAsyncContextManager[Any]],
        reports: ReceiverReports,
        *,
        inbox: Inbox | None,
        gaps: Gaps,
        on_refuse: OnRefuse,
        unhandled: Unhandled,
        concurrency: int,
    ) -> None:
        creation_lock = asyncio.Lock()
        super().__init__(transaction, lambda: creation_lock, HandlerRegistry(unhandled), inbox)
        self.reports = reports
        self.status: dict[str, LaneStatus] = {}
        """State of each lane, by name."""
        self._takes_gaps = gaps is Gaps.REPORT
        self._on_refuse = on_refuse
        self._slots = asyncio.Semaphore(concurrency)

    async def create_tables(self) -> None:
        """Create the missing tables of the inbox."""
        if not self._is_ready:
            await self._create_tables()

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction."""
        return self._transaction()

    async def position(self, lane: str) -> int:
        async with self._slots, self._transaction() as connection:
            stored = await self.inbox.lane_async(connection, lane)
        return 0 if stored is None else stored.state.high

    async def process(
        self, messages: Sequence[Message], *, from_start: bool
    ) -> list[DeliveryResult]:
        async with self._slots:
            began_at = time.perf_counter()
            all_taken = await self._process_together(
                messages, gaps=self._takes_gaps, from_start=from_start
            )
            elapsed_s = time.perf_counter() - began_at
        for message, taken in zip(messages, all_taken, strict=True):
            self.reports.delivery_committed(message, taken)
            self.reports.request_ended(_OUTCOMES[taken.outcome], elapsed_s)
        await self._expire_after(len(messages))
        return all_taken

    async def end(self, end: LaneEnd, *, from_start: bool) -> DeliveryResult:
        async with self._slots, self._transaction() as connection:
            taken = await self.inbox.end_lane_async(
                connection,
                end.lane,
                end.sequence,
                end.previous_sequence,
                end.siblings,
                gaps=self._takes_gaps,
                from_start=from_start,
            )
            if taken.outcome is DeliveryOutcome.EARLY:
                raise NotRecorded(taken)
        return taken

    async def refuse(self, message: Message, refused: Refuse, *, from_start: bool) -> None:
        reason = one_line(str(refused))
        if self._on_refuse == "stop":
            raise LaneStopped(StopReason.REFUSED, message.sequence, reason) from refused
        async with self._slots, self._transaction() as connection:
            taken = await self.inbox.receive_async(
                connection, message, gaps=self._takes_gaps, from_start=from_start
            )
            await self.inbox.log_async(
                connection,
                delivery_id=message.delivery_id,
                lane=message.lane,
                sequence=message.sequence,
                type=message.type,
                attempt=None,
                outcome=RequestOutcome.REFUSED.value,
                status=REFUSED_STATUS,
                reason=reason,
            )
        log.error(
            "lane %s: sequence %d was refused, and is skipped: %s",
            message.lane,
            message.sequence,
            reason,
        )
        self.reports.delivery_committed(message, taken)
        self.reports.request_ended(RequestOutcome.REFUSED)

    def stopped(self, lane: str, stop: LaneStopped, *, is_repeated: bool) -> None:
        self.reports.request_ended(_STOP_OUTCOMES[stop.reason])
        known = self.status.get(lane) or LaneStatus(lane, LaneActivity.READING)
        if known.activity is not LaneActivity.STOPPED:
            self.reports.metrics.lanes_stopped(1)
        self.status[lane] = replace(
            known, activity=LaneActivity.STOPPED, reason=stop.reason, detail=stop.detail
        )
        if not is_repeated:
            is_failure = stop.reason is StopReason.FAILED
            log.error(
                "lane %s is stopped (%s): %s",
                lane,
                stop.reason,
                stop.detail,
                exc_info=stop.__cause__ if is_failure else None,
            )

    def advanced(self, lane: str, position: int) -> None:
        known = self.status.get(lane)
        if known is not None and known.activity is LaneActivity.STOPPED:
            self.forget_stop(lane)
            log.info("lane %s is read again", lane)
        self.status[lane] = LaneStatus(lane, LaneActivity.READING, position)

    def forget_stop(self, lane: str) -> None:
        """Count a lane that is not stopped any more."""
        if self.status[lane].activity is LaneActivity.STOPPED:
            self.reports.metrics.lanes_stopped(-1)

    async def _call(self, handler: Callable[..., Any], *arguments: Any) -> None:
        await resolve(handler(*arguments))

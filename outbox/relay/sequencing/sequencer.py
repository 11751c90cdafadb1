"""The sequencer: when to poll for committed events, and when to sleep.

One replica leads and sequences; the others stand by.  They poll whether the leader makes
progress, and take over if it does not, or is gone.

When a poll finds no events, the leader goes to sleep by the wake-up protocol, whose steps
must stay in this order: set the flag, capture the producers in flight, read once more,
wait.  A producer that starts after the flag was set notifies; one that was in flight was
captured, and is watched until it ends.  In addition the sleeper polls each `poll_s`.

The flag stays set over the batches of a steady load: a notification is faster than polling,
and costs the producers nothing as long as they do not wait for each other (NOTIFY takes a
lock until the end of the commit).  Only when they do, or when the relay is busy, the flag
says "awake", and producers do not notify.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import TYPE_CHECKING

import structlog

from outbox.core.delivery.operational_events import LAGGING_S, LagAction, LagDetector
from outbox.errors import CursorBroken
from outbox.relay.sequencing.cursor import BatchResult, Cursor
from outbox.relay.sequencing.stall_monitor import StallMonitor
from outbox.store.errors import ResponseLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outbox.config import Settings
    from outbox.relay.sequencing.cursor import SequencedBatch
    from outbox.relay.wake_event import Wakeups
    from outbox.store.cluster.leadership import LeaderStatus
    from outbox.store.sequencing.batches import SequencingStore

log = structlog.get_logger("outbox.sequencer")

BUSY_WINDOW_S = 0.5
"""The sequencer is busy if `busy_events` were sequenced within this time."""
BUSY_POLL_S = 0.02
"""Polling interval when busy.  The cost of a batch hardly depends on its size, and its
commit delays the producers' commits: fewer, larger batches leave them more capacity."""
POLL_MIN_S = 0.001
"""Polling interval when awake otherwise."""
EMPTY_READS_MAX, EMPTY_READ_EVERY_S = 5, 0.002
"""Reads in a row without an event, after which the next one waits until the interval is over: any
role may send notifications.  Between events there are two or three."""
NOTIFY_WAITERS_MAX, CONTENTION_S = 2, 1.0
"""If this many producers wait for another one's NOTIFY, producers do not notify for this
time: NOTIFY serializes their commits, which then depend on the disk's latency."""
ASLEEP_S = 60
"""Validity of the flag "may be asleep", in seconds; renewed at half of it."""
WATCH_MIN_S, WATCH_MAX_S, WATCH_SHARE = 0.002, 0.2, 0.2
"""Polling interval of producers in flight: WATCH_SHARE of the time they have been watched,
within bounds.  A producer that takes seconds to commit can wait a little."""
LOCK_RETRY_S = 0.05
"""Retry delay if the cursor row is locked.  The replica does not sleep, because the flag may
say "awake", and the events it was woken for may still be unread."""
BROKEN_RETRY_S = 5.0
SEQUENCE_CHECK_EVERY_S = 30.0
"""Interval of the check of the sequence's options, which an ALTER SEQUENCE may have changed."""
STAND_BY_MIN_S = 0.05
"""Minimum polling interval on standby, regardless of wake events."""
TAKEOVER_RESET_S = 60.0
"""Time without a take-over after which earlier ones no longer count."""


class Sequencer:
    """Sequences on one connection.

    Args:
        on_batch: see `Cursor`.
        notified: whether notifications can arrive; without them the sequencer polls,
            and producers never notify.
        notification_payload: see `Cursor`.
    """

    cursor_type: type[Cursor] = Cursor
    busy_events = 600

    def __init__(
        self,
        store: SequencingStore,
        replica_id: int,
        settings: Settings,
        wakeups: Wakeups,
        on_batch: Callable[[SequencedBatch], bool],
        notification_payload: Callable[[int, Mapping[int, int]], str | None],
        *,
        notified: bool,
    ) -> None:
        self._store = store
        self._me = replica_id
        self._settings = settings
        self._wakeups = wakeups
        self._wake_event = wakeups.published
        self._notified = notified
        self.cursor = self.cursor_type(
            store,
            replica_id,
            settings,
            on_batch,
            self._keep_polling,
            notification_payload,
        )
        # When to check the sequence's options again.
        self._check_at = -math.inf
        # Reads in a row without an event, and when the next one may start.
        self._empty_reads, self._read_at = 0, 0.0
        self._asleep_until = 0.0
        # Times at which the newest events were sequenced.
        self._sequenced_at: deque[float] = deque(maxlen=self.busy_events)
        # Until then, producers that notify would delay each other.
        self._contention_until = 0.0
        self._lag = LagDetector()
        self.stall = StallMonitor(store.stalls, replica_id, settings.lease_s)
        # A leader that did not sequence pending events, and since when.
        self._suspected_leader: tuple[LeaderStatus, float] | None = None
        # The suspected leader that is being replaced; 0: none.
        self._replaced_leader = 0
        # Number of take-overs from such leaders, and the time of the last one.
        self._take_overs = 0
        self._took_over_at = -math.inf
        self._stopping = False
        self.on_lead: Sequence[Callable[[bool], None]] = ()
        """Called before a poll with whether this replica leads, if that has changed."""
        self._reported_leads: bool | None = None
        self.polled_at: float | None = None
        """When it last read the cursor, by the loop's clock; None: never."""
        self.broken: str | None = None
        """Why the sequence's state is inconsistent; None: it is consistent."""

    # ------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Sequence until stopped; asyncpg's errors end it."""
        while not self._stopping:
            try:
                result = await self._poll_once()
            except ResponseLost:
                # The cursor starts from the tables again.
                self._asleep_until = 0.0
                # A batch may have been written without `on_batch`.
                self._wakeups.poll_cluster()
                continue
            except CursorBroken as broken:
                self._check_at = -math.inf
                self.broken = str(broken)
                log.error("sequencing stopped", reason=str(broken), retry_s=BROKEN_RETRY_S)
                await self._pause(BROKEN_RETRY_S)
                continue
            if result is None:
                await self._stand_by()
            elif (wait_s := self._next_wait_s(result)) is None:
                continue
            elif wait_s < math.inf:
                await self._wake_event.wait(wait_s)
            else:
                await self._sleep()

    async def _poll_once(self) -> BatchResult | None:
        """Sequence a batch, or set the flag to "asleep"; None: another replica leads."""
        clock = asyncio.get_running_loop().time
        if clock() >= self._check_at:
            await self._store.check()
            self._check_at = clock() + SEQUENCE_CHECK_EVERY_S
        if not self.cursor.leads and not await self._may_take_leadership():
            self._report_leadership(leads=False)
            self._mark_polled()
            return None
        self._report_leadership(leads=True)
        if self._empty_reads >= EMPTY_READS_MAX:
            await self._pause(self._read_at - clock())
        self._read_at = clock() + EMPTY_READ_EVERY_S
        result = await self.sequence_batch()
        if result is BatchResult.EMPTY and not (
            self.cursor.reader.more or self._asleep_until or self._polls()
        ):
            result = await self._fall_asleep()
        self._empty_reads = self._empty_reads + 1 if result is BatchResult.EMPTY else 0
        await self._record_result(result)
        return result

    def _next_wait_s(self, result: BatchResult) -> float | None:
        """How long to wait for a wake event before the next poll, in seconds.

        Returns:
            None: poll at once.  Infinite: sleep as long as the wake-up flag says so.
        """
        poll_s = self._settings.poll_s
        match result:
            case BatchResult.STALE:
                return None
            case BatchResult.LOCKED:
                # The release of the row's lock causes no notification.
                return min(LOCK_RETRY_S, poll_s)
            case _ if self.cursor.reader.more:
                return None
            case BatchResult.WRITTEN if not self._notified:
                return None
            case _ if self._asleep_until:
                return math.inf
            case _ if not self._notified:
                now = asyncio.get_running_loop().time()
                return max(self._next_poll_at(now + poll_s) - now, 0.0)
            case BatchResult.WRITTEN if self._is_busy():
                return BUSY_POLL_S
        return POLL_MIN_S

    def stop(self) -> None:
        """Let `run` return after the current batch."""
        self._stopping = True
        self._wake_event.set()
        self._wakeups.standby.set()

    async def release_leadership(self) -> None:
        """Release the leadership after `run`, so that another replica can lead at once."""
        await self.cursor.release_leadership()

    def _report_leadership(self, *, leads: bool) -> None:
        if leads is not self._reported_leads:
            self._reported_leads = leads
            for each in self.on_lead:
                each(leads)

    async def _record_result(self, result: BatchResult) -> None:
        """Record whether this replica could sequence."""
        if self.cursor.leads and self._replaced_leader:
            # With the cursor row locked, the leader could not have made any progress.
            if not self.stall.locked:
                log.warning("leader made no progress; took over", replica=self._replaced_leader)
            self._take_overs += 1
            self._took_over_at = asyncio.get_running_loop().time()
        self._replaced_leader = 0
        if result is BatchResult.LOCKED:
            await self.stall.record_locked()
        elif result is BatchResult.STALE:
            # Another replica may have changed the flag, so this one is not asleep any more.
            self._asleep_until = 0.0
        elif self.stall.record_success():
            # Another replica may have reported the stall.
            self._lag.reset()

    def _mark_polled(self) -> None:
        self.polled_at = asyncio.get_running_loop().time()
        self.broken = None

    @property
    def lag_s(self) -> float | None:
        """Seconds since the last read that reached no limit; None: another replica leads."""
        read_at = self.cursor.reader.complete_at
        if read_at is None or not self.cursor.leads:
            return None
        return asyncio.get_running_loop().time() - read_at

    async def sequence_batch(self) -> BatchResult:
        """Sequence one batch, taking the leadership if needed.

        Raises:
            CursorBroken: the sequence's state is inconsistent; nothing was written.
        """
        result = await self.cursor.sequence_batch()
        self._mark_polled()
        if self.cursor.reader.awake:
            self._asleep_until = 0.0
        if not self.cursor.leads:
            self._lag.reset()
        elif result is not BatchResult.LOCKED:
            await self._report_lag()
        return result

    async def _report_lag(self) -> None:
        """Report by operational events that sequencing lags, and that it has caught up."""
        now = asyncio.get_running_loop().time()
        match self._lag.record_batch(now, full=self.cursor.reader.more):
            case LagAction.CHECK if await self._store.stalls.publish_lagging(self._me):
                self._lag.mark_reported()
                log.warning("sequencing lags behind", longer_than_s=LAGGING_S)
            case LagAction.CLOSE if await self._store.stalls.end_lagging(self._me):
                self._lag.mark_ended()

    def _next_poll_at(self, at: float) -> float:
        """The earlier of a time and the next batch that is due without an event."""
        return min(at, at if self.cursor.due_at is None else self.cursor.due_at)

    async def _pause(self, seconds: float) -> None:
        """Wait regardless of wake events; only `stop` ends it sooner."""
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        while not self._stopping and (left_s := until - clock()) > 0:
            await self._wake_event.wait(left_s)

    # --------------------------------------------------------- busy or idle

    def _is_busy(self) -> bool:
        """Whether events arrive too fast for a notification each."""
        newest = self._sequenced_at
        now = asyncio.get_running_loop().time()
        return len(newest) == newest.maxlen and now - newest[0] < BUSY_WINDOW_S

    def _has_notify_contention(self) -> bool:
        """Whether producers that notify would delay each other."""
        return asyncio.get_running_loop().time() < self._contention_until

    def _polls(self) -> bool:
        """Whether the sequencer polls, and producers do not notify."""
        return self._is_busy() or self._has_notify_contention() or not self._notified

    def _keep_polling(self, events: int, waiting: int) -> bool:
        """Whether producers should stop notifying.

        Args:
            events: number of events in the batch.
            waiting: number of producers that wait for another one's NOTIFY.
        """
        now = asyncio.get_running_loop().time()
        self._sequenced_at.extend([now] * min(events, self.busy_events))
        if waiting >= NOTIFY_WAITERS_MAX:
            self._contention_until = now + CONTENTION_S
        return self._polls()

    async def _fall_asleep(self) -> BatchResult:
        """Set the flag, capture the producers in flight, and read once more."""
        clock = asyncio.get_running_loop().time
        self._wake_event.clear()
        if self._stopping:
            self._wake_event.set()
        result = await self.cursor.sequence_batch(asleep_s=ASLEEP_S)
        if result is BatchResult.EMPTY:
            self._asleep_until = clock() + ASLEEP_S
        return result

    async def _sleep(self) -> None:
        """Wait for a wake event, the end of a watched producer, or the next poll."""
        clock = asyncio.get_running_loop().time
        renew_at = self._asleep_until - ASLEEP_S / 2
        poll_at = self._next_poll_at(min(clock() + self._settings.poll_s, renew_at))
        watched = self.cursor.reader.watched
        while (left_s := poll_at - clock()) > 0:
            watched_s = clock() - (self._asleep_until - ASLEEP_S)
            step_s = min(max(WATCH_SHARE * watched_s, WATCH_MIN_S), WATCH_MAX_S)
            if await self._wake_event.wait(min(step_s, left_s) if watched else left_s):
                break
            if not watched:
                break
            remaining = watched & await self._store.holders()
            if remaining != watched:
                # It stays asleep; producers that started since then notify.
                self.cursor.reader.watched = remaining
                break
        if clock() >= renew_at:
            self._asleep_until = 0.0  # The flag expires soon: set it again.

    # ------------------------------------------------------------ standing by

    async def _may_take_leadership(self) -> bool:
        """Whether this replica may take the leadership.

        A leader that leaves pending events over two polls is suspected to be stuck.
        Correctness does not depend on that: the cursor row decides who leads, and a
        new leader writes its first batch under the row's lock.
        """
        standing = await self._store.leader_status(self._me)
        now = asyncio.get_running_loop().time()
        if standing.free:
            self._suspected_leader = None
            return True
        await self.stall.record_leader(standing)
        if not standing.behind:
            self._suspected_leader = None
        elif self._suspected_leader is None or self._suspected_leader[0] != standing:
            self._suspected_leader = (standing, now)
        elif now - self._suspected_leader[1] >= self._patience_s(now):
            self._suspected_leader = None
            self._replaced_leader = standing.leader or 0
            return True
        return False

    def _patience_s(self, now: float) -> float:
        """How long a leader may leave events pending, in seconds.

        Half a polling interval, the interval of standby polls; longer without notifications,
        since the leader polls as well.  Exponential backoff after each take-over: replicas
        with slow batches must not take over from each other again and again.
        """
        if now - self._took_over_at > TAKEOVER_RESET_S:
            self._take_overs = 0
        patience_s = self._settings.poll_s * (0.5 if self._notified else 1.5)
        return min(patience_s * 2.0**self._take_overs, TAKEOVER_RESET_S / 2)

    async def _stand_by(self) -> None:
        """Wait until the next poll of the leader.

        Producers' notifications are ignored: with a fast leader, standby replicas would poll
        for each of them.
        """
        self._asleep_until = 0.0
        await asyncio.sleep(STAND_BY_MIN_S)
        if not self._stopping:
            await self._wakeups.standby.wait(max(self._settings.poll_s / 2 - STAND_BY_MIN_S, 0.0))

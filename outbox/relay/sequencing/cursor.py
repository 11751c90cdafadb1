"""The cursor of one replica: reads committed events and writes them as a batch.

The replica that is named in the cursor row *leads*.  It uses optimistic concurrency: it reads
without a lock, computes the batch, and writes it in one message that locks the cursor row and
does nothing unless leader and routing version are unchanged.  All inputs of a batch change only
together with one of the two, or by a failover that loses commits or a restore, which the message
checks as well (`server_fence`); `outbox.store.replays.replay_feed` has the exceptions for replays.
So this is equivalent to holding the row, and a replica that hangs between two messages holds
nothing that others wait for.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import asyncpg
import structlog

from outbox.core.sequencing.filter_budget import AGAIN_AFTER_S
from outbox.core.sequencing.gaps import CursorChange, CursorState, GapTracker
from outbox.core.sequencing.router import Deliveries, Router, assign_sequences
from outbox.errors import CursorBroken
from outbox.relay.sequencing.event_reader import EventReader
from outbox.relay.sequencing.feeder import Feeder
from outbox.relay.sequencing.filter_evaluator import FilterEvaluator
from outbox.relay.sequencing.replay_feeder import ReplayFeeder
from outbox.store.refused_rows import is_refused, reason_of
from outbox.store.replays.replay_progress import ReplayBatch
from outbox.store.sequencing.event_reads import CONTENT_EVENTS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from outbox.config import Settings
    from outbox.core.model.delivery import EventContent
    from outbox.core.sequencing.feeds import FedPart
    from outbox.core.sequencing.filter_budget import FilterFailure
    from outbox.core.sequencing.router import Placements, RoutableEvent, TenantFilter
    from outbox.store.sequencing.batches import SequencingStore
    from outbox.store.sequencing.event_reads import Reading

log = structlog.get_logger("outbox.sequencer")

BATCH_REFUSED = "the database refuses the rows of a batch"
RESTORE_WAIT_S = 60.0
"""How long the table `incarnation` may be empty until its row is taken for lost: a restore writes
it before some of the tables that new lanes need."""


class BatchResult(Enum):
    """The result of one attempt to sequence a batch."""

    WRITTEN = auto()
    EMPTY = auto()
    LOCKED = auto()
    """Another transaction holds the cursor row."""
    STALE = auto()
    """Nothing was written: another replica leads now, or the routing version changed."""


@dataclass(frozen=True, slots=True)
class SequencedBatch:
    """A committed batch and its deliveries."""

    batch: int
    events: int
    deliveries: Deliveries
    contents: Mapping[int, EventContent]
    """The content of events that was read with them, by id."""
    erasures: int
    """How often events were erased when it was read."""
    committed_after: datetime | None
    """Lower bound of the commit time of the events."""
    notified: bool
    """Whether the write notified the other replicas."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """A computed batch that is not written yet."""

    reading: Reading
    change: CursorChange
    events: int
    deliveries: Deliveries
    replays: ReplayBatch
    fed: Sequence[FedPart]
    failed: Mapping[TenantFilter, FilterFailure]
    awake: bool
    """Whether to set the flag to "awake", so that producers stop notifying."""

    @property
    def has_changes(self) -> bool:
        return (
            self.change.changed
            or self.replays.has_changes
            or any(part.deliveries or part.arrives for part in self.fed)
        )


class Cursor:
    """The cursor on one connection.

    Args:
        on_batch: called after each committed batch; returns whether some lanes wait for the content
            of its events.
        keep_polling: called with every batch's number of events and the number of
            producers that wait for another one's NOTIFY; returns whether producers should
            stop notifying.
        notification_payload: called with every batch; returns the NOTIFY payload for other
            replicas, or None.
    """

    tracker_type: type[GapTracker] = GapTracker

    def __init__(
        self,
        store: SequencingStore,
        replica_id: int,
        settings: Settings,
        on_batch: Callable[[SequencedBatch], bool],
        keep_polling: Callable[[int, int], bool],
        notification_payload: Callable[[int, Mapping[int, int]], str | None],
    ) -> None:
        self._store = store
        self._me = replica_id
        self._on_batch = on_batch
        self._keep_polling = keep_polling
        self._notification_payload = notification_payload
        self._notified = False
        # Cached from the tables; valid while no other replica has written.
        self._state: CursorState | None = None
        self._counters: dict[int, int] = {}
        self._router: Router | None = None
        self._version = 0
        self._filters = FilterEvaluator(store.filters)
        notified = settings.notify and not settings.pooled
        self._replays = ReplayFeeder(
            store.replay_feed,
            store.routing,
            self._filters.evaluate,
            0.0 if notified else settings.poll_s / 2,
        )
        self.feeder = Feeder(store.feeds, self._filters.evaluate)
        # When the row of the incarnation was first missing, by the loop's clock.
        self._absent_since: float | None = None
        self.leads = False
        """Whether this replica was the leader at its last poll."""
        self.reader = EventReader(store, settings, self.tracker_type())

    def forget(self) -> None:
        """Drop all cached state."""
        self._forget_position()
        self._router = None
        self._replays.forget()
        self.feeder.forget()
        self._filters.forget()
        self.leads = False

    def _forget_position(self) -> None:
        self.reader.forget()
        self._state = None
        self._counters.clear()

    @property
    def due_at(self) -> float | None:
        """When a batch may be due without an event, by the loop's clock; None: none is.

        It would have deliveries of a replay or a feed.
        """
        if not self.leads:
            return None
        replay_at = self._replays.poll_at
        if not self.feeder.runs or (feed_at := self.feeder.due_at) is None:
            return replay_at
        return feed_at if replay_at is None else min(replay_at, feed_at)

    async def sequence_batch(self, *, asleep_s: int | None = None) -> BatchResult:
        """Sequence one batch, if there are events; take the leadership if needed.

        Args:
            asleep_s: first set the flag to "may be asleep" for this time; has no effect
                if this replica does not lead any more.

        Raises:
            CursorBroken: the sequence's state is inconsistent; nothing was written.
            Fenced: the connection leads to another server than at registration.
        """
        try:
            watch = asleep_s is not None
            if not self.leads:
                if watch:
                    return BatchResult.STALE
                if not await self._take_leadership():
                    return BatchResult.LOCKED
            elif asleep_s is not None:
                if not await self._store.fall_asleep(self._me, asleep_s):
                    return await self._refused()
            elif self._router is not None:
                await self._replays.poll()
            if self._router is None and not await self._load_state():
                return BatchResult.STALE
            return await self._sequence(watch=watch)
        except BaseException:
            # Whether it was committed is unknown: start from the tables again.
            self.forget()
            raise

    async def release_leadership(self) -> None:
        """Let another replica lead at once, and stop producers from notifying."""
        if not await self._store.release_leadership(self._me):
            await self._store.cursor_row()  # Raises Fenced on another timeline.
        self.forget()

    # -------------------------------------------------------- leadership

    async def _take_leadership(self) -> bool:
        """Take the leadership; returns False while another session holds the cursor row."""
        if not await self._store.take_leadership(self._me):
            await self._store.cursor_row()  # Raises Fenced on another timeline.
            return False
        # Whatever was read before may have changed meanwhile.
        self.forget()
        self.leads = True
        return True

    async def _load_state(self) -> bool:
        """Load state and routes if they are not current; returns False if another leads."""
        row = await self._store.cursor_row()
        if row.leader == self._me and not row.is_current:
            # A failover or a restore may have lost batches of the old lanes.
            if row.incarnation is None:
                self._await_incarnation()
            if row.begins_history:
                log.warning(
                    "the server was promoted, or the database restored; starting new lanes",
                    old=row.history.timeline,
                    new=row.server.timeline,
                )
            await self._store.begin_timeline(self._me, row, f"replica {self._me}")
            self._forget_position()
            row = await self._store.cursor_row()
        if row.leader != self._me:
            self.leads = False
            self.feeder.forget()
            return False
        if not row.is_current:
            # Another change was made meanwhile, so no new lanes were begun: try again.
            return False
        if self._state is None or self._state.batch != row.batch:
            self._forget_position()
            self._state = await self._store.state()
            self._replays.forget()
        # If it changes while the routes are read, the batch is not written.
        self._version = row.version
        routes = await self._store.routing.routes(AGAIN_AFTER_S)
        # Lanes of older generations get no deliveries any more, and are removed.
        current = {lane_id for route in routes for lane_id in route.lane_ids}
        self._counters = {i: seq for i, seq in self._counters.items() if i in current}
        self._router = Router(routes)
        await self.feeder.load(AGAIN_AFTER_S)
        self._filters.load_filters(self._router.filters.union(self.feeder.filters))
        await self._replays.load_jobs()
        if self.reader.complete_at is None:
            # The age of older events is unknown; the lag counts from now on.
            self.reader.complete_at = asyncio.get_running_loop().time()
        return True

    def _await_incarnation(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._absent_since is None:
            self._absent_since = now
        if (left_s := self._absent_since + RESTORE_WAIT_S - now) > 0:
            raise CursorBroken(
                "the table incarnation is empty, as in the middle of a restore; unless its row "
                f"comes back, new lanes begin in {left_s:.0f} s"
            )

    def _lose_routes(self) -> BatchResult:
        """Load the state before the next batch: nothing was written."""
        self._router = None
        if not self.leads:
            # Otherwise their reader would go on.
            self.feeder.forget()
        return BatchResult.STALE

    async def _refused(self) -> BatchResult:
        """Why a message of the leader did nothing."""
        row, batch = await self._store.cursor_row(), self._state and self._state.batch
        if (row.leader, row.version, row.batch) == (self._me, self._version, batch):
            return BatchResult.LOCKED
        self.leads = row.leader == self._me
        return self._lose_routes()

    # ------------------------------------------------------------ one batch

    async def _sequence(self, *, watch: bool) -> BatchResult:
        """Plan a batch by reading, and write it in one message."""
        state, router, replays = self._state, self._router, ReplayBatch()
        fed: Sequence[FedPart] = ()
        assert state is not None
        assert router is not None
        if self._replays.ready and not watch:
            # Before live events are read, so that events committed meanwhile are included.
            planned = await self._replays.next_batch(router, self._me, self._version)
            if planned is None:
                return self._lose_routes()
            replays = planned
        if self.feeder.runs and not watch:
            fed = await self.feeder.next_batch(state)
        draft = await self._draft(state, router, replays, fed, watch=watch)
        if draft is None:
            self._reject(replays)
            return self._lose_routes()
        if not draft.has_changes:
            self.reader.committed(draft.reading, draft.change)
            self._replays.committed(replays)
            if fed:
                self.feeder.rejected()
            return BatchResult.EMPTY
        try:
            written = await self._write(state, draft)
        except asyncpg.PostgresError as error:
            if not (replays.has_changes or fed) and is_refused(error):
                # Deliveries of earlier batches go on.
                raise CursorBroken(f"{BATCH_REFUSED}: {reason_of(error)}") from error
            # Live events do not wait for replays or feeds that are refused.
            if replays.has_changes or not is_refused(error):
                self._replays.refused(replays, error)
            if fed:
                self.feeder.refused(reason_of(error))
            return self._lose_routes()
        if not written:
            self._reject(replays)
            return await self._refused()
        self._batch_committed(state, draft)
        if draft.replays.ends or any(part.arrives for part in fed):
            # A feed may wait for the end of a job; those that arrive subscribe from this batch on,
            # which has raised the version.
            self._router = None
        return BatchResult.WRITTEN

    def _reject(self, replays: ReplayBatch) -> None:
        self._replays.rejected(replays)
        self.feeder.rejected()

    async def _draft(
        self,
        state: CursorState,
        router: Router,
        replays: ReplayBatch,
        fed: Sequence[FedPart],
        *,
        watch: bool,
    ) -> _Draft | None:
        """Read events and compute a batch; None: leadership or routing version changed."""
        reading = await self.reader.read(state, self._is_current, watch=watch)
        if reading is None:
            return None
        events, change = self.reader.close(reading, router)
        if fed and not self.feeder.may_go_with(len(events)):
            self.feeder.rejected()
            fed = ()
        placements, failed = await self._route(events, router)
        if fed:
            placements += await self.feeder.own_placements(fed, events)
        return _Draft(
            reading,
            change,
            len(events),
            deliveries=await self._number(placements, replays, fed),
            replays=replays,
            fed=fed,
            failed={**failed, **replays.failed, **self.feeder.failed},
            awake=bool(events) and self._keep_polling(len(events), reading.waiting),
        )

    def _is_current(self, reading: Reading) -> bool:
        """Whether this replica still led, by the routes that it knows, when that was read."""
        self.leads = reading.leader == self._me
        return self.leads and reading.version == self._version

    async def _route(
        self, events: Sequence[RoutableEvent], router: Router
    ) -> tuple[Placements, Mapping[TenantFilter, FilterFailure]]:
        """Place events in the lanes of their endpoints; returns the filters to be stopped, too."""
        if not router.filters:
            return router.placements(events), {}
        refused, failed = await self._filters.evaluate(router, events)
        return router.placements(events, refused), failed

    async def _number(
        self, placements: Placements, replays: ReplayBatch, fed: Sequence[FedPart]
    ) -> Deliveries:
        """Number in each lane what was fed, then what was placed, then the replays."""
        feeds = [(part.feed.id, part.deliveries) for part in fed]
        lanes = {lane_id for some in (placements, *(s for _, s in feeds)) for lane_id, _ in some}
        lanes.update(r.lane_id for r in replays.replays)
        if unknown := lanes - self._counters.keys():
            self._counters |= await self._store.counters(unknown)
        return assign_sequences(placements, replays.replays, self._counters, feeds)

    async def _write(self, state: CursorState, draft: _Draft) -> bool:
        """Write the batch in one message; returns False if that did nothing."""
        payload = self._notification_payload(state.batch + 1, draft.deliveries.counters)
        self._notified = payload is not None
        return await self._store.write(
            state.batch + 1,
            draft.change,
            draft.events,
            draft.deliveries,
            self._me,
            self._version,
            committed_after=self.reader.committed_after,
            awake=draft.awake and not self.reader.awake,
            erasures=draft.reading.erasures if draft.reading.contents else None,
            notification=payload,
            replays=draft.replays,
            fed=draft.fed,
            stopped=draft.failed,
        )

    def _batch_committed(self, state: CursorState, draft: _Draft) -> None:
        """Apply a durable batch to the cached state, and report it."""
        reader, reading, deliveries = self.reader, draft.reading, draft.deliveries
        sequenced = SequencedBatch(
            state.batch + 1, draft.events, deliveries, reading.contents, reading.erasures,
            reader.committed_after, self._notified,
        )  # fmt: skip
        reader.committed(reading, draft.change)
        if draft.failed:
            self._filters.mark_stored(draft.failed)
        self._replays.committed(draft.replays)
        if self.feeder.runs:
            self.feeder.committed(draft.fed, draft.events, draft.failed)
        if draft.events:
            self._replays.record_live_events()
        # The tracker remembers the gaps.
        self._state = CursorState(sequenced.batch, draft.change.high)
        self._counters |= deliveries.counters
        reader.awake |= draft.awake
        needed = self._on_batch(sequenced)
        if deliveries or not reader.reads_content:
            reader.reads_content = needed and len(deliveries) <= CONTENT_EVENTS_MAX

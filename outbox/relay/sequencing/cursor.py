"""The cursor of one replica: reads committed events and writes them as a batch.

Who wrote last is named on the cursor row, and is said to *lead*.  The leader
holds no lock while it reads and thinks: it reads in one statement, and writes
in another that takes the cursor row and does nothing unless its name and the
version of who gets what still stand there.  Everything that a batch was worked
out from can only be changed by somebody who changes one of the two, or by a
fail-over that takes back commits, which the statement looks for, too.  So this
is as good as holding the row all the while, in two trips instead of seven.

Whatever needs more than that one statement is done in a transaction that holds
the row: taking the lead, falling asleep, replays, old gaps, a filter that fails,
and new lanes after the server's timeline changed (see `outbox.store.timeline`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import structlog

from outbox.core.sequencing.batch_notifications import LATER
from outbox.core.sequencing.filter_budget import AGAIN_AFTER_S
from outbox.core.sequencing.gaps import CursorState, GapTracker, Holders, Step
from outbox.core.sequencing.router import Deliveries, Router, number
from outbox.errors import CursorBroken
from outbox.relay.sequencing.filter_evaluator import Filtering
from outbox.relay.sequencing.replay_feeder import Replaying, Taken
from outbox.store.event_reads import AWAKE
from outbox.store.records import Fenced

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from datetime import datetime

    from outbox.config import Settings
    from outbox.core.delivery.message import Delivery
    from outbox.core.sequencing.router import Asked
    from outbox.store.cursor import CursorStore, Lock
    from outbox.store.filters import Stopped
    from outbox.store.lanes import LoadedLane

log = structlog.get_logger("outbox.sequencer")

GIVEN_MAX = 64
"""Deliveries of one batch whose events come back with it; more are left to be read,
in helpings that mind their size."""


class Turn(Enum):
    """What became of one attempt to sequence."""

    MOVED = auto()
    IDLE = auto()
    TAKEN = auto()
    """Somebody holds the cursor row."""
    OVERTAKEN = auto()
    """Nothing was written: somebody else leads now, or changes who gets what."""


@dataclass(frozen=True, slots=True)
class Sequenced:
    """One committed batch: which lanes got what."""

    batch: int
    events: int
    deliveries: Deliveries
    given: Mapping[int, Sequence[Delivery]]
    """By lane, what need not be read any more."""
    told: bool
    """Whether the other replicas were told."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """A batch that was worked out and is not written yet."""

    step: Step
    events: int
    deliveries: Deliveries
    taken: Taken
    failed: Mapping[Asked, Stopped]
    awake: bool
    """Whether producers need not notify any more."""
    began_at: tuple[datetime | None, float]
    """When its read began, by the database's clock and by the loop's."""
    cut: bool
    """There was more to read."""

    @property
    def moved(self) -> bool:
        return self.step.moved or bool(self.taken)

    @property
    def plain(self) -> bool:
        """One statement writes all of it."""
        return not (self.step.old_opened or self.step.old_closed or self.taken or self.failed)


def tells_always(_: int, __: Mapping[int, int]) -> str | None:
    """Other replicas hear of every batch, and read it."""
    return LATER


def wants_nothing(_: Collection[int]) -> Mapping[int, LoadedLane]:
    """Everything is left to be read."""
    return {}


class Cursor:
    """The cursor on one connection.

    Args:
        on_batch: called after each committed batch.
        stays_awake: asked with every batch whether producers should stop to
            notify; it hears the batch's number of events, and how many producers
            wait for each other.
        wants: those of some lanes that have nothing left to read but what they are
            given now.
        tells: asked with every batch what it tells the other replicas; None: nothing.
    """

    tracker_type: type[GapTracker] = GapTracker

    def __init__(
        self,
        store: CursorStore,
        replica_id: int,
        settings: Settings,
        on_batch: Callable[[Sequenced], None],
        stays_awake: Callable[[int, int], bool],
        wants: Callable[[Collection[int]], Mapping[int, LoadedLane]] = wants_nothing,
        tells: Callable[[int, Mapping[int, int]], str | None] = tells_always,
    ) -> None:
        self._store = store
        self._me = replica_id
        self._settings = settings
        self._on_batch = on_batch
        self._stays_awake = stays_awake
        self._wants = wants
        self._tells = tells
        self._told = False
        self._tracker = self.tracker_type()
        # All of this is a copy of the tables, good while nobody else wrote.
        self._state: CursorState | None = None
        self._counters: dict[int, int] = {}
        self._router: Router | None = None
        self._version = 0
        self._filtering = Filtering(store)
        self._replaying = Replaying(store.replaying, store.routing, self._filtering.ask)
        # Who held the sequence's lock when the last read was done; None: not known.
        self._holders: Holders | None = None
        # When the last read began that saw all that was committed, by the database's clock.
        self._complete_at: datetime | None = None
        self.leads = False
        """Whether this replica was the leader when it last looked."""
        self.awake = True
        """What the flag says to the producers, when this replica last looked."""
        self.watched: Holders = frozenset()
        """Who was in flight when the flag was last set to "asleep"."""
        self.more = False
        """Whether the last turn left something to sequence."""
        self.complete_at: float | None = None
        """When a turn last began to read all that was committed, by the loop's clock."""

    def forget(self) -> None:
        """Drop everything that is only a copy of the tables."""
        self._tracker.forget()
        self._state = None
        self._counters.clear()
        self._holders = None
        self._complete_at = self.complete_at = None
        self._version = 0
        self._router = None
        self._replaying.forget()
        self._filtering.forget()
        self.leads = False

    @property
    def replay_at(self) -> float | None:
        """When a turn may find something to send again, by the loop's clock; None: never."""
        return self._replaying.look_at if self.leads else None

    async def turn(self, *, asleep_s: int | None = None) -> Turn:
        """Sequence one batch if there is something; takes the lead if it has to.

        Args:
            asleep_s: first say "may be asleep" for so many seconds; not done
                by who does not lead any more.

        Raises:
            CursorBroken: the sequence cannot be trusted; nothing was written.
            Fenced: this is another server than the one that this replica knows.
        """
        try:
            if self.leads and asleep_s is None:
                await self._replaying.look()
                turn = None if self._replaying.ready else await self._quickly()
                if turn is not None:
                    return turn
            return await self._holding(asleep_s)
        except BaseException:
            # Whether it was committed is not known: only the tables tell.
            self.forget()
            raise

    async def leave(self) -> None:
        """Let another replica lead at once, and spare the producers notifications to nobody."""
        async with self._store.transaction():
            lock = await self._store.lock()
            if lock is not None and lock.writer == self._me:
                await self._store.set_wakeup(AWAKE)
                await self._store.sign(None)
        self.forget()

    # ------------------------------------------------------------ two ways

    async def _quickly(self) -> Turn | None:
        """A turn of the leader, without the lock; None: this takes the lock."""
        state, router = self._state, self._router
        assert state is not None
        assert router is not None
        draft = await self._draft(state, router, Taken(), watch=False)
        if draft is None:
            self.leads = False
            return Turn.OVERTAKEN
        if not draft.moved:
            self._taken_in(draft)
            return Turn.IDLE
        if not draft.plain:
            return None
        given = await self._write(state, draft)
        if given is None:
            self.leads = False
            return Turn.OVERTAKEN
        self._done(state, draft, given)
        return Turn.MOVED

    async def _holding(self, asleep_s: int | None) -> Turn:
        """A turn that holds the cursor row all the while."""
        transaction = self._store.transaction()
        await transaction.start()
        try:
            lock = await self._store.lock()
            if lock is None:
                await transaction.rollback()
                return Turn.TAKEN
            takes_over = lock.writer != self._me
            if takes_over:
                if asleep_s is not None:
                    self.forget()
                    await transaction.rollback()
                    return Turn.OVERTAKEN
                await self._store.sign(self._me)
            elif asleep_s is not None:
                await self._store.set_asleep(asleep_s)
            if lock.server_timeline not in (None, lock.timeline):
                takes_over = True
                lock = await self._begin_timeline(lock)
            state, router = await self._recall(lock, takes_over=takes_over)
            if self.complete_at is None:
                # What lies there from before is not known; from now on it would be late.
                self.complete_at = asyncio.get_running_loop().time()
            taken = Taken()
            if asleep_s is None and self._replaying.ready:
                # Before the live events are read: those that come meanwhile are in this batch.
                actor = f"replica {self._me}"
                taken = await self._replaying.take(router, state.batch + 1, actor)
            draft = await self._draft(state, router, taken, watch=asleep_s is not None)
            assert draft is not None, "the row is held"
            given: dict[int, list[Delivery]] | None = None
            if draft.moved:
                given = await self._write(state, draft)
                assert given is not None, "the row is held"
                await self._write_rest(state, draft)
            if draft.moved or takes_over:
                await transaction.commit()
            else:
                # Unlike a commit, a rollback does not wait for the disk.
                await transaction.rollback()
        except (CursorBroken, Fenced):
            await transaction.rollback()
            raise
        self.leads = True
        if given is None:
            self._taken_in(draft)
            return Turn.IDLE
        self._done(state, draft, given)
        return Turn.MOVED

    async def _begin_timeline(self, lock: Lock) -> Lock:
        """What others sequenced may be lost: nothing is added to their lanes."""
        was, now = lock.timeline, lock.server_timeline
        if was is not None:
            log.warning("the server's timeline changed; new lanes begin", old=was, new=now)
        return await self._store.begin_timeline(lock, f"replica {self._me}")

    async def _recall(self, lock: Lock, *, takes_over: bool) -> tuple[CursorState, Router]:
        """State and routes, from the tables if need be."""
        if takes_over or (self._state is not None and self._state.batch != lock.batch):
            self._tracker.forget()
            self._holders = self._complete_at = self.complete_at = None
            self._state = None
        if self._state is None:
            self._counters.clear()
            self._state = await self._store.state()
            self._replaying.forget()
            self._router = None
        if self._router is None or lock.version != self._version:
            self._version = lock.version
            self._router = Router(await self._store.routing.routes(AGAIN_AFTER_S))
            self._filtering.recall(self._router)
            await self._replaying.recall()
        return self._state, self._router

    # ------------------------------------------------------------ one batch

    async def _draft(
        self, state: CursorState, router: Router, taken: Taken, *, watch: bool
    ) -> _Draft | None:
        """Read, and decide; None: this replica is not the leader, or knows not who gets what."""
        clock = asyncio.get_running_loop().time
        store, tracker = self._store, self._tracker
        before: Holders = frozenset()
        if watch:
            before = self.watched = await store.holders()
        elif state.young or state.old:
            # Whom the last read saw will do: a gap is given up one turn later.
            before = await store.holders() if self._holders is None else self._holders
        tracker.begin(state, before, clock())
        while True:
            began_at = clock()
            limit = self._settings.batch_events_max
            reading = await store.read(
                state.high, tracker.ranges(), limit, more_gaps=tracker.left_out
            )
            if (reading.leader, reading.version) != (self._me, self._version):
                return None
            reading.check(state.high)
            self._holders = reading.holders
            if not tracker.left_out or tracker.complete(await store.running()):
                break
        events = reading.events
        fits = router.cut(events, self._settings.batch_deliveries_max)
        cut = len(events) == limit or fits < len(events)
        events = events[:fits]
        after = reading.holders or frozenset()
        step = tracker.close([e.id for e in events], cut, after, clock())
        self.awake = reading.wakeup == AWAKE
        self.more = cut
        refused, failed = await self._filtering.ask(router, events)
        lanes = router.lanes_of(events, refused) | {r.lane_id for r in taken.replays}
        unknown = lanes - self._counters.keys()
        if unknown:
            self._counters |= await store.counters(unknown)
        deliveries = number(router, events, taken.replays, self._counters, refused)
        awake = bool(events) and self._stays_awake(len(events), reading.waiting)
        failed = {**failed, **taken.failed}
        at = (reading.began_at, began_at)
        return _Draft(step, len(events), deliveries, taken, failed, awake, at, cut)

    async def _write(self, state: CursorState, draft: _Draft) -> dict[int, list[Delivery]] | None:
        """The statement that writes the batch; None if it did nothing."""
        tell = self._tells(state.batch + 1, draft.deliveries.counters)
        self._told = tell is not None
        few = len(draft.deliveries) <= GIVEN_MAX
        # Not those whose events may be kept with a dead letter.
        lanes = draft.deliveries.counters.keys() - {r.lane_id for r in draft.taken.replays}
        return await self._store.write(
            state.batch + 1,
            draft.step,
            draft.events,
            draft.deliveries,
            self._me,
            self._version,
            committed_after=self._complete_at,
            awake=draft.awake and not self.awake,
            wanted=self._wants(lanes) if few else {},
            tell=tell,
        )

    async def _write_rest(self, state: CursorState, draft: _Draft) -> None:
        """What does not fit into that statement; in its transaction."""
        if draft.step.old_opened or draft.step.old_closed:
            await self._store.write_old_gaps(draft.step)
        if draft.taken.unblocked:
            await self._replaying.tell_owners()
        if draft.failed:
            actor = f"replica {self._me}"
            await self._store.filters.stop(draft.failed, state.batch + 1, actor, AGAIN_AFTER_S)
            for (_, text), stopped in draft.failed.items():
                log.error("a filter counts as met from now on", filter=text, reason=stopped.why)

    def _taken_in(self, draft: _Draft) -> None:
        """What was read is sequenced, or there was nothing."""
        self._tracker.committed(draft.step)
        if not draft.cut:
            self._complete_at, self.complete_at = draft.began_at

    def _done(
        self, state: CursorState, draft: _Draft, given: Mapping[int, Sequence[Delivery]]
    ) -> None:
        """The batch is durable: what it knows may be remembered and told."""
        step = draft.step
        self._taken_in(draft)
        self._filtering.told(draft.failed)
        self._replaying.took(draft.taken)
        if draft.events:
            self._replaying.live()
        old = state.old
        if step.old_opened or step.old_closed:
            old = tuple({*old, *step.old_opened} - {*step.old_closed})
        batch = state.batch + 1
        self._state = CursorState(batch, step.high, step.young, old)
        self._counters |= draft.deliveries.counters
        self.awake = self.awake or draft.awake
        self._on_batch(Sequenced(batch, draft.events, draft.deliveries, given, self._told))

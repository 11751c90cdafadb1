"""The sequencer: turns committed events into numbered deliveries, batch by batch.

One batch is one transaction that holds the cursor row.  When batches find
nothing, the sequencer goes to sleep by the wake-up protocol, whose steps must
stay in this order: set the flag, look at the producers in flight, read once
more, wait.  A producer that begins after the flag is set notifies; one that
was in flight is in the look, and is watched until it ends.  Behind it all the
sleeper looks each `poll_s`.

The flag stays set over the batches of a trickle: being woken is quicker than
looking, and so few notifications cost the producers nothing.  Only when events
come thick and fast does it say "awake", and nobody notifies.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import structlog

from outbox.core.gaps import CursorState, GapTracker, Holders, Step
from outbox.core.sequencing import Deliveries, Router, number
from outbox.errors import CursorBroken
from outbox.store.cursor import AWAKE, CursorStore, Lock, Look

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.config import Settings
    from outbox.core.sequencing import Refused, Sighting
    from outbox.relay.bell import Bell

log = structlog.get_logger("outbox.sequencer")

BUSY_S = 0.05
"""Busy is who sequenced `busy_events` in the last so many seconds: it does not sleep."""
LINGER_STEP_S = 0.001
"""Between two looks of a busy sequencer that finds nothing."""
CROWDED_EVENTS, REST_MAX_S = 10, 0.02
"""After a batch of so many events it rests for as long as that took, but no longer
than this.  What a batch costs hardly depends on its events, so fewer and larger
ones leave a crowd of producers their part of the machine."""
ASLEEP_S = 60
"""How far ahead the flag says "may be asleep"; renewed at half of it."""
WATCH_MIN_S, WATCH_MAX_S = 0.002, 0.05
BROKEN_RETRY_S = 5.0
REPLAYS_MAX = 500


class Turn(Enum):
    """What became of one attempt to sequence."""

    MOVED = auto()
    IDLE = auto()
    NOT_MINE = auto()


@dataclass(frozen=True, slots=True)
class Sequenced:
    """One committed batch: which lanes got what."""

    batch: int
    events: int
    deliveries: Deliveries


@dataclass(frozen=True, slots=True)
class _Written:
    """What a transaction will have done once it is committed."""

    state: CursorState
    step: Step
    sequenced: Sequenced | None


class Sequencer:
    """Sequences on one connection.

    Args:
        on_batch: called after each committed batch.
        bell: rung by notifications.
        notified: whether notifications can arrive at all; without them the
            sequencer polls and the producers are never asked to notify.
    """

    tracker_type: type[GapTracker] = GapTracker
    busy_events = 8

    def __init__(
        self,
        store: CursorStore,
        replica_id: int,
        settings: Settings,
        bell: Bell,
        on_batch: Callable[[Sequenced], None],
        *,
        notified: bool,
    ) -> None:
        self._store = store
        self._me = replica_id
        self._settings = settings
        self._bell = bell
        self._on_batch = on_batch
        self._notified = notified
        self._tracker = self.tracker_type()
        # All of this is a copy of the tables, good while nobody else wrote.
        self._state: CursorState | None = None
        self._counters: dict[int, int] = {}
        self._router: Router | None = None
        self._version = 0
        self._asleep_until = 0.0
        self._watched: Holders = frozenset()
        self._replays_left = False
        # Filters that failed, and are not asked again until something changes.
        self._unfit: set[str] = set()
        # When the newest events were sequenced.
        self._sequenced_at: deque[float] = deque(maxlen=self.busy_events)
        # How many events the last batch had, and whether it left some to read.
        self._events = 0
        self._cut = False
        self._stopping = False

    # ------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Sequence until stopped; asyncpg's errors end it."""
        clock = asyncio.get_running_loop().time
        checked = False
        due = True
        while not self._stopping:
            try:
                if not checked:
                    await self._store.check()
                    checked = True
                began_at = clock()
                if due or await self._something_new():
                    turn = await self.turn()
                else:
                    turn = Turn.IDLE
                restless = not self._notified or self._asleep_until or self._busy()
                if turn is Turn.IDLE and not restless:
                    turn = await self._fall_asleep()
            except CursorBroken as broken:
                checked = False
                log.error("sequencing stopped", reason=str(broken), retry_s=BROKEN_RETRY_S)
                await self._pause(BROKEN_RETRY_S)
                continue
            due = True
            if turn is Turn.MOVED:
                if self._notified and not self._cut:
                    crowded = self._events >= CROWDED_EVENTS
                    rest_s = min(clock() - began_at, REST_MAX_S) if crowded else LINGER_STEP_S
                    due = await self._bell.wait(rest_s)
            elif turn is Turn.NOT_MINE or self._asleep_until:
                await self._sleep()
            elif self._notified:
                due = await self._bell.wait(LINGER_STEP_S)
            else:
                await self._bell.wait(self._settings.poll_s)

    def stop(self) -> None:
        """Let `run` return after the turn that is under way."""
        self._stopping = True
        self._bell.ring()

    async def _pause(self, seconds: float) -> None:
        """Wait, although producers go on ringing; only `stop` ends it sooner."""
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        while not self._stopping and (left_s := until - clock()) > 0:
            await self._bell.wait(left_s)

    def _busy(self) -> bool:
        """Whether events come so fast that being woken for each is no use."""
        newest = self._sequenced_at
        now = asyncio.get_running_loop().time()
        return len(newest) == newest.maxlen and now - newest[0] < BUSY_S

    async def _something_new(self) -> bool:
        """Whether a turn may find something.

        Only to be asked between turns that follow one another: saying no too
        often delays what is there until the next whole turn, which falling
        asleep is, and so are a ring and a sleeper's look.
        """
        state = self._state
        if state is None or state.young or state.old or self._replays_left:
            return True
        return await self._store.last_id() != state.high

    async def _fall_asleep(self) -> Turn:
        """Set the flag, look at who is in flight, read once more."""
        clock = asyncio.get_running_loop().time
        self._bell.clear()
        turn = await self.turn(fall_asleep=True)
        if turn is Turn.IDLE:
            self._asleep_until = clock() + ASLEEP_S
        return turn

    async def _sleep(self) -> None:
        """Wait for a ring, the end of a watched producer, or the next look."""
        clock = asyncio.get_running_loop().time
        renew_at = self._asleep_until - ASLEEP_S / 2 if self._asleep_until else math.inf
        look_at = min(clock() + self._settings.poll_s, renew_at)
        step_s = WATCH_MIN_S
        while True:
            left_s = look_at - clock()
            if left_s <= 0 or await self._bell.wait(
                min(step_s, left_s) if self._watched else left_s
            ):
                break
            if not self._watched:
                break
            remaining = self._watched & await self._store.holders()
            if remaining != self._watched:
                # It stays asleep; who began since then notifies.
                self._watched = remaining
                break
            step_s = min(step_s * 2, WATCH_MAX_S)
        if clock() >= renew_at:
            self._asleep_until = 0.0  # The flag is about to run out: set it anew.

    # ------------------------------------------------------------ one batch

    async def turn(self, *, fall_asleep: bool = False) -> Turn:
        """Sequence one batch, if the cursor row is free and there is something.

        Raises:
            CursorBroken: the sequence cannot be trusted; nothing was written.
        """
        transaction = self._store.transaction()
        await transaction.start()
        try:
            lock = await self._store.lock()
            if lock is None:
                # Whoever was watched still is: they do not notify, and the one
                # that holds the cursor need not know of them.
                await transaction.rollback()
                return Turn.NOT_MINE
            if fall_asleep:
                await self._store.set_asleep(ASLEEP_S)
            written = await self._batch(await self._take_over(lock), lock, watch=fall_asleep)
            if written is None:
                # Unlike a commit, a rollback does not wait for the disk.
                await transaction.rollback()
                return Turn.IDLE
            await transaction.commit()
        except CursorBroken:
            self.forget()
            await transaction.rollback()
            raise
        except BaseException:
            # Whether it was committed is not known: only the tables tell.
            self.forget()
            raise
        self._done(written)
        return Turn.MOVED

    async def leave(self) -> None:
        """Spare the producers their notifications to nobody."""
        async with self._store.transaction():
            if await self._store.lock() is not None:
                await self._store.set_wakeup(AWAKE)

    async def _take_over(self, lock: Lock) -> CursorState:
        """The cursor's state; from the tables unless this replica wrote last."""
        if lock.version != self._version:
            self._router = None
            self._version = lock.version
        if self._state is None or lock.writer != self._me:
            self._tracker.forget()
            self._counters.clear()
            self._state = await self._store.state()
        return self._state

    async def _batch(self, state: CursorState, lock: Lock, *, watch: bool) -> _Written | None:
        """Read, decide, write; None when the tables need no change."""
        clock = asyncio.get_running_loop().time
        store, tracker = self._store, self._tracker
        changed = self._router is None
        if self._router is None:
            self._router = Router(await store.routing.routes())
            self._unfit.clear()
        before = await store.holders() if watch or state.young or state.old else frozenset()
        if watch:
            self._watched = before
        tracker.begin(state, before, clock())
        while True:
            limit = self._settings.batch_events_max
            events = await store.read(state.high, tracker.ranges(), limit)
            after = await store.look()
            self._plausible(state, events, after)
            if not tracker.left_out or tracker.complete(await store.running()):
                break
        fits = self._router.cut(events, self._settings.batch_deliveries_max)
        self._cut = cut = len(events) == limit or fits < len(events)
        events = events[:fits]
        step = tracker.close([e.id for e in events], cut, after.holders, clock())
        asked = changed or self._replays_left
        helpings = await store.routing.replays(REPLAYS_MAX) if asked else []
        replays = [replay for helping in helpings for replay in helping.replays]
        missing = sum(helping.missing for helping in helpings)
        self._replays_left = len(replays) + missing == REPLAYS_MAX
        self._events = len(events)
        self._sequenced_at.extend([clock()] * min(len(events), self.busy_events))
        wake_up = bool(events) and (self._busy() or not self._notified)
        if wake_up and after.wakeup != AWAKE:
            await store.set_wakeup(AWAKE)
        if wake_up or after.wakeup == AWAKE:
            self._asleep_until = 0.0
        if not step.moved and not helpings:
            if lock.writer != self._me and (state.young or state.old):
                # What was captured is only worth remembering under our name.
                await store.sign(self._me)
                return _Written(state, step, None)
            if lock.writer == self._me:
                tracker.committed(step)
            return None
        batch = state.batch + 1
        refused = await self._ask_filters(self._router, events, batch)
        lanes = self._router.lanes_of(events, refused) | {r.lane_id for r in replays}
        unknown = lanes - self._counters.keys()
        if unknown:
            self._counters |= await store.counters(unknown)
        deliveries = number(self._router, events, replays, self._counters, refused)
        await store.write(batch, step, len(events), deliveries, self._me)
        if helpings:
            await store.routing.advance(helpings)
        if missing:
            log.error("numbers to be sent again are not there; run outbox verify", numbers=missing)
        if lock.writer != self._me:
            await store.sign(self._me)
        old = state.old
        if step.old_opened or step.old_closed:
            old = tuple({*old, *step.old_opened} - {*step.old_closed})
        return _Written(
            CursorState(batch, step.high, step.young, old),
            step,
            Sequenced(batch, len(events), deliveries),
        )

    async def _ask_filters(self, router: Router, events: list[Sighting], batch: int) -> Refused:
        """By filter, the events that do not meet it; one that fails counts as met."""
        questions = router.questions(events)
        for unfit in self._unfit & questions.keys():
            del questions[unfit]
        if not questions:
            return {}
        refused, failed = await self._store.filters.refused(questions)
        if failed:
            self._unfit |= failed.keys()
            await self._store.filters.tell(failed, batch, f"replica {self._me}")
            for text, why in failed.items():
                log.error("a filter counts as met from now on", filter=text, reason=why)
        return refused

    def _done(self, written: _Written) -> None:
        """The batch is durable: what it knows may be remembered and told."""
        self._tracker.committed(written.step)
        self._state = written.state
        if written.sequenced is not None:
            self._counters |= written.sequenced.deliveries.counters
            self._on_batch(written.sequenced)

    @staticmethod
    def _plausible(state: CursorState, events: list[Sighting], after: Look) -> None:
        if after.last_id < state.high:
            raise CursorBroken(
                f"the sequence of outbox.id went back to {after.last_id}, below {state.high}, "
                "which was already read; set it to a higher value with setval"
            )
        if events and events[-1].id > after.last_id:
            raise CursorBroken(
                f"outbox holds id {events[-1].id}, above its sequence's last value "
                f"{after.last_id}: it was written with an explicit id (COPY?); remove the row "
                "or set the sequence to a higher value with setval"
            )

    def forget(self) -> None:
        """Drop everything that is only a copy of the tables."""
        self._tracker.forget()
        self._state = None
        self._counters.clear()
        self._version = 0
        self._router = None

"""The sequencer: when to look for committed events, and when to sleep.

One replica leads: it sequences, and the others stand by.  They look now and
then whether the leader moves, and take over when it does not, or is gone.

When turns find nothing, the leader goes to sleep by the wake-up protocol, whose
steps must stay in this order: set the flag, look at the producers in flight,
read once more, wait.  A producer that begins after the flag is set notifies;
one that was in flight is in the look, and is watched until it ends.  Behind it
all the sleeper looks each `poll_s`.

The flag stays set over the batches of a steady load: being woken is quicker than
looking, and notifications cost the producers nothing as long as they do not wait
for each other.  Only when they do, or when events come thick and fast, does the
flag say "awake", and nobody notifies.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import TYPE_CHECKING

import structlog

from outbox.core.delivery.operational_events import LAGGING_S, Lag, Next
from outbox.errors import CursorBroken
from outbox.relay.sequencing.cursor import Cursor, Turn, tells_always, wants_nothing
from outbox.relay.wake_event import Bell

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from outbox.config import Settings
    from outbox.relay.sequencing.cursor import Sequenced
    from outbox.store.cursor import CursorStore, Standing
    from outbox.store.lanes import LoadedLane

log = structlog.get_logger("outbox.sequencer")

THICK_S = 0.5
"""Events come thick when `thick_events` were sequenced in the last so many seconds."""
REST_S = 0.02
"""Between two batches of events that come thick.  What a batch costs hardly depends
on its events, and its commit holds up those of producers that write as fast as they
can: fewer and larger ones leave them their part of the machine."""
LINGER_S = 0.001
"""Between two looks of who is awake otherwise."""
WAITING_MAX, CROWD_S = 2, 1.0
"""When so many producers wait for another one's notification, nobody is asked to
notify for so long: they commit one at a time then, however slow the disk is."""
ASLEEP_S = 60
"""How far ahead the flag says "may be asleep"; renewed at half of it."""
WATCH_MIN_S, WATCH_MAX_S, WATCH_SHARE = 0.002, 0.2, 0.2
"""Between two looks at producers that were in flight: WATCH_SHARE of how long they have
been watched, within bounds.  Who takes seconds to commit can wait a little."""
TAKEN_S = 0.05
"""Who finds the cursor row taken looks again after so long: it does not sleep, because
the flag may say "awake", and what it was woken for may still have to be read."""
BROKEN_RETRY_S = 5.0
STAND_BY_MIN_S = 0.05
"""Who stands by looks no more often than this, however often it is rung for."""
CALM_S = 60.0
"""When no leader was taken for stuck for so long, earlier ones are forgotten."""


class Sequencer:
    """Sequences on one connection.

    Args:
        on_batch: called after each committed batch.
        bell: rung by notifications.
        notified: whether notifications can arrive at all; without them the
            sequencer polls and the producers are never asked to notify.
        wants, tells: see `Cursor`.
        on_lead: called with whether this replica needs to hear producers.
    """

    cursor_type: type[Cursor] = Cursor
    thick_events = 600

    def __init__(
        self,
        store: CursorStore,
        replica_id: int,
        settings: Settings,
        bell: Bell,
        on_batch: Callable[[Sequenced], None],
        *,
        notified: bool,
        wants: Callable[[Collection[int]], Mapping[int, LoadedLane]] = wants_nothing,
        tells: Callable[[int, Mapping[int, int]], str | None] = tells_always,
        on_lead: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._me = replica_id
        self._settings = settings
        self._bell = bell
        self._notified = notified
        self._on_lead = on_lead
        self.cursor = self.cursor_type(
            store, replica_id, settings, on_batch, self._stays_awake, wants, tells
        )
        self._asleep_until = 0.0
        # Rung when another replica may have left, or come.
        self._changes = Bell()
        # When the newest events were sequenced.
        self._sequenced_at: deque[float] = deque(maxlen=self.thick_events)
        # Until then, producers that notified would hold up each other.
        self._crowd_until = 0.0
        self._lag = Lag()
        # A leader that left something lying, and since when.
        self._suspect: tuple[Standing, float] | None = None
        # How often this replica took over from such a leader, and when it last did.
        self._take_overs = 0
        self._took_over_at = -math.inf
        self._stopping = False
        self.looked_at: float | None = None
        """When it last saw how the cursor is, by the loop's clock; None: never."""
        self.broken: str | None = None
        """Why the sequence cannot be trusted; None: it can."""

    # ------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Sequence until stopped; asyncpg's errors end it."""
        checked = False
        while not self._stopping:
            try:
                if not checked:
                    await self._store.check()
                    checked = True
                if not self.cursor.leads and not await self._may_lead():
                    self._on_lead(False)
                    self._looked()
                    await self._stand_by()
                    continue
                self._on_lead(True)
                turn = await self.turn()
                self._looked()
                if turn is Turn.IDLE and not (self._asleep_until or self._looks_by_itself()):
                    turn = await self._fall_asleep()
            except CursorBroken as broken:
                checked = False
                self.broken = str(broken)
                log.error("sequencing stopped", reason=str(broken), retry_s=BROKEN_RETRY_S)
                await self._pause(BROKEN_RETRY_S)
                continue
            if turn is Turn.OVERTAKEN:
                # Who was asleep is not: another one may have set the flag since then.
                self._asleep_until = 0.0
                continue
            if turn is Turn.MOVED and (self.cursor.more or not self._notified):
                continue
            if turn is Turn.TAKEN:
                # Whoever holds the row need not say when it lets go of it.
                await self._bell.wait(min(TAKEN_S, self._settings.poll_s))
            elif self._asleep_until:
                await self._sleep()
            elif not self._notified:
                now = asyncio.get_running_loop().time()
                await self._bell.wait(max(self._by(now + self._settings.poll_s) - now, 0.0))
            else:
                thick = turn is Turn.MOVED and self._thick()
                await self._bell.wait(REST_S if thick else LINGER_S)

    def stop(self) -> None:
        """Let `run` return after the turn that is under way."""
        self._stopping = True
        self._bell.ring()
        self._changes.ring()

    def look(self) -> None:
        """Another replica may have left: whoever stands by looks at who leads."""
        self._changes.ring()

    async def leave(self) -> None:
        """After `run`: another replica may lead at once."""
        await self.cursor.leave()

    def _looked(self) -> None:
        self.looked_at = asyncio.get_running_loop().time()
        self.broken = None

    @property
    def lag_s(self) -> float | None:
        """How long ago it had last read all that was committed; None: another one leads."""
        read_at = self.cursor.complete_at
        if read_at is None or not self.cursor.leads:
            return None
        return asyncio.get_running_loop().time() - read_at

    async def turn(self) -> Turn:
        """One turn, whoever led before it.

        Raises:
            CursorBroken: the sequence cannot be trusted; nothing was written.
        """
        turn = await self.cursor.turn()
        if self.cursor.awake:
            self._asleep_until = 0.0
        if not self.cursor.leads:
            self._lag.forget()
        elif turn is not Turn.TAKEN:
            await self._mind_lag()
        return turn

    async def _mind_lag(self) -> None:
        """Tell when events wait for too long although this replica sequences them."""
        now = asyncio.get_running_loop().time()
        match self._lag.turned(now, full=self.cursor.more):
            case Next.LOOK if await self._store.tell_lagging(self._me):
                self._lag.told()
                log.warning("sequencing lags behind", longer_than_s=LAGGING_S)
            case Next.END if await self._store.end_lagging(self._me):
                self._lag.ended()

    def _by(self, at: float) -> float:
        """When to look, at the latest then: sooner for what is to be sent again."""
        return min(at, at if self.cursor.replay_at is None else self.cursor.replay_at)

    async def _pause(self, seconds: float) -> None:
        """Wait, although producers go on ringing; only `stop` ends it sooner."""
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        while not self._stopping and (left_s := until - clock()) > 0:
            await self._bell.wait(left_s)

    # --------------------------------------------------------- busy or idle

    def _thick(self) -> bool:
        """Whether events come so fast that being woken for each is no use."""
        newest = self._sequenced_at
        now = asyncio.get_running_loop().time()
        return len(newest) == newest.maxlen and now - newest[0] < THICK_S

    def _crowded(self) -> bool:
        """Whether producers would hold up each other if they had to notify."""
        return asyncio.get_running_loop().time() < self._crowd_until

    def _looks_by_itself(self) -> bool:
        """Whether producers are not asked to notify."""
        return self._thick() or self._crowded() or not self._notified

    def _stays_awake(self, events: int, waiting: int) -> bool:
        """Whether producers should stop to notify.

        Args:
            events: so many were just found.
            waiting: so many producers wait for another one's notification.
        """
        now = asyncio.get_running_loop().time()
        self._sequenced_at.extend([now] * min(events, self.thick_events))
        if waiting >= WAITING_MAX:
            self._crowd_until = now + CROWD_S
        return self._looks_by_itself()

    async def _fall_asleep(self) -> Turn:
        """Set the flag, look at who is in flight, read once more."""
        clock = asyncio.get_running_loop().time
        self._bell.clear()
        if self._stopping:
            self._bell.ring()
        turn = await self.cursor.turn(asleep_s=ASLEEP_S)
        if turn is Turn.IDLE:
            self._asleep_until = clock() + ASLEEP_S
        return turn

    async def _sleep(self) -> None:
        """Wait for a ring, the end of a watched producer, or the next look."""
        clock = asyncio.get_running_loop().time
        renew_at = self._asleep_until - ASLEEP_S / 2
        look_at = self._by(min(clock() + self._settings.poll_s, renew_at))
        watched = self.cursor.watched
        while (left_s := look_at - clock()) > 0:
            watched_s = clock() - (self._asleep_until - ASLEEP_S)
            step_s = min(max(WATCH_SHARE * watched_s, WATCH_MIN_S), WATCH_MAX_S)
            if await self._bell.wait(min(step_s, left_s) if watched else left_s):
                break
            if not watched:
                break
            remaining = watched & await self._store.holders()
            if remaining != watched:
                # It stays asleep; who began since then notifies.
                self.cursor.watched = remaining
                break
        if clock() >= renew_at:
            self._asleep_until = 0.0  # The flag is about to run out: set it anew.

    # ------------------------------------------------------------ standing by

    async def _may_lead(self) -> bool:
        """Whether this replica may take the lead, or still has it.

        A leader that leaves events lying over two looks is taken for stuck.
        Nothing depends on that being right: who leads is decided by the row, and
        whoever takes over does one batch under its lock.
        """
        standing = await self._store.standing(self._me)
        now = asyncio.get_running_loop().time()
        if standing.free:
            self._suspect = None
            return True
        if not standing.behind:
            self._suspect = None
        elif self._suspect is None or self._suspect[0] != standing:
            self._suspect = (standing, now)
        elif now - self._suspect[1] >= self._patience_s(now):
            log.warning("the sequencing replica does not move", replica=standing.leader)
            self._suspect = None
            self._take_overs += 1
            self._took_over_at = now
            return True
        return False

    def _patience_s(self, now: float) -> float:
        """How long a leader may leave events lying.

        Half a tick, since the looks are so far apart; without notifications it may
        be about to look itself.  Twice as long after each take-over: replicas whose
        batches take long must not overthrow each other again and again.
        """
        if now - self._took_over_at > CALM_S:
            self._take_overs = 0
        patience_s = self._settings.poll_s * (0.5 if self._notified else 1.5)
        return min(patience_s * 2.0**self._take_overs, CALM_S / 2)

    async def _stand_by(self) -> None:
        """Wait until the next look at the leader.

        Producers may ring as they like: that is the leader's business, and whoever
        stands by would look again and again at one that is quick.
        """
        self._asleep_until = 0.0
        await asyncio.sleep(STAND_BY_MIN_S)
        if not self._stopping:
            await self._changes.wait(max(self._settings.poll_s / 2 - STAND_BY_MIN_S, 0.0))

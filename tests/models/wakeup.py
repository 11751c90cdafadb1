"""The wake-up protocol: whoever commits an event while the relay sleeps wakes it.

**The protocol**, in the terms of the code.  A producer's INSERT takes the lock of the
sequence behind `outbox.id`, allocates, and fires `ring_the_relay`, which looks at the
flag, the sequence `wakeup`: if it says "asleep", the commit notifies.  A commit makes
the row visible first, then lets go of the lock and sends the notification.  The leader
(whose name is on the cursor row) reads in one statement and writes in another, which
does nothing unless its name still stands there and the row is free
(`Cursor._quickly`).  When there is nothing to read it falls asleep
(`Sequencer._fall_asleep`, `Cursor.turn(asleep_s=…)`): it clears its bell, takes the
cursor row, sets the flag, looks at who holds the sequence's lock, reads once more, and
lets go of the row.  Then it waits: for the bell, or for one of those holders to end.

**What must hold.**  Every event that was committed is sequenced, once, although the
look of each second (`poll_s`) is never *certain* to come here: the protocol has to do
without it.  What is certain: a notification arrives while the connection for LISTEN
lasts, a lost one is opened again, a commit lets go of its locks, and whoever is in the
middle of something goes on.  A standby is certain to look only while nobody who lives
leads: taking over from the dead is what its looks are for, and no business of the flag.

**What is modelled.**  Producers (one insert or several, commit or rollback); replicas,
each step a statement of its own; the cursor row, held by one of them or by an operator,
who may be killed and then says nothing; batches that say "awake" (`stays_awake`); a
standby that takes a living leader for stuck at any moment; a lost connection for LISTEN;
a replica that is killed, or leaves, and a new one in its place; a crash of PostgreSQL,
which may lose the last `setval`.  The last ones are *mishaps*, and there are so many of
them in a run.

**What is left out.**  Gaps: a read finds every visible event that is not sequenced
(`tests/core/test_gaps.py` is about that).  The time at which the flag runs out: it is
renewed long before.  Producers that turned notifications off (`relay.notify`), which are
found by the look of each second alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.models.explorer import Wrong
from tests.models.wakeup_producer import produce
from tests.models.wakeup_world import (
    ASLEEP,
    AWAKE,
    COMMIT,
    DOWN,
    FALL,
    GOOD,
    KINDS,
    LEAVE,
    NEW,
    NOBODY,
    OPERATOR,
    PAUSE,
    READ,
    READ_FLAG,
    READ_HOLDING,
    RELEASED,
    SLEEP,
    STANDBY,
    VISIBLE,
    WRITE,
    Producer,
    Replica,
    Rules,
    World,
    crashed,
    drafted,
    ended,
    forget,
    in_order,
    mark,
    put,
    unheard,
    unwatch,
    watch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.models.explorer import Step


class WakeUp:
    """The model.

    Args:
        producers, replicas: how many there are.
        mishaps: how many may happen, of these kinds.
        calm: replicas do nothing but what is certain, which leaves fewer states.
    """

    def __init__(
        self,
        producers: int,
        replicas: int,
        mishaps: int,
        rules: Rules = GOOD,
        kinds: frozenset[str] = KINDS,
        *,
        calm: bool = False,
    ) -> None:
        self._producers = producers
        self._replicas = replicas
        self._mishaps = mishaps
        self._rules = rules
        self._kinds = kinds
        self._calm = calm

    def first(self) -> World:
        ear = len(self._rules.listens)
        leader = Replica(READ, ear=ear)
        others = (Replica(STANDBY, ear=ear),) * (self._replicas - 1)
        return World(
            (Producer(),) * self._producers, (leader, *others), writer=0, mishaps=self._mishaps
        )

    def wrong(self, world: World) -> str | None:
        return None

    def owed(self, world: World) -> str | None:
        for p in world.producers:
            if not p.sequenced and p.phase in (VISIBLE, RELEASED):
                return "a committed event is not sequenced"
        return None

    def steps(self, world: World) -> Iterator[Step[World]]:
        seen = None
        for n, producer in enumerate(world.producers):
            # They are in order, and equal ones do the same.
            if producer != seen:
                yield from produce(world, n, producer, self._rules)
                if producer.unheard:
                    yield from self._notify(world, n, producer)
            seen = producer
        for r, replica in enumerate(world.replicas):
            for step in self._relay(world, r, replica):
                if step[1] or not self._calm:
                    yield step
            yield from self._listen(world, r, replica)
        if world.lock == OPERATOR:
            free = world._replace(lock=NOBODY)
            yield "an operator is killed and lets go of the cursor row", True, free
        if world.mishaps:
            yield from self._mishap(world._replace(mishaps=world.mishaps - 1))

    # ------------------------------------------------------------- replicas

    def _relay(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        does = me.does
        if does == SLEEP:
            yield from self._sleep(world, r, me)
        elif does == STANDBY:
            # Also who was refused a batch, and leads all the same.
            if world.writer in (NOBODY, r):
                yield self._take_row(world, r, me)
        elif does == PAUSE:
            again = self._with(world, r, me._replace(does=READ, bell=False))
            yield f"replica {r} goes on", True, again
        elif does == READ:
            if world.writer != r:
                stands_by = self._overtaken(world, r, me)
                yield f"replica {r} reads, and finds another one leading", True, stands_by
            else:
                read = self._with(mark(world, r), r, me._replace(does=READ_FLAG))
                yield f"replica {r} reads", True, read
                # Replays, old gaps, failing filters.
                name, _, then = self._take_row(world, r, me)
                yield name, False, then
        elif does == READ_FLAG:
            me = self._heed(world, me)
            name = f"replica {r} reads the flag"
            if drafted(world, r):
                yield name, True, self._with(world, r, me._replace(does=WRITE))
            else:
                for text, certain, idle in self._idle(me):
                    yield name + text, certain, self._with(world, r, idle)
        elif does == WRITE:
            yield from self._write(world, r, me)
        elif does == READ_HOLDING:
            me = self._heed(world, me)._replace(does=COMMIT)
            yield f"replica {r} reads, holding the row", True, self._with(mark(world, r), r, me)
        elif does == COMMIT:
            led = world._replace(lock=NOBODY, writer=r)
            if drafted(world, r):
                yield from self._moved(led, r, me, "commits a batch")
            else:
                for text, certain, idle in self._idle(me):
                    yield f"replica {r} commits nothing{text}", certain, self._with(led, r, idle)
        elif does == LEAVE:
            if world.writer == r or self._rules.anybody_says_awake:
                world = world._replace(flag=AWAKE)
            yield f"replica {r} leaves", True, ended(world, r)
        elif does == DOWN:
            # Somebody always runs, but not everybody has to.
            alone = all(other.does == DOWN for other in world.replicas)
            yield f"replica {r} starts", alone, self._with(world, r, Replica())
        elif does >= FALL:
            yield from self._fall(world, r, me)

    def _take_row(self, world: World, r: int, me: Replica) -> Step[World]:
        if world.lock != NOBODY:
            return f"replica {r} finds the cursor row taken", True, self._taken(world, r, me)
        held = self._with(world._replace(lock=r), r, me._replace(does=READ_HOLDING))
        return f"replica {r} takes the cursor row", True, held

    def _idle(self, me: Replica) -> Iterator[tuple[str, bool, Replica]]:
        """What `Sequencer.run` does when a turn found nothing."""
        if me.asleep:
            yield "", True, me._replace(does=SLEEP)
            return
        yield ", and falls asleep", True, me._replace(does=FALL)
        yield ", and stays awake", False, me._replace(does=READ)

    def _heed(self, world: World, me: Replica) -> Replica:
        if world.flag == AWAKE and self._rules.heeds_flag:
            return me._replace(asleep=False)
        return me

    def _overtaken(self, world: World, r: int, me: Replica) -> World:
        return self._with(forget(world, r), r, Replica(STANDBY, ear=me.ear))

    def _taken(self, world: World, r: int, me: Replica) -> World:
        does = STANDBY if me.does == STANDBY else PAUSE
        if self._rules.taken_sleeps:
            does = SLEEP
        return self._with(world, r, me._replace(does=does))

    def _write(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        free = world.lock == NOBODY and world.writer == r
        if free or self._rules.unfenced:
            yield from self._moved(world, r, me, "writes a batch")
        # Also when who gets what was changed.
        refused, name = self._overtaken(world, r, me), f"replica {r} is refused its batch"
        if self._rules.late_batch_says_awake:
            refused = refused._replace(flag=AWAKE)
            name += ', which says "awake" all the same'
        yield name, not free, refused

    def _moved(self, world: World, r: int, me: Replica, name: str) -> Iterator[Step[World]]:
        """The batch is written; it may say that producers need not notify."""
        if any(p.read & 1 << r and p.sequenced for p in world.producers):
            yield f"replica {r} {name}", True, Wrong("an event is sequenced twice")
            return
        producers = (
            p._replace(sequenced=True, read=p.read & ~(1 << r)) if p.read & 1 << r else p
            for p in world.producers
        )
        world = world._replace(producers=in_order(producers))
        then = me._replace(does=SLEEP if me.asleep else READ)
        yield f"replica {r} {name}", True, self._with(world, r, then)
        asleep = me.asleep and not self._rules.heeds_flag
        then = me._replace(does=SLEEP if asleep else READ, asleep=asleep)
        yield (
            f'replica {r} {name} that says "awake"',
            False,
            self._with(world._replace(flag=AWAKE), r, then),
        )

    def _sleep(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        bit = 1 << r
        woken = me._replace(does=READ)
        if me.bell:
            after = world
            if self._rules.forgets_watched:
                after = unwatch(world, bit, NEW)
            yield f"replica {r} is woken", True, self._with(after, r, woken._replace(bell=False))
        if any(p.watched & bit and p.phase >= RELEASED for p in world.producers):
            until = NEW if self._rules.watches_one else RELEASED
            after = unwatch(world, bit, until)
            yield f"replica {r} sees the end of a holder", True, self._with(after, r, woken)
        # The look of each second, and the renewal of the flag.
        looks = world.writer == NOBODY
        yield f"replica {r} looks by itself", looks, self._with(world, r, woken)
        if me.asleep:
            renews = self._with(world, r, woken._replace(asleep=False))
            yield f"replica {r} renews its sleep", False, renews

    def _fall(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        if me.does == FALL + len(self._rules.fall):
            back = self._overtaken(world._replace(lock=NOBODY), r, me)
            yield f"replica {r} finds another one leading, and lets go", True, back
            return
        step = self._rules.fall[me.does - FALL]
        on = me._replace(does=me.does + 1)
        if step == "clear":
            yield (
                f"replica {r} clears its bell",
                True,
                self._with(world, r, on._replace(bell=False)),
            )
        elif step == "lock":
            if world.lock != NOBODY:
                yield f"replica {r} finds the cursor row taken", True, self._taken(world, r, me)
            else:
                if world.writer != r:
                    on = me._replace(does=FALL + len(self._rules.fall))
                held = self._with(world._replace(lock=r), r, on)
                yield f"replica {r} takes the cursor row to fall asleep", True, held
        elif step == "flag":
            yield f'replica {r} says "asleep"', True, self._with(world._replace(flag=ASLEEP), r, on)
        elif step == "holders":
            yield f"replica {r} looks at the holders", True, self._with(watch(world, 1 << r), r, on)
        elif step == "read":
            yield f"replica {r} reads once more", True, self._with(mark(world, r), r, on)
        elif step == "end":
            holds = world.lock == r
            let_go = world._replace(lock=NOBODY) if holds else world
            if drafted(world, r) and not holds:
                yield from self._write(world, r, me)
            elif drafted(world, r):
                yield from self._moved(let_go, r, me, "commits a batch")
            else:
                asleep = me._replace(does=SLEEP, asleep=True)
                yield f"replica {r} sleeps", True, self._with(let_go, r, asleep)

    # ------------------------------------------------------------- mishaps

    def _listen(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        if me.does == DOWN or me.ear == len(self._rules.listens):
            return
        step = self._rules.listens[me.ear]
        then = me._replace(ear=me.ear + 1, bell=me.bell or step == "ring")
        name = "listens" if step == "listen" else "rings its own bell"
        yield f"replica {r} {name}", True, self._with(world, r, then)

    def _notify(self, world: World, n: int, p: Producer) -> Iterator[Step[World]]:
        for r, replica in enumerate(world.replicas):
            if p.unheard & 1 << r:
                heard = put(world, n, p._replace(unheard=p.unheard & ~(1 << r)))
                rung = self._with(heard, r, replica._replace(bell=True))
                yield f"replica {r} hears of a commit", True, rung

    def _mishap(self, world: World) -> Iterator[Step[World]]:
        kinds, free = self._kinds, world.lock == NOBODY
        for r, me in enumerate(world.replicas):
            if me.does == DOWN:
                continue
            if me.ear and "deaf" in kinds:
                deaf = self._with(unheard(world, 1 << r), r, me._replace(ear=0))
                yield f"replica {r} loses its LISTEN", False, deaf
            if "killed" in kinds:
                yield f"replica {r} is killed", False, ended(world, r)
            if "leaves" in kinds and free and me.does in (STANDBY, READ, SLEEP):
                leaves = self._with(world._replace(lock=r), r, me._replace(does=LEAVE))
                yield f"replica {r} takes the cursor row to leave", False, leaves
            if "overthrown" in kinds and me.does == STANDBY and world.writer not in (NOBODY, r):
                name, _, then = self._take_row(world, r, me)
                yield name + ", because the leader seems stuck", False, then
        if "operator" in kinds and free:
            yield "an operator takes the cursor row", False, world._replace(lock=OPERATOR)
        if "crash" in kinds:
            lost, kept = crashed(world, 1 - world.flag), crashed(world, world.flag)
            yield "PostgreSQL crashes", False, kept
            yield "PostgreSQL crashes, and loses a setval", False, lost

    # ---------------------------------------------------------------- inside

    def _with(self, world: World, r: int, me: Replica) -> World:
        """The world with another state of replica r."""
        if me.bell and not me.asleep and me.does <= FALL and me.does != SLEEP:
            # Cleared or heard before it can end a sleep, whether it rings or not.
            me = me._replace(bell=self._rules.taken_sleeps)
        replicas = world.replicas
        return world._replace(replicas=(*replicas[:r], me, *replicas[r + 1 :]))

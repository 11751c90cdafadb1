"""The wake-up protocol: a commit of an event wakes a sleeping relay.

**The protocol**, in the terms of the code. A producer's INSERT locks the sequence behind
`outbox.id`, allocates an id, and fires `notify_relay`, which reads the flag, the sequence `wakeup`:
if it is "asleep", the commit notifies. A commit makes the row visible first, then releases the lock
and sends the notification. The leader (whose name is in the cursor row) reads in one statement and
writes in another, which does nothing unless its name is still there and the row is unlocked
(optimistic concurrency, `Cursor._sequence_optimistically`). When there is nothing to read, it falls
asleep (`Sequencer._fall_asleep`): it clears its wake event, locks the cursor row, sets the flag,
reads the holders of the sequence's lock, reads events once more, and releases the row. Then it
waits for the wake event, or for the end of one of those holders.

**What must hold.** Every committed event is sequenced, once, although the poll of each second
(`poll_s`) is never *certain* here: the protocol must be correct without it. Certain are: a
notification arrives while the LISTEN connection lasts, a lost connection is reopened, a commit
releases its locks, and a process continues a step sequence that it began. A standby is certain to
poll only while no live replica leads: takeovers are the purpose of its polls and independent of the
flag.

**What is modelled.** Producers (one insert or several, commit or rollback); replicas, each step one
statement; the cursor row, locked by a replica or by an operator, who may be killed without a
notification; batches that set "awake" (`keep_polling`); a standby that considers a live leader
stuck at any moment; a lost LISTEN connection; a replica that is killed or leaves, and its
replacement; a crash of PostgreSQL, which may lose the last `setval`. The last ones are *faults*
(`mishaps`), and their number in a run is bounded.

**What is omitted.** Gaps: a read finds every visible event that is not sequenced (see
`tests/core/test_gaps.py`). The expiry of the flag: it is renewed long before. Producers that
disabled notifications (`relay.notify`): only polls find their events.
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
    NO_REPLICA,
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
    clear_notifications,
    crashed,
    drafted,
    ended,
    forget,
    in_order,
    mark,
    put,
    unwatch,
    watch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.models.explorer import Step


class WakeUp:
    """The model.

    Args:
        producers, replicas: their numbers.
        mishaps: the number of faults of these kinds that may happen.
        calm: replicas take only certain steps, which leaves fewer states.
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
        listen_step = len(self._rules.listens)
        leader = Replica(READ, listen_step=listen_step)
        others = (Replica(STANDBY, listen_step=listen_step),) * (self._replicas - 1)
        return World(
            (Producer(),) * self._producers, (leader, *others), writer=0, mishaps=self._mishaps
        )

    def wrong(self, world: World) -> str | None:
        return None

    def pending(self, world: World) -> str | None:
        for p in world.producers:
            if not p.sequenced and p.phase in (VISIBLE, RELEASED):
                return "a committed event is not sequenced"
        return None

    def steps(self, world: World) -> Iterator[Step[World]]:
        seen = None
        for n, producer in enumerate(world.producers):
            # Producers are sorted, and equal ones have the same steps.
            if producer != seen:
                yield from produce(world, n, producer, self._rules)
                if producer.notifying:
                    yield from self._notify(world, n, producer)
            seen = producer
        for r, replica in enumerate(world.replicas):
            for step in self._relay(world, r, replica):
                if step[1] or not self._calm:
                    yield step
            yield from self._listen(world, r, replica)
        if world.lock == OPERATOR:
            free = world._replace(lock=NO_REPLICA)
            yield "an operator is killed and releases the cursor row", True, free
        if world.mishaps:
            yield from self._mishap(world._replace(mishaps=world.mishaps - 1))

    # ------------------------------------------------------------- replicas

    def _relay(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        does = me.does
        if does == SLEEP:
            yield from self._sleep(world, r, me)
        elif does == STANDBY:
            # This includes a leader whose batch was rejected.
            if world.writer in (NO_REPLICA, r):
                yield self._take_row(world, r, me)
        elif does == PAUSE:
            again = self._with(world, r, me._replace(does=READ, wake_event=False))
            yield f"replica {r} resumes", True, again
        elif does == READ:
            if world.writer != r:
                stands_by = self._overtaken(world, r, me)
                yield f"replica {r} reads and finds another leader", True, stands_by
            else:
                read = self._with(mark(world, r), r, me._replace(does=READ_FLAG))
                yield f"replica {r} reads", True, read
                # For replays, old gaps and failing filters.
                name, _, then = self._take_row(world, r, me)
                yield name, False, then
        elif does == READ_FLAG:
            me = self._read_flag(world, me)
            name = f"replica {r} reads the flag"
            if drafted(world, r):
                yield name, True, self._with(world, r, me._replace(does=WRITE))
            else:
                for text, certain, idle in self._idle(me):
                    yield name + text, certain, self._with(world, r, idle)
        elif does == WRITE:
            yield from self._write(world, r, me)
        elif does == READ_HOLDING:
            me = self._read_flag(world, me)._replace(does=COMMIT)
            yield (
                f"replica {r} reads while it locks the row",
                True,
                self._with(mark(world, r), r, me),
            )
        elif does == COMMIT:
            led = world._replace(lock=NO_REPLICA, writer=r)
            if drafted(world, r):
                yield from self._moved(led, r, me, "commits a batch")
            else:
                for text, certain, idle in self._idle(me):
                    yield f"replica {r} commits nothing{text}", certain, self._with(led, r, idle)
        elif does == LEAVE:
            if world.writer == r or self._rules.any_replica_sets_awake:
                world = world._replace(flag=AWAKE)
            yield f"replica {r} leaves", True, ended(world, r)
        elif does == DOWN:
            # One replica always runs, but not all have to.
            alone = all(other.does == DOWN for other in world.replicas)
            yield f"replica {r} starts", alone, self._with(world, r, Replica())
        elif does >= FALL:
            yield from self._fall(world, r, me)

    def _take_row(self, world: World, r: int, me: Replica) -> Step[World]:
        if world.lock != NO_REPLICA:
            return f"replica {r} finds the cursor row locked", True, self._taken(world, r, me)
        held = self._with(world._replace(lock=r), r, me._replace(does=READ_HOLDING))
        return f"replica {r} locks the cursor row", True, held

    def _idle(self, me: Replica) -> Iterator[tuple[str, bool, Replica]]:
        """The behaviour of `Sequencer.run` after a batch without events."""
        if me.asleep:
            yield "", True, me._replace(does=SLEEP)
            return
        yield ", and falls asleep", True, me._replace(does=FALL)
        yield ", and stays awake", False, me._replace(does=READ)

    def _read_flag(self, world: World, me: Replica) -> Replica:
        if world.flag == AWAKE and self._rules.respects_flag:
            return me._replace(asleep=False)
        return me

    def _overtaken(self, world: World, r: int, me: Replica) -> World:
        return self._with(forget(world, r), r, Replica(STANDBY, listen_step=me.listen_step))

    def _taken(self, world: World, r: int, me: Replica) -> World:
        does = STANDBY if me.does == STANDBY else PAUSE
        if self._rules.locked_row_sleeps:
            does = SLEEP
        return self._with(world, r, me._replace(does=does))

    def _write(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        free = world.lock == NO_REPLICA and world.writer == r
        if free or self._rules.unfenced:
            yield from self._moved(world, r, me, "writes a batch")
        # A change of subscriptions rejects it as well.
        refused, name = self._overtaken(world, r, me), f"replica {r} has its batch rejected"
        if self._rules.rejected_batch_sets_awake:
            refused = refused._replace(flag=AWAKE)
            name += ', which sets "awake" nevertheless'
        yield name, not free, refused

    def _moved(self, world: World, r: int, me: Replica, name: str) -> Iterator[Step[World]]:
        """Write the batch; it may set the flag, so that producers need not notify."""
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
        asleep = me.asleep and not self._rules.respects_flag
        then = me._replace(does=SLEEP if asleep else READ, asleep=asleep)
        yield (
            f'replica {r} {name} that sets "awake"',
            False,
            self._with(world._replace(flag=AWAKE), r, then),
        )

    def _sleep(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        bit = 1 << r
        woken = me._replace(does=READ)
        if me.wake_event:
            after = world
            if self._rules.forgets_watched:
                after = unwatch(world, bit, NEW)
            yield (
                f"replica {r} is woken",
                True,
                self._with(after, r, woken._replace(wake_event=False)),
            )
        if any(p.watched & bit and p.phase >= RELEASED for p in world.producers):
            until = NEW if self._rules.watches_one else RELEASED
            after = unwatch(world, bit, until)
            yield f"replica {r} sees the end of a holder", True, self._with(after, r, woken)
        # The poll of each second, and the renewal of the flag.
        poll = world.writer == NO_REPLICA
        yield f"replica {r} polls", poll, self._with(world, r, woken)
        if me.asleep:
            renews = self._with(world, r, woken._replace(asleep=False))
            yield f"replica {r} renews its sleep", False, renews

    def _fall(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        if me.does == FALL + len(self._rules.fall):
            back = self._overtaken(world._replace(lock=NO_REPLICA), r, me)
            yield f"replica {r} finds another leader and releases the row", True, back
            return
        step = self._rules.fall[me.does - FALL]
        on = me._replace(does=me.does + 1)
        if step == "clear":
            yield (
                f"replica {r} clears its wake event",
                True,
                self._with(world, r, on._replace(wake_event=False)),
            )
        elif step == "lock":
            if world.lock != NO_REPLICA:
                yield f"replica {r} finds the cursor row locked", True, self._taken(world, r, me)
            else:
                if world.writer != r:
                    on = me._replace(does=FALL + len(self._rules.fall))
                held = self._with(world._replace(lock=r), r, on)
                yield f"replica {r} locks the cursor row to fall asleep", True, held
        elif step == "flag":
            yield f'replica {r} sets "asleep"', True, self._with(world._replace(flag=ASLEEP), r, on)
        elif step == "holders":
            yield f"replica {r} reads the holders", True, self._with(watch(world, 1 << r), r, on)
        elif step == "read":
            yield f"replica {r} reads once more", True, self._with(mark(world, r), r, on)
        elif step == "end":
            holds = world.lock == r
            released = world._replace(lock=NO_REPLICA) if holds else world
            if drafted(world, r) and not holds:
                yield from self._write(world, r, me)
            elif drafted(world, r):
                yield from self._moved(released, r, me, "commits a batch")
            else:
                asleep = me._replace(does=SLEEP, asleep=True)
                yield f"replica {r} sleeps", True, self._with(released, r, asleep)

    # ------------------------------------------------------------- mishaps

    def _listen(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        if me.does == DOWN or me.listen_step == len(self._rules.listens):
            return
        step = self._rules.listens[me.listen_step]
        then = me._replace(
            listen_step=me.listen_step + 1, wake_event=me.wake_event or step == "ring"
        )
        name = "listens" if step == "listen" else "sets its own wake event"
        yield f"replica {r} {name}", True, self._with(world, r, then)

    def _notify(self, world: World, n: int, p: Producer) -> Iterator[Step[World]]:
        for r, replica in enumerate(world.replicas):
            if p.notifying & 1 << r:
                received = put(world, n, p._replace(notifying=p.notifying & ~(1 << r)))
                woken = self._with(received, r, replica._replace(wake_event=True))
                yield f"replica {r} receives a notification", True, woken

    def _mishap(self, world: World) -> Iterator[Step[World]]:
        kinds, free = self._kinds, world.lock == NO_REPLICA
        for r, me in enumerate(world.replicas):
            if me.does == DOWN:
                continue
            if me.listen_step and "deaf" in kinds:
                deaf = self._with(clear_notifications(world, 1 << r), r, me._replace(listen_step=0))
                yield f"replica {r} loses its LISTEN", False, deaf
            if "killed" in kinds:
                yield f"replica {r} is killed", False, ended(world, r)
            if "leaves" in kinds and free and me.does in (STANDBY, READ, SLEEP):
                leaves = self._with(world._replace(lock=r), r, me._replace(does=LEAVE))
                yield f"replica {r} locks the cursor row to leave", False, leaves
            if "overthrown" in kinds and me.does == STANDBY and world.writer not in (NO_REPLICA, r):
                name, _, then = self._take_row(world, r, me)
                yield name + ", because the leader seems stuck", False, then
        if "operator" in kinds and free:
            yield "an operator locks the cursor row", False, world._replace(lock=OPERATOR)
        if "crash" in kinds:
            lost, kept = crashed(world, 1 - world.flag), crashed(world, world.flag)
            yield "PostgreSQL crashes", False, kept
            yield "PostgreSQL crashes, and loses a setval", False, lost

    # ---------------------------------------------------------------- inside

    def _with(self, world: World, r: int, me: Replica) -> World:
        """The world with another state of replica r."""
        if me.wake_event and not me.asleep and me.does <= FALL and me.does != SLEEP:
            # The wake event is cleared or handled before it can end a sleep, so its value does not
            # matter.
            me = me._replace(wake_event=self._rules.locked_row_sleeps)
        replicas = world.replicas
        return world._replace(replicas=(*replicas[:r], me, *replicas[r + 1 :]))

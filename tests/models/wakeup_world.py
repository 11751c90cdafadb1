"""What the model of the wake-up protocol is made of: see `tests.models.wakeup`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

AWAKE, ASLEEP = 0, 1
UNSEEN = -1
NOBODY = -1
OPERATOR = -2

# How far a producer's transaction is.
NEW, LOOKED, HOLDS, WROTE, VISIBLE, RELEASED = range(6)

# What a replica does next.  While it falls asleep, FALL + n is the n-th step.
STANDBY, READ, READ_FLAG, WRITE, PAUSE, READ_HOLDING, COMMIT, SLEEP, LEAVE, DOWN = range(10)
FALL = 20


class Producer(NamedTuple):
    """One transaction that publishes an event; sets of replicas are bits."""

    phase: int = NEW
    saw: int = UNSEEN
    """The flag in its snapshot, where something reads it there."""
    notifies: bool = False
    sequenced: bool = False
    unheard: int = 0
    """Replicas to which its notification is on the way."""
    watched: int = 0
    """Replicas that watch it to its end."""
    read: int = 0
    """Replicas that have its event in a batch not written yet."""


class Replica(NamedTuple):
    """The sequencer of one replica."""

    does: int = STANDBY
    asleep: bool = False
    """`Sequencer._asleep_until`."""
    bell: bool = False
    ear: int = 0
    """How far it is with opening its connection for LISTEN."""


class World(NamedTuple):
    producers: tuple[Producer, ...]
    replicas: tuple[Replica, ...]
    flag: int = AWAKE
    writer: int = NOBODY
    """Who leads, as the cursor row says; NOBODY also while that one is dead."""
    lock: int = NOBODY
    """Who holds the cursor row."""
    mishaps: int = 0
    """So many more may happen."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The protocol; each field that is changed makes another one."""

    fall: tuple[str, ...] = ("clear", "lock", "flag", "holders", "read", "end")
    """The order of falling asleep; what is left out is not done."""
    flag_is_a_row: bool = False
    """The trigger reads an ordinary row, in the producer's snapshot."""
    looks_before_it_allocates: bool = False
    """The trigger looks at the flag before the sequence's lock is taken."""
    forgets_watched: bool = False
    """Woken by anything, it does not watch any more."""
    watches_one: bool = False
    """The first holder that ends is the last one that is watched."""
    listens: tuple[str, ...] = ("listen", "ring")
    """The order of opening a lost connection for LISTEN again."""
    heeds_flag: bool = True
    """Who reads or writes "awake" is not asleep."""
    taken_sleeps: bool = False
    """Who finds the cursor row taken sleeps until it is woken."""
    anybody_says_awake: bool = False
    """Whoever leaves says "awake", not just the leader."""
    late_batch_says_awake: bool = False
    """A batch that is refused says "awake" all the same."""
    unfenced: bool = False
    """A batch is written whoever leads."""

    def hears(self, replica: Replica) -> bool:
        """Whether notifications to a replica arrive."""
        return "listen" in self.listens[: replica.ear]


GOOD = Rules()
KINDS = frozenset({"deaf", "killed", "leaves", "overthrown", "operator", "crash"})


# ------------------------------------------------------- what happens to it


def put(world: World, n: int, producer: Producer) -> World:
    producers = world.producers
    return world._replace(producers=in_order((*producers[:n], producer, *producers[n + 1 :])))


def in_order(producers: Iterable[Producer]) -> tuple[Producer, ...]:
    """It does not matter which producer is which."""
    return tuple(sorted(producers, key=hash))


def each(world: World, change: Callable[[Producer], Producer]) -> World:
    return world._replace(producers=in_order(map(change, world.producers)))


def drafted(world: World, r: int) -> bool:
    return any(p.read & 1 << r for p in world.producers)


def mark(world: World, r: int) -> World:
    """Replica r reads every event that is visible and not sequenced."""
    return each(
        world,
        lambda p: p._replace(read=p.read | 1 << r) if p.phase >= VISIBLE and not p.sequenced else p,
    )


def watch(world: World, bit: int) -> World:
    return each(
        world,
        lambda p: p._replace(
            watched=p.watched | bit if p.phase in (HOLDS, WROTE, VISIBLE) else p.watched & ~bit
        ),
    )


def unwatch(world: World, bit: int, phase_min: int) -> World:
    return each(
        world,
        lambda p: p._replace(watched=p.watched & ~bit) if p.phase >= phase_min else p,
    )


def unheard(world: World, bit: int) -> World:
    return each(world, lambda p: p._replace(unheard=p.unheard & ~bit))


def forget(world: World, r: int) -> World:
    return each(world, lambda p: p._replace(read=p.read & ~(1 << r)))


def ended(world: World, r: int) -> World:
    """Replica r is no more; its locks and what it worked out went with it."""
    bit = 1 << r
    world = each(
        world,
        lambda p: p._replace(
            read=p.read & ~bit, unheard=p.unheard & ~bit, watched=p.watched & ~bit
        ),
    )
    replicas = world.replicas
    return world._replace(
        replicas=(*replicas[:r], Replica(DOWN), *replicas[r + 1 :]),
        writer=NOBODY if world.writer == r else world.writer,
        lock=NOBODY if world.lock == r else world.lock,
    )


def crashed(world: World, flag: int) -> World:
    """Transactions in flight are no more, and no session is; who published may begin anew."""
    return World(
        in_order(
            Producer(saw=p.saw)
            if p.phase == NEW
            else Producer(RELEASED, sequenced=p.sequenced or p.phase < VISIBLE)
            for p in world.producers
        ),
        (Replica(),) * len(world.replicas),
        flag,
        mishaps=world.mishaps,
    )

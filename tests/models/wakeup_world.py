"""The state of the wake-up protocol's model: see `tests.models.wakeup`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

AWAKE, ASLEEP = 0, 1
UNSEEN = -1
NO_REPLICA = -1
OPERATOR = -2

# The phases of a producer's transaction.
NEW, FLAG_READ, HOLDS, WROTE, VISIBLE, RELEASED = range(6)

# The next step of a replica. While it falls asleep, FALL + n is the n-th step.
STANDBY, READ, READ_FLAG, WRITE, PAUSE, READ_HOLDING, COMMIT, SLEEP, LEAVE, DOWN = range(10)
FALL = 20


class Producer(NamedTuple):
    """One transaction that publishes an event; sets of replicas are bits."""

    phase: int = NEW
    saw: int = UNSEEN
    """The flag in its snapshot, for rules that read it there."""
    notifies: bool = False
    sequenced: bool = False
    notifying: int = 0
    """Replicas to which its notification is in flight."""
    watched: int = 0
    """Replicas that watch for its end."""
    read: int = 0
    """Replicas that have its event in an unwritten batch."""


class Replica(NamedTuple):
    """The sequencer of one replica."""

    does: int = STANDBY
    asleep: bool = False
    """`Sequencer._asleep_until`."""
    wake_event: bool = False
    listen_step: int = 0
    """The step of opening its LISTEN connection."""


class World(NamedTuple):
    producers: tuple[Producer, ...]
    replicas: tuple[Replica, ...]
    flag: int = AWAKE
    writer: int = NO_REPLICA
    """The leader in the cursor row; NO_REPLICA while it is dead."""
    lock: int = NO_REPLICA
    """The holder of the cursor row's lock."""
    mishaps: int = 0
    """The number of faults that may still happen."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The protocol; each changed field makes an incorrect or equivalent variant."""

    fall: tuple[str, ...] = ("clear", "lock", "flag", "holders", "read", "end")
    """The order of the steps to sleep; omitted steps are skipped."""
    flag_is_a_row: bool = False
    """The trigger reads an ordinary row, in the producer's snapshot."""
    reads_flag_before_allocating: bool = False
    """The trigger reads the flag before it locks the sequence."""
    forgets_watched: bool = False
    """Any wake-up ends the watch of the holders."""
    watches_one: bool = False
    """The end of the first holder ends the watch of all."""
    listens: tuple[str, ...] = ("listen", "ring")
    """The order of reopening a lost LISTEN connection."""
    respects_flag: bool = True
    """A replica that reads or writes "awake" is not asleep."""
    locked_row_sleeps: bool = False
    """A replica that finds the cursor row locked sleeps until it is woken."""
    any_replica_sets_awake: bool = False
    """Every leaving replica sets "awake", not only the leader."""
    rejected_batch_sets_awake: bool = False
    """A rejected batch sets "awake" nevertheless."""
    unfenced: bool = False
    """A batch is written without a check of the leader."""

    def receives_notifications(self, replica: Replica) -> bool:
        """Whether notifications to a replica arrive."""
        return "listen" in self.listens[: replica.listen_step]


GOOD = Rules()
KINDS = frozenset({"deaf", "killed", "leaves", "overthrown", "operator", "crash"})


# ------------------------------------------------------------ state changes


def put(world: World, n: int, producer: Producer) -> World:
    producers = world.producers
    return world._replace(producers=in_order((*producers[:n], producer, *producers[n + 1 :])))


def in_order(producers: Iterable[Producer]) -> tuple[Producer, ...]:
    """Producers are interchangeable (symmetry reduction)."""
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


def clear_notifications(world: World, bit: int) -> World:
    return each(world, lambda p: p._replace(notifying=p.notifying & ~bit))


def forget(world: World, r: int) -> World:
    return each(world, lambda p: p._replace(read=p.read & ~(1 << r)))


def ended(world: World, r: int) -> World:
    """Replica r ends; its locks and unwritten batch are gone."""
    bit = 1 << r
    world = each(
        world,
        lambda p: p._replace(
            read=p.read & ~bit, notifying=p.notifying & ~bit, watched=p.watched & ~bit
        ),
    )
    replicas = world.replicas
    return world._replace(
        replicas=(*replicas[:r], Replica(DOWN), *replicas[r + 1 :]),
        writer=NO_REPLICA if world.writer == r else world.writer,
        lock=NO_REPLICA if world.lock == r else world.lock,
    )


def crashed(world: World, flag: int) -> World:
    """All transactions in flight and sessions end; the producers may begin again."""
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

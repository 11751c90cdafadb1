"""What the model of the lease protocol is made of: see `tests.models.lease`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

NOBODY = -1
GONE = -1
"""Of a row: it is deleted."""

RUNS, FROZEN, ENDED = range(3)

# A request; a statement; a look at the other replicas' rows.
NO, SENT, OK, REFUSED = range(4)
SCANNED, LOCKED, DONE, FENCED = range(4, 8)

# What is written for the lane, in one statement.
NOTHING, GROUP, GIVE_UP, CHECKPOINT = range(4)

# How far a replica is with the lane.
WITHOUT, BURIES, CLAIMS, CLAIMED, READ, OWNS, HAD = range(7)


class Writes(NamedTuple):
    """The connection on which a replica writes; `dirty`: its row was written since."""

    what: int = NOTHING
    phase: int = NO
    to: int = 0
    dirty: bool = False


IDLE = Writes()


class Watch(NamedTuple):
    """What a replica knows of an earlier one."""

    age: int = 0
    """For how long the counter was the same."""
    news: bool = True
    """The row holds another counter than is known here."""
    looks: int = NO
    """A look is under way (SENT), or its answer (OK: a new counter, DONE: the same)."""
    later: bool = False
    """The row was renewed since that look was executed."""
    asked: int = 0
    """The age when the look began, where somebody wants to know."""


class Replica(NamedTuple):
    runs: int = RUNS
    left: int = 0
    """Of its lease, on its own clock."""
    row: int = 0
    """Of its lease, as its row tells on the database's clock."""
    renews: int = NO
    renews_for: int = 0
    """How long ago the renewal began."""
    lane: int = WITHOUT
    acked: int = 0
    """In memory."""
    written: int = 0
    """The same, known to be on disk."""
    noted: int = 0
    """The same, in the checkpoint."""
    request: int = NO
    """The request for number acked + 1."""
    gives_up: bool = False
    """`acked` was refused, and this is not on disk."""
    writes: Writes = IDLE
    watches: tuple[Watch, ...] = ()
    buries: int = NOBODY


class World(NamedTuple):
    replicas: tuple[Replica, ...]
    owner: int = 0
    epoch: int = 0
    """Who claimed the lane last, as its own row says."""
    progress: int = 0
    """The checkpoint; numbers are bits below, in sets."""
    log: int = 0
    """Acknowledged, as the log says."""
    dead: int = 0
    """Given up, as the dead letters say."""
    got: int = 0
    """Accepted by the receiver."""
    sent: int = 0
    """The last number that was sent, where somebody wants to know."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The protocol; each field that is changed makes another one."""

    counts_from_the_end: bool = False
    """A lease runs from the answer to its renewal."""
    lapsed_renews: bool = False
    group_fenced: bool = True
    checkpoint_fenced: bool = True
    checkpoint_epoch: str = "row"
    """Where a checkpoint looks for its epoch: on the lane's "row", in a "join", or nowhere."""
    checkpoint_forward: bool = True
    """A checkpoint asks for a smaller number on the lane's row."""
    burial_deletes: bool = True
    burial_compares: bool = True
    """A burial asks for the counter that was seen."""
    ages_to_the_question: bool = False
    """A replica is judged by its age when the look at it began, not when it was answered."""
    dead_after: int | None = None
    """After so many ticks a replica is taken for dead; None: after a lease."""
    reads_expiry: bool = False
    """A replica is taken for dead by its row's time, on a clock that is a tick ahead."""
    starts_from_sent: bool = False
    reads_before_claim: bool = False
    looks_at_lease: bool = True
    """Who sends looks at its lease first."""
    closes: bool = True
    """When its lease is over, a replica closes what is in flight."""
    waits_for_answer: bool = True
    """What is acknowledged in the log was acknowledged by the receiver."""
    give_up_first: bool = True
    """A give-up is on disk before the next number is sent."""
    give_up_with_successes: bool = True
    one_trip: bool = True
    """A group is one statement, and its lock is held by nobody else than the database."""


GOOD = Rules()


# ------------------------------------------------------- what happens to it


def with_replica(world: World, r: int, me: Replica) -> World:
    replicas = world.replicas
    return world._replace(replicas=(*replicas[:r], me, *replicas[r + 1 :]))


def with_watch(world: World, r: int, p: int, watch: Watch) -> World:
    me = world.replicas[r]
    watches = (*me.watches[:p], watch, *me.watches[p + 1 :])
    return with_replica(world, r, me._replace(watches=watches))


def renewed(world: World, p: int) -> World:
    """The row of replica p is written: others will see it, and so will its own statement."""
    for r, other in enumerate(world.replicas):
        if p >= len(other.watches):
            continue
        watch = other.watches[p]
        later = watch.looks in (OK, DONE, FENCED)
        news = watch._replace(later=True) if later else watch._replace(news=True)
        world = with_watch(world, r, p, news)
    me = world.replicas[p]
    if me.writes.phase == SCANNED:
        me = me._replace(writes=me.writes._replace(dirty=True))
    return with_replica(world, p, me)


def answered(me: Replica, phase: int) -> Writes:
    """The answer to a statement, if there is still somebody to hear it."""
    if me.runs == ENDED:
        return IDLE
    if me.writes.what == CHECKPOINT:
        phase = DONE
    return me.writes._replace(phase=phase, dirty=False)


def ended(world: World, r: int) -> World:
    """Replica r closes everything; what it has sent to the database may be executed still."""
    me = world.replicas[r]
    writes = me.writes if me.writes.phase in (SENT, SCANNED) else IDLE
    renews = SENT if me.renews == SENT else NO
    over = Replica(ENDED, row=me.row, renews=renews, lane=HAD, writes=writes)
    return with_replica(world, r, over)


def durable(world: World) -> int:
    """How far the lane is: the checkpoint, and what the log has behind it."""
    seq = world.progress
    while world.log & 1 << seq:
        seq += 1
    return seq

"""The state of the lease protocol's model: see `tests.models.lease`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

NO_REPLICA = -1
GONE = -1
"""The value of a deleted row."""

RUNS, FROZEN, ENDED = range(3)

# Phases of a request, of a statement, and of a poll of the other replicas' rows.
NO, SENT, OK, REFUSED = range(4)
SCANNED, LOCKED, DONE, FENCED = range(4, 8)

# The kinds of writes of a lane, one statement each.
NOTHING, GROUP, DEAD_LETTER, CHECKPOINT = range(4)

# The states of a replica with respect to the lane.
WITHOUT, EXPIRES, CLAIMS, CLAIMED, READ, OWNS, HAD = range(7)


class Writes(NamedTuple):
    """The write connection of a replica; `dirty`: its row was written since the read."""

    what: int = NOTHING
    phase: int = NO
    to: int = 0
    dirty: bool = False


IDLE = Writes()


class Watch(NamedTuple):
    """A replica's knowledge of an earlier one."""

    age: int = 0
    """The ticks during which the counter was unchanged."""
    changed: bool = True
    """The row's counter differs from the known one."""
    poll: int = NO
    """A poll in progress (SENT) or its response (OK: a new counter, DONE: the same)."""
    later: bool = False
    """The row was renewed after the poll was executed."""
    age_at_poll: int = 0
    """The age at the start of the poll, for rules that use it."""


class Replica(NamedTuple):
    runs: int = RUNS
    left: int = 0
    """The ticks left of its lease, on its own clock."""
    row: int = 0
    """The ticks left of its lease, in its row, on the database's clock."""
    renews: int = NO
    renews_for: int = 0
    """The ticks since the renewal began."""
    lane: int = WITHOUT
    acked: int = 0
    """The last acknowledged number, in memory."""
    written: int = 0
    """The last number known to be durable."""
    checkpointed: int = 0
    """The last number in the checkpoint."""
    request: int = NO
    """The request for number acked + 1."""
    dead_letter_pending: bool = False
    """`acked` was rejected, and its dead letter is not durable."""
    writes: Writes = IDLE
    watches: tuple[Watch, ...] = ()
    expires: int = NO_REPLICA


class World(NamedTuple):
    replicas: tuple[Replica, ...]
    owner: int = 0
    epoch: int = 0
    """The last claimant, in the lane's own row."""
    progress: int = 0
    """The checkpoint; sets of sequence numbers are bit sets."""
    log: int = 0
    """The acknowledged numbers in the log."""
    dead: int = 0
    """The dead-lettered numbers."""
    got: int = 0
    """The numbers that the receiver accepted."""
    sent: int = 0
    """The last number sent, for rules that use it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The protocol; each changed field makes an incorrect or equivalent variant."""

    counts_from_response: bool = False
    """A lease runs from the response to its renewal."""
    lapsed_renews: bool = False
    group_fenced: bool = True
    checkpoint_fenced: bool = True
    checkpoint_epoch: str = "row"
    """Where a checkpoint compares its epoch: on the lane's "row", in a "join", or nowhere."""
    checkpoint_forward: bool = True
    """A checkpoint requires a smaller number on the lane's row."""
    expiry_deletes_row: bool = True
    expiry_compares_counter: bool = True
    """An expiry requires the counter that was read."""
    uses_age_at_poll: bool = False
    """A replica is expired by its age at the start of the poll, not at the response."""
    dead_after: int | None = None
    """The ticks after which a replica is considered dead; None: a lease."""
    reads_expiry: bool = False
    """A replica is considered dead by the time in its row, on a clock that is a tick ahead."""
    starts_from_sent: bool = False
    reads_before_claim: bool = False
    checks_lease: bool = True
    """A sender checks its lease first."""
    closes: bool = True
    """A replica closes its requests in flight at the end of its lease."""
    waits_for_response: bool = True
    """The log acknowledges only what the receiver acknowledged."""
    dead_letter_first: bool = True
    """A dead letter is durable before the next number is sent."""
    dead_letter_with_successes: bool = True
    one_trip: bool = True
    """A group is one statement, so its lock is held by the database only, never across a round
    trip.
    """


GOOD = Rules()


# ------------------------------------------------------------ state changes


def with_replica(world: World, r: int, me: Replica) -> World:
    replicas = world.replicas
    return world._replace(replicas=(*replicas[:r], me, *replicas[r + 1 :]))


def with_watch(world: World, r: int, p: int, watch: Watch) -> World:
    me = world.replicas[r]
    watches = (*me.watches[:p], watch, *me.watches[p + 1 :])
    return with_replica(world, r, me._replace(watches=watches))


def renewed(world: World, p: int) -> World:
    """Write the row of replica p: polls and its own statement detect it."""
    for r, other in enumerate(world.replicas):
        if p >= len(other.watches):
            continue
        watch = other.watches[p]
        later = watch.poll in (OK, DONE, FENCED)
        changed = watch._replace(later=True) if later else watch._replace(changed=True)
        world = with_watch(world, r, p, changed)
    me = world.replicas[p]
    if me.writes.phase == SCANNED:
        me = me._replace(writes=me.writes._replace(dirty=True))
    return with_replica(world, p, me)


def with_response(me: Replica, phase: int) -> Writes:
    """The response to a statement; dropped if the replica has ended."""
    if me.runs == ENDED:
        return IDLE
    if me.writes.what == CHECKPOINT:
        phase = DONE
    return me.writes._replace(phase=phase, dirty=False)


def ended(world: World, r: int) -> World:
    """Replica r closes its connections; its sent statements may still be executed."""
    me = world.replicas[r]
    writes = me.writes if me.writes.phase in (SENT, SCANNED) else IDLE
    renews = SENT if me.renews == SENT else NO
    over = Replica(ENDED, row=me.row, renews=renews, lane=HAD, writes=writes)
    return with_replica(world, r, over)


def durable(world: World) -> int:
    """The lane's durable position: the checkpoint and the contiguous log after it."""
    seq = world.progress
    while world.log & 1 << seq:
        seq += 1
    return seq

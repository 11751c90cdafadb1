"""The lease protocol: at most one replica sends at any time, and its successor loses nothing.

**The protocol**, in the terms of the code. A replica's row holds a lease on the database's clock
and a counter, which each renewal increments (`RENEW`: only while the lease is valid). The replica
itself counts from the *start* of the renewal, on its own clock (`Lease`), sends nothing after that,
and closes its requests in flight (`keep_lease`). A peer that reads the same counter for more than a
lease on *its* clock (`PeerWatch`) expires the replica if the counter is still unchanged (optimistic
concurrency): it deletes the row and releases the endpoints in one transaction (`expire_replica`). A
replica that claims a free endpoint writes its epoch to the lane's row (`CLAIM`, `STAMP`), commits,
and only then reads the checkpoint and the acknowledgements after it.

An owner sends n + 1 as soon as n was acknowledged, and writes acknowledgements in groups. A dead
letter is written at once, together with the waiting acknowledgements, before the next sequence
number is sent. Each of these writes is one fenced statement: it finds the replica's row with a
valid lease, locks it, and rechecks it if the row was written meanwhile (`FENCE`). Checkpoints and
dead letters also compare the epoch on the lane's own row.

**Invariants** are `Lease.wrong` and the texts of `Wrong` below. **Liveness**: everything is
delivered or dead-lettered in the end, whatever happens to all replicas but the last.

**What is modelled.** Time passes in ticks, for all clocks alike; no two clocks are compared. A
statement is sent, executed and completed at any time, so its response may be late; fenced
statements read first and lock later. A replica may be frozen at any time (time passes, and its sent
statements are executed), resume, or be killed; a running one does what its own clock requires
before time passes. Requests are accepted, rejected, or lost. A lane is released when it is idle.

**What is omitted.** The last replica is never frozen, so that one remains. A replica takes over
from earlier ones only, and owns the lane once. A replica that lost its lease and registers again is
a new one. There are no retry delays: a failed request is repeated at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.models.explorer import Wrong
from tests.models.lease_database import Database
from tests.models.lease_world import (
    CHECKPOINT,
    CLAIMS,
    DEAD_LETTER,
    DONE,
    ENDED,
    EXPIRES,
    FENCED,
    FROZEN,
    GONE,
    GOOD,
    GROUP,
    HAD,
    IDLE,
    NO,
    NO_REPLICA,
    OK,
    OWNS,
    READ,
    REFUSED,
    RUNS,
    SENT,
    WITHOUT,
    Replica,
    Rules,
    Watch,
    World,
    Writes,
    durable,
    ended,
    with_replica,
    with_watch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.models.explorer import Step


class Lease:
    """The model.

    Args:
        replicas, numbers, lease: the number of replicas, sequence numbers, and lease ticks.
        ignores: violations to ignore, in order to explore their consequences.
    """

    def __init__(
        self,
        replicas: int,
        numbers: int,
        lease: int,
        rules: Rules = GOOD,
        ignores: frozenset[str] = frozenset(),
    ) -> None:
        self._count = replicas
        self._numbers = numbers
        self._lease = lease
        self._rules = rules
        self._ignores = ignores
        self._database = Database(rules, lease, ignores)
        dead_after = rules.dead_after
        self._dead_after = lease if dead_after is None else dead_after

    def first(self) -> World:
        lease = self._lease
        return World(
            tuple(
                Replica(
                    left=lease,
                    row=lease,
                    lane=WITHOUT if r else OWNS,
                    watches=(Watch(),) * r,
                )
                for r in range(self._count)
            )
        )

    def wrong(self, world: World) -> str | None:
        passed = (1 << world.progress) - 1
        if passed & ~(world.log | world.dead):
            return "the checkpoint passes a number without an outcome"
        if world.log & ~world.got:
            return "the log acknowledges what the receiver has not"
        return None

    def pending(self, world: World) -> str | None:
        if (world.log | world.dead) != (1 << self._numbers) - 1:
            return "a delivery is pending"
        return None

    def steps(self, world: World) -> Iterator[Step[World]]:
        for r, me in enumerate(world.replicas):
            yield from self._database.steps(world, r, me)
            if me.runs == RUNS:
                yield from self._keep_lease(world, r, me)
                yield from self._own(world, r, me)
                yield from self._ownership(world, r, me)
            if me.request == SENT:
                n = me.acked
                got = with_replica(world, r, me._replace(request=OK))._replace(
                    got=world.got | 1 << n
                )
                yield f"the receiver accepts {n + 1} of {r}", True, got
                if not world.got & 1 << n:
                    refused = with_replica(world, r, me._replace(request=REFUSED))
                    yield f"the receiver rejects {n + 1} of {r}", False, refused
            if r < self._count - 1:
                yield from self._mishap(world, r, me)
        yield from self._tick(world)

    # ----------------------------------------------------------------- time

    def _tick(self, world: World) -> Iterator[Step[World]]:
        replicas = []
        for r, me in enumerate(world.replicas):
            last = r == self._count - 1
            if me.runs == RUNS and not me.left:
                if self._rules.closes:
                    return
                if me.request:
                    what = "a request is open although the lease is over"
                    yield "time passes", True, Wrong(what)
                    return
            watches = tuple(
                w if w.age >= self._lease else w._replace(age=w.age + 1) for w in me.watches
            )
            if last or (me.runs == ENDED and me.row <= 0):
                replicas.append(me._replace(watches=watches))
                continue
            replicas.append(
                me._replace(
                    left=max(me.left - 1, 0),
                    row=me.row - (me.row > 0),
                    renews_for=min(me.renews_for + 1, self._lease) if me.renews else 0,
                    watches=watches,
                )
            )
        yield "time passes", True, world._replace(replicas=tuple(replicas))

    def _mishap(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        if me.runs == RUNS and not me.left:
            yield f"replica {r} is frozen", False, with_replica(world, r, me._replace(runs=FROZEN))
        elif me.runs == FROZEN:
            yield f"replica {r} resumes", False, with_replica(world, r, me._replace(runs=RUNS))
        if me.runs != ENDED:
            yield f"replica {r} is killed", False, ended(world, r)

    def _keep_lease(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        if r == self._count - 1:
            return
        rules = self._rules
        if me.renews == NO and 0 < me.left < self._lease:
            begun = me._replace(renews=SENT, renews_for=0)
            yield f"replica {r} begins a renewal", True, with_replica(world, r, begun)
        elif me.renews == OK:
            left = self._lease - (0 if rules.counts_from_response else me.renews_for)
            again = me._replace(left=left, renews=NO, renews_for=0)
            yield (
                f"replica {r} gets the renewal of its lease",
                True,
                with_replica(world, r, again),
            )
        elif me.renews == FENCED:
            yield f"replica {r} gets the rejection of its renewal and ends", True, ended(world, r)
        if not me.left and rules.closes:
            yield f"replica {r} ends, because its lease is over", True, ended(world, r)

    # ---------------------------------------------------------------- owner

    def _own(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        rules, writes = self._rules, me.writes
        if writes.phase == DONE:
            yield from self._learn(world, r, me)
        elif writes.phase == FENCED:
            yield f"replica {r} is fenced and ends", True, ended(world, r)
        if me.lane != OWNS:
            return
        waits = me.dead_letter_pending and rules.dead_letter_first
        may = me.left > 0 or not rules.checks_lease
        if me.request == NO and me.acked < self._numbers and not waits and may:
            yield f"replica {r} sends {me.acked + 1}", True, self._send(world, r, me)
        elif me.request == SENT:
            yield (
                f"a request of replica {r} is lost",
                False,
                with_replica(world, r, me._replace(request=NO)),
            )
        elif me.request == OK or (me.request == REFUSED and not me.dead_letter_pending):
            refused = me.request == REFUSED
            on = me._replace(
                acked=me.acked + 1,
                request=NO,
                dead_letter_pending=me.dead_letter_pending or refused,
            )
            yield f"replica {r} gets the response", True, with_replica(world, r, on)
        if writes.phase == NO and me.left:
            ahead = int(me.request == SENT and not rules.waits_for_response)
            if me.acked + ahead > me.written:
                what = DEAD_LETTER if me.dead_letter_pending else GROUP
                on = me._replace(writes=Writes(what, SENT, me.acked + ahead))
                name = "a dead letter" if me.dead_letter_pending else "a group"
                yield f"replica {r} writes {name} up to {me.acked}", True, self._begin(world, r, on)
            if me.written > me.checkpointed:
                on = me._replace(writes=Writes(CHECKPOINT, SENT, me.written))
                name = f"replica {r} writes checkpoint {me.written}"
                yield name, True, self._begin(world, r, on)
        is_quiet = me.request == NO and writes == IDLE and me.acked == me.checkpointed
        if is_quiet and me.row > 0 and r < self._count - 1:
            # Its further steps do not matter.
            over = with_replica(world, r, Replica(ENDED, row=GONE, lane=HAD))
            yield f"replica {r} releases the lane", False, over._replace(owner=NO_REPLICA)

    def _begin(self, world: World, r: int, me: Replica) -> World | Wrong:
        """Send a statement; for the last replica, which has no successor, it is also executed."""
        if r < self._count - 1:
            return with_replica(world, r, me)
        then = self._database.write(world, r, me)
        if isinstance(then, Wrong):
            return then
        ((_, _, learned),) = self._learn(then, r, then.replicas[r])
        return learned

    def _send(self, world: World, r: int, me: Replica) -> World | Wrong:
        if not me.left:
            return Wrong("a request begins although the lease is over")
        for q, other in enumerate(world.replicas):
            if q != r and other.lane == OWNS and other.left:
                return Wrong(f"replicas {q} and {r} both consider their leases valid")
        before = (1 << me.acked) - 1
        if before & ~(world.got | world.dead):
            return Wrong("a number is sent before the one before it had its outcome")
        sending = with_replica(world, r, me._replace(request=SENT))
        if self._rules.starts_from_sent:
            sending = sending._replace(sent=max(world.sent, me.acked + 1))
        return sending

    def _learn(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        what, _, to, _ = me.writes
        if what == CHECKPOINT:
            on = me._replace(checkpointed=to, writes=IDLE)
        else:
            on = me._replace(
                written=to,
                writes=IDLE,
                dead_letter_pending=me.dead_letter_pending and (what == GROUP or to < me.acked),
            )
        yield f"replica {r} gets the confirmation of its write", True, with_replica(world, r, on)

    # ------------------------------------------------------------ ownership

    def _ownership(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        for p, watch in enumerate(me.watches):
            if me.lane != WITHOUT:
                break
            if watch.poll == NO and world.owner == p and (watch.age or watch.changed):
                age_at_poll = watch.age if self._rules.uses_age_at_poll else 0
                polling = with_watch(
                    world, r, p, watch._replace(poll=SENT, age_at_poll=age_at_poll)
                )
                yield f"replica {r} polls replica {p}", True, polling
            elif watch.poll in (OK, DONE, FENCED):
                yield from self._check_peer(world, r, me, p, watch)
        if me.lane == WITHOUT and world.owner == NO_REPLICA:
            yield f"replica {r} claims", True, with_replica(world, r, me._replace(lane=CLAIMS))
        elif me.lane == READ:
            start = durable(world)
            if me.left and me.acked != start and "stale" not in self._ignores:
                yield (
                    f"replica {r} owns the lane",
                    True,
                    Wrong(f"replica {r} continues from {me.acked}, and the log from {start}"),
                )
                return
            on = me._replace(lane=OWNS, written=me.acked)
            yield f"replica {r} owns the lane, from {me.acked}", True, with_replica(world, r, on)

    def _check_peer(
        self, world: World, r: int, me: Replica, p: int, watch: Watch
    ) -> Iterator[Step[World]]:
        """Process the response to a poll; a replica considered dead is expired."""
        observed_age = watch.age_at_poll if self._rules.uses_age_at_poll else watch.age
        dead = watch.poll == DONE and observed_age >= self._dead_after
        if self._rules.reads_expiry:
            dead = watch.poll == FENCED
        age = 0 if watch.poll == OK else watch.age
        seen = with_watch(world, r, p, Watch(age, watch.later))
        if dead and me.lane == WITHOUT:
            me = seen.replicas[r]
            expires = with_replica(seen, r, me._replace(lane=EXPIRES, expires=p))
            yield f"replica {r} considers replica {p} dead", True, expires
        else:
            yield f"replica {r} sees replica {p}", True, seen

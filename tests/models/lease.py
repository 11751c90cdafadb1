"""The lease protocol: at any time one replica sends, and who replaces it loses nothing.

**The protocol**, in the terms of the code.  A replica's row holds a lease on the
database's clock and a counter, which each renewal raises (`RENEW`: only while the lease
runs).  The replica itself counts from the *start* of the renewal, on its own clock
(`Lease`), sends nothing when that is over, and closes what is in flight (`keep_lease`).
Another one that sees the same counter for more than a lease on *its* clock
(`PeerWatch`) buries it, if the counter still stands there: it deletes the row, and
frees what it owned, in one transaction (`bury`).  Who claims a free endpoint writes its
epoch onto the lane's row (`CLAIM`, `STAMP`), commits, and only then reads the
checkpoint and the acknowledgements behind it.

An owner sends n + 1 as soon as n was acknowledged, and writes acknowledgements in
groups.  What is given up is written at once, together with the acknowledgements that
wait, before the next number is sent.  Each of these writes is one statement with a
fence: it finds the replica's row, with a running lease, locks it, and looks again if
the row was written meanwhile (`FENCE`).  Checkpoints and give-ups also ask for their
epoch on the lane's own row.

**What must hold** is `Lease.wrong` and the texts of `Wrong` below; and that everything
is delivered or given up in the end, whatever happens to all replicas but the last.

**What is modelled.**  Time passes in ticks, for all clocks alike; none is ever compared
with another.  A statement is sent, executed and answered at any time, the answer being
late included; fenced ones look first and lock later.  A replica may be frozen at any
time (time goes on, and what it sent is executed), go on, or be killed; a running one
does what its own clock demands before time passes.  Requests are received, refused, or
lost.  A lane is handed over when it is quiet.

**What is left out.**  The last replica is never frozen: somebody has to remain.  A
replica takes over from those before it, and owns the lane once.  One that lost its lease
and registers anew is a new one.  Retries: a request that fails is sent again at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.models.explorer import Wrong
from tests.models.lease_database import Database
from tests.models.lease_world import (
    BURIES,
    CHECKPOINT,
    CLAIMS,
    DONE,
    ENDED,
    FENCED,
    FROZEN,
    GIVE_UP,
    GONE,
    GOOD,
    GROUP,
    HAD,
    IDLE,
    NO,
    NOBODY,
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
        replicas, numbers, lease: how many there are; ticks.
        forgives: wrongs that do not count, so as to see what follows from them.
    """

    def __init__(
        self,
        replicas: int,
        numbers: int,
        lease: int,
        rules: Rules = GOOD,
        forgives: frozenset[str] = frozenset(),
    ) -> None:
        self._count = replicas
        self._numbers = numbers
        self._lease = lease
        self._rules = rules
        self._forgives = forgives
        self._database = Database(rules, lease, forgives)
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

    def owed(self, world: World) -> str | None:
        if (world.log | world.dead) != (1 << self._numbers) - 1:
            return "a delivery is owed"
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
                    yield f"the receiver refuses {n + 1} of {r}", False, refused
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
            yield f"replica {r} goes on", False, with_replica(world, r, me._replace(runs=RUNS))
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
            left = self._lease - (0 if rules.counts_from_the_end else me.renews_for)
            again = me._replace(left=left, renews=NO, renews_for=0)
            yield (
                f"replica {r} hears that its lease is renewed",
                True,
                with_replica(world, r, again),
            )
        elif me.renews == FENCED:
            yield f"replica {r} hears that it is not renewed, and ends", True, ended(world, r)
        if not me.left and rules.closes:
            yield f"replica {r} ends, because its lease is over", True, ended(world, r)

    # ---------------------------------------------------------------- owner

    def _own(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        rules, writes = self._rules, me.writes
        if writes.phase == DONE:
            yield from self._learn(world, r, me)
        elif writes.phase == FENCED:
            yield f"replica {r} hears that it is fenced off, and ends", True, ended(world, r)
        if me.lane != OWNS:
            return
        waits = me.gives_up and rules.give_up_first
        may = me.left > 0 or not rules.looks_at_lease
        if me.request == NO and me.acked < self._numbers and not waits and may:
            yield f"replica {r} sends {me.acked + 1}", True, self._send(world, r, me)
        elif me.request == SENT:
            yield (
                f"a request of replica {r} is lost",
                False,
                with_replica(world, r, me._replace(request=NO)),
            )
        elif me.request == OK or (me.request == REFUSED and not me.gives_up):
            refused = me.request == REFUSED
            on = me._replace(acked=me.acked + 1, request=NO, gives_up=me.gives_up or refused)
            yield f"replica {r} hears of the answer", True, with_replica(world, r, on)
        if writes.phase == NO and me.left:
            ahead = int(me.request == SENT and not rules.waits_for_answer)
            if me.acked + ahead > me.written:
                what = GIVE_UP if me.gives_up else GROUP
                on = me._replace(writes=Writes(what, SENT, me.acked + ahead))
                name = "a give-up" if me.gives_up else "a group"
                yield f"replica {r} writes {name} up to {me.acked}", True, self._begin(world, r, on)
            if me.written > me.noted:
                on = me._replace(writes=Writes(CHECKPOINT, SENT, me.written))
                name = f"replica {r} writes checkpoint {me.written}"
                yield name, True, self._begin(world, r, on)
        is_quiet = me.request == NO and writes == IDLE and me.acked == me.noted
        if is_quiet and me.row > 0 and r < self._count - 1:
            # What it does from now on is of no interest.
            over = with_replica(world, r, Replica(ENDED, row=GONE, lane=HAD))
            yield f"replica {r} hands over", False, over._replace(owner=NOBODY)

    def _begin(self, world: World, r: int, me: Replica) -> World | Wrong:
        """A statement is sent; the last replica's, whom nobody will replace, is done with."""
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
                return Wrong(f"replicas {q} and {r} both believe in their leases")
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
            on = me._replace(noted=to, writes=IDLE)
        else:
            on = me._replace(
                written=to, writes=IDLE, gives_up=me.gives_up and (what == GROUP or to < me.acked)
            )
        yield f"replica {r} hears that it is written", True, with_replica(world, r, on)

    # ------------------------------------------------------------ ownership

    def _ownership(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        for p, watch in enumerate(me.watches):
            if me.lane != WITHOUT:
                break
            if watch.looks == NO and world.owner == p and (watch.age or watch.news):
                asked = watch.age if self._rules.ages_to_the_question else 0
                looking = with_watch(world, r, p, watch._replace(looks=SENT, asked=asked))
                yield f"replica {r} looks at replica {p}", True, looking
            elif watch.looks in (OK, DONE, FENCED):
                yield from self._judge(world, r, me, p, watch)
        if me.lane == WITHOUT and world.owner == NOBODY:
            yield f"replica {r} claims", True, with_replica(world, r, me._replace(lane=CLAIMS))
        elif me.lane == READ:
            start = durable(world)
            if me.left and me.acked != start and "stale" not in self._forgives:
                yield (
                    f"replica {r} owns the lane",
                    True,
                    Wrong(f"replica {r} goes on from {me.acked}, and the log from {start}"),
                )
                return
            on = me._replace(lane=OWNS, written=me.acked)
            yield f"replica {r} owns the lane, from {me.acked}", True, with_replica(world, r, on)

    def _judge(
        self, world: World, r: int, me: Replica, p: int, watch: Watch
    ) -> Iterator[Step[World]]:
        """The answer to a look; whoever is dead by it is buried."""
        judged_by = watch.asked if self._rules.ages_to_the_question else watch.age
        dead = watch.looks == DONE and judged_by >= self._dead_after
        if self._rules.reads_expiry:
            dead = watch.looks == FENCED
        age = 0 if watch.looks == OK else watch.age
        seen = with_watch(world, r, p, Watch(age, watch.later))
        if dead and me.lane == WITHOUT:
            me = seen.replicas[r]
            buries = with_replica(seen, r, me._replace(lane=BURIES, buries=p))
            yield f"replica {r} takes replica {p} for dead", True, buries
        else:
            yield f"replica {r} sees replica {p}", True, seen

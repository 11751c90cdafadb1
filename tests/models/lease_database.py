"""The database in the model of the lease protocol: see `tests.models.lease`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.models.explorer import Wrong
from tests.models.lease_world import (
    CHECKPOINT,
    CLAIMED,
    CLAIMS,
    DEAD_LETTER,
    DONE,
    EXPIRES,
    FENCED,
    GONE,
    GROUP,
    HAD,
    LOCKED,
    NO_REPLICA,
    OK,
    OWNS,
    READ,
    RUNS,
    SCANNED,
    SENT,
    WITHOUT,
    Replica,
    World,
    durable,
    renewed,
    with_replica,
    with_response,
    with_watch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.models.explorer import Step
    from tests.models.lease_world import Rules


class Database:
    """Executes sent statements at any later time."""

    def __init__(self, rules: Rules, lease: int, ignores: frozenset[str]) -> None:
        self._rules = rules
        self._lease = lease
        self._ignores = ignores

    def steps(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        rules = self._rules
        if me.renews == SENT:
            if me.row > 0 or (me.row == 0 and rules.lapsed_renews):
                raised = renewed(world, r)
                on = raised.replicas[r]._replace(row=self._lease, renews=OK)
                yield f"a renewal of replica {r} is executed", True, with_replica(raised, r, on)
            else:
                refused = with_replica(world, r, me._replace(renews=FENCED))
                yield f"a renewal of replica {r} is rejected", True, refused
        if me.writes.phase in (SENT, SCANNED, LOCKED):
            yield from self._execute(world, r, me)
        for p, watch in enumerate(me.watches):
            if watch.poll == SENT:
                row = world.replicas[p].row
                poll = OK if watch.changed else DONE
                if rules.reads_expiry and row <= 1:
                    poll = FENCED
                seen = with_watch(world, r, p, watch._replace(poll=poll, later=False))
                if rules.reads_before_claim:
                    seen = with_replica(seen, r, seen.replicas[r]._replace(acked=durable(world)))
                yield f"a poll of replica {r} is executed", True, seen
        if me.lane == EXPIRES:
            yield from self._expire(world, r, me, me.expires)
        elif me.lane == CLAIMS:
            if world.owner == NO_REPLICA and me.row > 0:
                then = READ if rules.reads_before_claim else CLAIMED
                claimed = with_replica(world, r, me._replace(lane=then, watches=()))
                claimed = claimed._replace(owner=r, epoch=r)
                yield f"a claim of replica {r} is committed", True, claimed
            else:
                failed = with_replica(world, r, me._replace(lane=WITHOUT))
                yield f"a claim of replica {r} finds nothing", True, failed
        elif me.lane == CLAIMED:
            acked = world.sent if rules.starts_from_sent else durable(world)
            read = with_replica(world, r, me._replace(lane=READ, acked=acked))
            yield f"replica {r} reads checkpoint and tail", True, read

    def _expire(self, world: World, r: int, me: Replica, p: int) -> Iterator[Step[World]]:
        dead = world.replicas[p]
        if dead.writes.phase == LOCKED:
            return
        on = with_replica(world, r, me._replace(lane=WITHOUT, expires=NO_REPLICA))
        if dead.row == GONE or (self._rules.expiry_compares_counter and me.watches[p].changed):
            yield f"an expiry of replica {p} finds nothing", True, on
            return
        if self._rules.expiry_deletes_row:
            on = renewed(on, p)
            on = with_replica(on, p, on.replicas[p]._replace(row=GONE))
        if on.owner == p:
            on = on._replace(owner=NO_REPLICA)
        yield f"an expiry of replica {p} is committed", True, on

    def _execute(self, world: World, r: int, me: Replica) -> Iterator[Step[World]]:
        """A write: it finds its row, locks it, and writes."""
        rules, writes = self._rules, me.writes
        fenced = {
            GROUP: rules.group_fenced,
            DEAD_LETTER: True,
            CHECKPOINT: rules.checkpoint_fenced,
        }[writes.what]
        joined = writes.what == CHECKPOINT and rules.checkpoint_epoch == "join"
        name = f"a statement of replica {r}"
        refused = with_replica(world, r, me._replace(writes=with_response(me, FENCED)))
        if writes.phase == SENT:
            if (fenced and me.row <= 0) or (joined and world.owner != r):
                yield f"{name} finds no valid row", True, refused
            else:
                scanned = writes._replace(phase=SCANNED, dirty=False)
                found = with_replica(world, r, me._replace(writes=scanned))
                yield f"{name} finds its row", True, found
        elif writes.phase == SCANNED and fenced and writes.dirty and me.row <= 0:
            yield f"{name} rechecks its row and is rejected", True, refused
        elif writes.phase == SCANNED and not rules.one_trip:
            locked = with_replica(world, r, me._replace(writes=writes._replace(phase=LOCKED)))
            yield f"{name} locks its row", True, locked
        elif writes.phase == SCANNED or me.runs == RUNS:
            yield f"{name} writes", True, self.write(world, r, me)

    def write(self, world: World, r: int, me: Replica) -> World | Wrong:
        rules, (what, _, to, _) = self._rules, me.writes
        done = with_replica(world, r, me._replace(writes=with_response(me, DONE)))
        passed = (1 << to) - 1
        if what == GROUP:
            then = done._replace(log=world.log | (passed & ~world.dead))
        elif what == DEAD_LETTER:
            if world.epoch != r or world.progress > to:
                return with_replica(world, r, me._replace(writes=with_response(me, FENCED)))
            dead_lettered = 1 << (to - 1)
            log = world.log
            if rules.dead_letter_with_successes:
                log |= passed & ~dead_lettered & ~world.dead
            then = done._replace(log=log, dead=world.dead | dead_lettered, progress=to)
        else:
            if rules.checkpoint_epoch == "row" and world.epoch != r:
                return done
            if rules.checkpoint_forward and world.progress >= to:
                return done
            then = done._replace(progress=to)
        if then.progress < world.progress:
            return Wrong("progress goes back")
        newer = world.epoch != r and world.replicas[world.epoch].lane in (READ, OWNS, HAD)
        if newer and "stale" not in self._ignores:
            return Wrong("a replaced owner writes after the new one has read")
        return then

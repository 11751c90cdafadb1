"""The protocol of brokers' lanes: the stream is the lane without its dead letters, or it is held.

**The protocol.**  An owner opens its lane, which writes its fence and returns the position; it
compares that with the database (`take_over.decide`), and appends from there (compare and set).
After a response that was lost it opens the lane again, before it sends or dead-letters anything.

**What is modelled.**  Random schedules of several owners of one lane, successive and overlapping.
A request to the broker is executed when the schedule says so, perhaps after its owner has gone and
another one has appended.  Responses are lost before or after the effect.  Each access to the
database is a step of its own.  Faults destroy streams or the database, see `FAULTS`.  At the end
all faults end, what is on its way arrives at any time, and a last owner runs.  A newer generation
of lanes may begin; the lane then gets no more deliveries, and an end entry.

**Safety**, checked after each step: no message is stored twice or out of order; none is stored
while one before it is neither stored nor dead-lettered; none is both in the stream and a dead
letter; nothing is acknowledged that the stream never had.  At the end the stream equals the
database, or the lane is held for a reason that the schedule contains.  **Liveness**: a lane that is
not held ends with nothing pending, and with its end entry if a newer generation has begun.  None is
held after its operator has adopted it: what the stream had lost is accepted then, and where the
sequences do not fit, all pending deliveries are dead letters.

**What does not hold.**  A restored database has lost its later dead letters.  If the stream has
sequences after one of them, it is acknowledged with those: only the last message is compared.  A
dead letter of an abandoned lane may be in the stream, before what does not fit.

**What is omitted.**  Leases: owners overlap for as long as the schedule likes, and only the epoch
fences them.  The circuit breaker stays closed.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING

from outbox.core.brokers.message import end_id
from outbox.core.brokers.port import Message, Owner, StopKind
from outbox.core.brokers.repair import Repair, RepairKind
from outbox.core.delivery.lane import Lane
from outbox.core.model.response import Failure
from outbox.relay.delivery.broker_attempts import BrokerAttempts
from outbox.store.errors import Fenced
from tests.core.invariants import Violation, expect
from tests.models.broker_database import LANE, Database
from tests.models.broker_owner import Call, LaneOwner, Sleep
from tests.support.brokers.model import ModelBroker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BEGAN_AT = 1_800_000_000.0
STEPS_MAX = 1_500
"""Steps of the last owner."""
ADOPTIONS_MAX = 12
"""Of the last owner; the operator may need some, because former owners' requests arrive late."""
HELD_TIMES = 4
"""A lane is held if it was opened as often with the same result."""

FAULTS = {
    "delete": {Failure.FORGOT},
    "put back": {Failure.FORGOT},
    # Ahead: of an end entry whose response was lost, the sequence alone is left.
    "trim": {Failure.FOREIGN, Failure.AHEAD},
    "foreign": {Failure.FOREIGN},
    "impostor": {Failure.FOREIGN, Failure.AHEAD},
    "clone": {Failure.FOREIGN},
    "restore": {Failure.AHEAD, Failure.FOREIGN, Failure.FENCED},
}
"""Faults that destroy something, and why a lane may be held after them."""


class World:
    """One schedule.

    Args:
        broker, lanes, attempts: what runs, perhaps a mutant.
    """

    def __init__(
        self,
        seed: int,
        broker: type[ModelBroker] = ModelBroker,
        lanes: type[Lane] = Lane,
        attempts: type[BrokerAttempts] = BrokerAttempts,
    ) -> None:
        self.rng = Random(seed)
        self.now = BEGAN_AT
        self.seen: Counter[str] = Counter()
        """What happened."""
        self.database = Database(self._acknowledged, self._dead_lettered)
        self.broker = broker(refuses=self._refuses, is_full=self._is_full)
        self._make = lanes, attempts
        self._owners: list[LaneOwner] = []
        self._late: list[Call] = []
        self._refused: set[str] = set()
        self._stored: set[tuple[int, str]] = set()
        self._dead: set[int] = set()
        self._backup = self.database.snapshot()
        self._older = self.broker.snapshot()
        self._has_faults = True
        self._refills = self.rng.random() < 0.5
        self._adopts = self.rng.random() < 0.5
        self._accepted = 0
        """Up to where the operator has accepted that the stream lacks deliveries."""
        is_quiet = self.rng.random() < 0.3
        self._faults = [] if is_quiet else [f for f in FAULTS if self.rng.random() < 0.25]

    # ---------------------------------------------------------------- running

    def run(self) -> str:
        """Run the schedule, check it, and return its outcome."""
        self._own()
        for _ in range(self.rng.randrange(20, 160)):
            self._act()
        if self._faults and self.rng.random() < 0.3:
            self._do_harm()
        self._has_faults = False
        for owner in list(self._owners):
            self._end(owner)
        last = self._own()
        if self.rng.random() < 0.4:
            self._end_lane()
        if not self.database.ended:
            # A last delivery, so that the lane is not idle.
            self._refused.discard(self.database.assign().message_id)
        self._announce()
        held = self._run_to_the_end(last)
        while self._late:
            self._execute_late()
        self._check_end(held)
        whole = "refilled" if self.seen["refill"] else "exact"
        if self.seen["adopt"]:
            whole = "abandoned" if self.seen["adopted"] else "adopted"
        return whole if held is None else held.value

    def _act(self) -> None:
        rng = self.rng
        roll = rng.random()
        if roll < 0.68 and self._owners:
            self._step(rng.choice(self._owners[-2:]))
        elif roll < 0.78:
            self._assign()
        elif roll < 0.83 and self._late:
            self._execute_late()
        elif roll < 0.87 and self._owners:
            self._write(rng.choice(self._owners))
        elif roll < 0.91:
            self._change_owner()
        elif roll < 0.915:
            self._end_lane()
        elif roll < 0.95 and self._owners:
            self._operate(rng.choice(self._owners))
        elif self._faults and rng.random() < 0.7:
            self._do_harm()
        elif rng.random() < 0.5:
            self._older = self.broker.snapshot()
        else:
            self._backup = self.database.snapshot()

    def _run_to_the_end(self, last: LaneOwner) -> Failure | None:
        """Run the last owner; returns why the lane is held, or None."""
        refills = 2 if self._refills else 0
        adoptions = ADOPTIONS_MAX if self._adopts else 0
        for _ in range(STEPS_MAX):
            if self._late and self.rng.random() < 0.2:
                self._execute_late()
            if last.recorder.pending and self.rng.random() < 0.2:
                self._write(last)
            if not last.lane.has_work and last.lane.settled:
                return None
            if last.held is not None and last.holds >= HELD_TIMES:
                if last.held is Failure.FORGOT and refills:
                    # Not for ever: it may have a message that is refused.
                    refills -= 1
                    self._refill()
                elif self._adopts:
                    expect(adoptions > 0, f"it is held after it was adopted: {last.held}")
                    adoptions -= 1
                    self._adopt_at_the_end()
                else:
                    return last.held
                last.apply_changes()
            self._step(last)
            expect(last in self._owners, "the last owner was fenced")
        raise Violation(f"it does not end: {last.lane.pending} pending")

    # ------------------------------------------------------------------ steps

    def _step(self, owner: LaneOwner) -> None:
        """Let an owner go on from where it waits."""
        waits = owner.waits
        with self._fencing(owner):
            if isinstance(waits, Call):
                self._respond(owner, waits)
                return
            if isinstance(waits, Sleep) and self.now < waits.until < BEGAN_AT * 2:
                self.now = waits.until
            owner.resume()

    def _respond(self, owner: LaneOwner, call: Call) -> None:
        """Execute a request, lose it or its response, or respond to it."""
        roll, has_faults = self.rng.random(), self._has_faults
        if call.response is not None:
            if not has_faults or roll < 0.8:
                owner.resume(call.response)
                return
            self.seen["lost response"] += 1
        elif not has_faults or roll < 0.7:
            self._execute(call)
            return
        elif roll < 0.8:
            self.seen["unavailable"] += 1
            kind = self.rng.choice((StopKind.UNAVAILABLE, StopKind.MISCONFIGURED))
            owner.resume(call.fails(kind))
            return
        else:
            self.seen["request delayed"] += 1
            self._late.append(call)
        if owner.admission.is_sending and self.rng.random() < 0.2:
            self.seen["preempted"] += 1
            owner.preempt()
        else:
            owner.resume(call.fails(StopKind.UNKNOWN))

    def _execute(self, call: Call) -> None:
        """Let the broker process a request."""
        before = self.broker.stored
        is_late = all(owner.waits is not call for owner in self._owners)
        if call.messages is None:
            call.response = self.broker.open(call.owner, force=call.force)
        else:
            call.response = self.broker.append(call.owner, call.after, call.messages)
        after = self.broker.stored
        if is_late:
            self.seen["late: stored" if len(after) > len(before) else "late: refused"] += 1
        self._check_stored(before, after)

    def _execute_late(self) -> None:
        self._execute(self._late.pop(self.rng.randrange(len(self._late))))

    def _write(self, owner: LaneOwner) -> None:
        """Let an owner's recorder write a group, or a checkpoint."""
        with self._fencing(owner):
            owner.recorder.write_group()
            if self.rng.random() < 0.3:
                owner.recorder.checkpoint()

    @contextmanager
    def _fencing(self, owner: LaneOwner) -> Iterator[None]:
        call = owner.waits
        try:
            yield
        except Fenced:
            self.seen["fenced by the database"] += 1
            self._end(owner)
        waits = owner.waits
        if waits is not call and isinstance(waits, Call) and waits.messages is None:
            self.broker.begin_open()

    def _assign(self) -> None:
        if self.database.ended:
            return
        for _ in range(self.rng.randrange(1, 5)):
            expires_at = None
            if self.rng.random() < 0.05:
                expires_at = self.now + 5
            delivery = self.database.assign(expires_at)
            if self.rng.random() < 0.08:
                self._refused.add(delivery.message_id)
        self._announce()

    def _end_lane(self) -> None:
        """A newer generation of lanes begins."""
        self.seen["generation"] += 1
        self.database.ended = True
        for owner in self._owners:
            owner.mark_ended()

    def _announce(self) -> None:
        for owner in self._owners:
            owner.lane.extend_to(self.database.last_seq, self.now)

    def _own(self) -> LaneOwner:
        owner = LaneOwner(self, *self._make)
        if isinstance(owner.waits, Call):
            self.broker.begin_open()
        self._owners.append(owner)
        return owner

    def _change_owner(self) -> None:
        """Another owner claims the endpoint; the former one is killed, or does not know of it."""
        if self._owners and self.rng.random() < 0.6:
            self._end(self.rng.choice(self._owners))
        self.seen["take-over"] += 1
        self._own()

    def _end(self, owner: LaneOwner) -> None:
        """Kill an owner; what it has sent may still arrive."""
        self._owners.remove(owner)
        owner.kill()
        if isinstance(owner.waits, Call) and owner.waits.response is None:
            self._late.append(owner.waits)

    def _operate(self, owner: LaneOwner) -> None:
        """What an operator does."""
        match self.rng.randrange(4):
            case 0:
                self.seen["skip"] += 1
                owner.lane.skip(owner.lane.acked_seq + 1)
            case 1:
                self.seen["cut"] += 1
                owner.lane.dead_letter_through(
                    owner.lane.acked_seq + self.rng.randrange(4), "backlog"
                )
            case 2:
                self.seen["reconfigured"] += 1
                owner.reconfigure()
            case _:
                if self.database.held is Failure.FORGOT and self._refills:
                    self._refill()
                elif self.database.held is not None and self._adopts:
                    self._adopt()
                if self.rng.random() < 0.7:
                    owner.apply_changes()

    def _refill(self) -> None:
        self.seen["refill"] += 1
        delivered_seq = self.database.progress.delivered_seq
        self.database.repair = Repair(RepairKind.REFILL, delivered_seq)

    def _adopt(self) -> None:
        """Request an adoption, see `request_adoption`; owners learn of it later."""
        self.seen["adopt"] += 1
        self.seen[f"adopt: {self.database.held}"] += 1
        delivered_seq = self.database.progress.delivered_seq
        self.database.repair = Repair(RepairKind.ADOPT, delivered_seq)
        self.database.ended |= self.database.held is not Failure.FORGOT
        self._accepted = max(self._accepted, delivered_seq)

    def _adopt_at_the_end(self) -> None:
        adopted = self.seen["adopt"]
        is_seen = adopted > ADOPTIONS_MAX // 2 or (adopted and self.rng.random() < 0.5)
        if self.broker.is_foreign and is_seen:
            # As the reason of the hold says; at the latest after some adoptions.
            self.seen["delete"] += 1
            self.broker.delete()
            self.broker.is_foreign = False
        self._adopt()

    # ----------------------------------------------------------------- faults

    def _do_harm(self) -> None:
        getattr(self, "_" + self.rng.choice(self._faults).replace(" ", "_"))()

    def _refuses(self, message: Message) -> bool:
        return message.delivery in self._refused

    def _is_full(self) -> bool:
        return self._has_faults and self.rng.random() < 0.03

    def _delete(self) -> None:
        self.seen["delete"] += 1
        self.broker.delete()

    def _put_back(self) -> None:
        self.seen["put back"] += 1
        self.broker.put_back(self._older)

    def _trim(self) -> None:
        self.seen["trim"] += 1
        self.broker.trim()

    def _foreign(self) -> None:
        self.seen["foreign"] += 1
        self.broker.is_foreign = True

    def _impostor(self) -> None:
        """Another writer uses the next sequence."""
        self.seen["impostor"] += 1
        self.broker.last_seq += 1
        self.broker.entries.append(Message(self.broker.last_seq, "impostor", (), b""))

    def _clone(self) -> None:
        """A copy of the database opens the lane."""
        self.seen["clone"] += 1
        self.broker.open(Owner("copy", 1_000))

    def _restore(self) -> None:
        """The database returns to a backup, and all its connections end."""
        self.seen["restore"] += 1
        for owner in list(self._owners):
            self._end(owner)
        self.database = self._backup.snapshot()
        self._own()

    # ----------------------------------------------------------------- safety

    def _happened(self, *faults: str) -> bool:
        return any(self.seen[fault] for fault in faults)

    def _check_stored(self, before: list[Message], after: list[Message]) -> None:
        last = before[-1].sequence if before else 0
        for each in after[len(before) :]:
            expect(each.sequence > last, f"{each.sequence} is stored after {last}")
            missing = [
                n
                for n in range(last + 1, each.sequence)
                if n not in self._dead and n > self._accepted
            ]
            expect(not missing, f"{each.sequence} is stored without {missing}")
            if not self._happened("restore", "delete", "put back"):
                expect(each.sequence not in self._dead, f"dead letter {each.sequence} is stored")
            last = each.sequence
            self._stored.add((each.sequence, each.delivery))
        ends = [n for n, each in enumerate(after, 1) if each.delivery == end_id(LANE)]
        # An adopted lane whose end entry cannot be recognized any more gets another one.
        if not self._happened("impostor", "adopt"):
            expect(ends in ([], [len(after)]), f"there are messages after the end: {ends}")

    def _acknowledged(self, seq: int) -> None:
        found = seq, self.database.deliveries[seq].message_id
        if self._happened("restore") and seq in self._dead:
            # Its dead letter was lost with the database, and later sequences are in the stream.
            self.seen["false acknowledgement"] += 1
            return
        expect(found in self._stored, f"{seq} is acknowledged, and was never stored")

    def _dead_lettered(self, seq: int, reason: str) -> None:
        self.seen["dead letter"] += 1
        self._dead.add(seq)
        if reason == "adopted":
            self.seen["adopted"] += 1
            expect(self.seen["adopt"] > 0, f"{seq} is dead-lettered without an adoption")
        if self.seen["adopt"] and self._happened("trim"):
            # A position without a message does not say whether the stream had it.
            return
        if not self._happened("restore", "impostor", "delete", "put back"):
            stored = any(each.sequence == seq for each in self.broker.stored)
            expect(not stored, f"{seq} is dead-lettered, and in the stream")

    def _check_end(self, held: Failure | None) -> None:
        if held is not None:
            causes = {fault for fault, reasons in FAULTS.items() if held in reasons}
            expect(self._happened(*causes), f"it is held without a cause: {held.value}")
            return
        if (end_seq := self.database.end_seq) is not None:
            expect((end_seq, end_id(LANE)) in self._stored, "the end entry was never stored")
            if self._happened("delete", "put back", "impostor"):
                return  # A complete lane is not examined again.
        is_obscured = self._happened("trim", "impostor", "foreign", "restore")
        if self.seen["adopted"] or (self.database.ended and is_obscured):
            # It may have been abandoned, and what was pending may be part of another range.
            database, acked_seq = self.database, self.database.progress.acked_seq
            ended = {*range(1, acked_seq + 1), *database.delivered, *database.dead}
            expect(len(ended) == database.last_seq, f"{database.last_seq - len(ended)} are pending")
            return
        stored = [(each.sequence, each.delivery) for each in self.broker.stored]
        expected = self.database.expected()
        lost = {each for each in expected if each[0] <= self._accepted} - set(stored)
        expected = [each for each in expected if each not in lost]
        if self._happened("delete", "put back"):
            # With the later fence gone, what a former owner sent is stored if the position fits.
            dead = {each for each in self._stored if each[0] in self.database.dead}
            stored = [each for each in stored if each not in dead]
        # A foreign message that was trimmed cannot be compared.
        is_mixed = self._happened("impostor") and self._happened("trim")
        if is_mixed or self._happened("restore"):
            stored, expected = stored[-1:], expected[-1:]
        others = sorted(set(stored) ^ set(expected))
        expect(stored == expected, f"the stream and the lane differ in {others}")


def simulate(seed: int, make: Callable[[int], World] = World) -> World:
    """Run one schedule; its seed is a note of what it raises."""
    world = make(seed)
    try:
        world.seen[f"outcome: {world.run()}"] += 1
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise
    return world

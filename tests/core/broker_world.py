"""Successive owners of one lane, their database and a broker, under random faults.

The lane and the decision of a take-over are the product's; the rest is as small as it can be.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.core.brokers.port import Appended, Message, Owner, Position, Stop, StopKind
from outbox.core.brokers.results import append_outcome, failed_result, stored_result
from outbox.core.brokers.take_over import Acknowledge, Hold, HoldReason, LaneBooks, Proceed, decide
from outbox.core.delivery.commands import DeadRange, Fetch, Open, Progress, Record, Send, Wait
from outbox.core.delivery.lane import Lane
from outbox.core.model.response_policy import AttemptOutcome
from outbox.core.model.retry_policy import STANDARD
from tests.core.invariants import expect
from tests.core.lane_tables import EPOCH_S, delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from outbox.core.brokers.port import Standing
    from outbox.core.delivery.message import Delivery
    from tests.support.brokers.model import ModelBroker

LANE = "lane"
LOST = Stop(StopKind.UNKNOWN, "the response was lost")
BATCH_MAX = 4


@dataclass
class Database:
    """What is durable."""

    identity: str = "a"
    epoch: int = 0
    deliveries: list[Delivery] = field(default_factory=list)
    delivered: dict[int, float] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    skip_seq: int = 0
    history: int = 0
    """Differs after a restore: the same sequences are of other events."""

    @property
    def acked_seq(self) -> int:
        return len(self.delivered) + len(self.dead)

    @property
    def delivered_seq(self) -> int:
        return max(self.delivered, default=0)

    def assign(self) -> None:
        """Assign the next sequence."""
        seq = len(self.deliveries) + 1
        event = UUID(int=1000 + seq + 10_000 * self.history)
        self.deliveries.append(delivery(seq)._replace(event_id=event))

    def expected(self) -> list[tuple[int, str]]:
        """What the stream must have of the sequences that have ended."""
        return [
            (each.seq, each.message_id)
            for each in self.deliveries[: self.acked_seq]
            if each.seq not in self.dead
        ]


class OwnerProcess:
    """One owner: its lane, its request in flight, and what it has not written yet."""

    def __init__(self, world: World, make_lane: type[Lane]) -> None:
        self._world, self._random = world, world.random
        database = world.database
        database.epoch += 1
        self.owner = Owner(database.identity, database.epoch)
        acked, delivered = database.acked_seq, database.delivered_seq
        self.lane = make_lane(
            1,
            Progress(acked, delivered, 1),
            (),
            len(database.deliveries),
            1,
            batch_max=BATCH_MAX,
            skip_seq=database.skip_seq,
            has_position=True,
        )
        self.unwritten: list[Record] = []
        self.request: tuple[Send | Open, Callable[[], Any]] | None = None
        self.held: HoldReason | None = None

    @property
    def is_current(self) -> bool:
        return self.owner.epoch == self._world.database.epoch

    def step(self) -> bool:
        """Make one step; False: nothing can be done."""
        if self.request is not None:
            self._complete()
            return True
        lane, world = self.lane, self._world
        match lane.next(world.now):
            case Open() as command:
                opening = self._owner()
                self.request = command, lambda: world.broker.open(opening)
            case Send() as command:
                self._send(command)
            case Record() as record:
                self._write([*self._flushed(), record])
            case Fetch(after_seq=after):
                rows = self._random.randint(1, BATCH_MAX)
                lane.append_fetched(world.database.deliveries[after : after + rows])
            case Wait(until=until):
                world.now = until
            case _:
                return self._group_commit()
        return True

    def _owner(self) -> Owner:
        return self.owner._replace(opening=self.lane.openings)

    def _send(self, send: Send) -> None:
        position, owner = self.lane.position, self._owner()
        assert position is not None
        messages = [Message(each.seq, each.message_id, (), b"") for each in send.batch]
        self.request = send, lambda: self._world.broker.append(owner, position, messages)

    def _group_commit(self) -> bool:
        if not self.unwritten:
            return False
        self._write(self._flushed())
        return True

    def _flushed(self) -> list[Record]:
        records, self.unwritten = self.unwritten, []
        return records

    def _complete(self) -> None:
        """The request in flight is executed or not, and its response arrives or not."""
        assert self.request is not None
        (command, execute), self.request = self.request, None
        world = self._world
        fate = self._random.random() if world.faults else 1.0
        if fate < 0.12:
            # Still on its way: it may be executed at any later time.
            world.late.append(execute)
            world.seen["late"] += 1
            result: Any = None
        elif fate < 0.2:
            execute()
            world.seen["lost"] += 1
            result = None
        else:
            result = execute()
        if isinstance(command, Open):
            self._opened(LOST if result is None else result)
        else:
            position = self.lane.position
            assert position is not None
            self._appended(command, result or Appended(position, LOST))

    def _opened(self, standing: Standing) -> None:
        lane, database = self.lane, self._world.database
        expected = None
        if isinstance(standing, Position) and standing.delivery is not None:
            self._write(self._flushed())
            if not self.is_current:
                return
            at = standing.sequence
            if 0 < at <= len(database.deliveries):
                expected = database.deliveries[at - 1].message_id
        books = self._books()
        match self._world.decide(standing, books, expected):
            case Proceed(position=position):
                lane.record_position(position)
            case Acknowledge(through=through):
                for seq in range(lane.acked_seq + 1, through + 1):
                    database.delivered[seq] = self._world.now
                lane.record_found(through, 1, self._world.now)
                self._world.seen["found"] += 1
            case Hold() as hold:
                self.held = hold.reason
                self._world.seen[hold.reason.value] += 1
                self._fail(AttemptOutcome.RETRY, hold)
                return
            case Stop() as stop:
                self._fail(AttemptOutcome.RETRY, stop)
                return
        self.held = None

    def _books(self) -> LaneBooks:
        lane = self.lane
        return LaneBooks(LANE, lane.delivered_seq, lane.acked_seq, lane.last_seq)

    def _fail(self, outcome: AttemptOutcome, stop: Stop | Hold) -> None:
        now = self._world.now
        record = self.lane.record_result(
            outcome, failed_result(stop, 0.0), STANDARD, started_at=now, now=now, u=0.5
        )
        self._write([*self._flushed(), record])

    def _appended(self, send: Send, appended: Appended) -> None:
        lane, now, stop = self.lane, self._world.now, appended.stop
        if stop is not None and stop.kind is StopKind.MOVED and self._world.reopen(lane):
            lane.cancel_send()
            return
        if stop is not None and stop.kind is StopKind.UNKNOWN:
            self._world.reopen(lane)
        outcome = append_outcome(appended)
        result = stored_result(0.0) if stop is None else failed_result(stop, 0.0)
        if len(send.batch) > 1:
            *earlier, last = lane.record_batch_result(
                send.batch, appended.through, outcome, result, STANDARD,
                started_at=now, now=now, u=0.5,
            )  # fmt: skip
        else:
            earlier = []
            last = lane.record_result(outcome, result, STANDARD, started_at=now, now=now, u=0.5)
        self.unwritten += earlier
        if last.urgent:
            self._write([*self._flushed(), last])
        else:
            self.unwritten.append(last)

    def _write(self, records: Sequence[Record]) -> None:
        """Write records, unless a later owner has fenced this one."""
        if not self.is_current:
            return
        database = self._world.database
        for record in records:
            if record.dead is not None:
                first = record.dead.seq if isinstance(record.dead, DeadRange) else record.seq
                database.dead.update(range(first, record.seq + 1))
            elif record.attempt is not None and record.attempt.outcome == "delivered":
                database.delivered[record.seq] = self._world.now
            self.lane.confirm_recorded(record)


class World:
    """A schedule: a random walk with faults, and an owner that finishes without them."""

    def __init__(
        self,
        random: Random,
        broker: ModelBroker,
        lane: type[Lane] = Lane,
        decide: Callable[..., Any] = decide,
        reopen: Callable[[Lane], bool] = Lane.reopen,
    ) -> None:
        self.random, self.broker, self.decide, self.reopen = random, broker, decide, reopen
        self._make_lane = lane
        self.database = Database()
        self.now = EPOCH_S
        self.late: list[Callable[[], Any]] = []
        """Requests that are still on their way to the broker."""
        self.seen: Counter[str] = Counter()
        """Faults and outcomes."""
        self.faults = True
        refused = {random.randint(1, 20) for _ in range(random.choice((0, 0, 1, 2)))}
        broker.refuses = lambda message: message.sequence in refused
        broker.is_full = lambda: self.faults and random.random() < 0.05
        self.allowed = random.choice(("", "", "", "deleted", "trimmed", "foreign", "restored"))
        """The fault of the broker or the database that this schedule may have."""
        self._owners: list[OwnerProcess] = []

    def run(self) -> None:
        """Run the schedule, and check its end.

        Raises:
            Violation: a rule is broken.
        """
        for _ in range(self.random.randint(20, 120)):
            self._move()
        self.faults = False
        # A loss is noticed at the next append.
        self.database.assign()
        self._take_over()
        while self.late:
            self.late.pop(self.random.randrange(len(self.late)))()
        last = self._owners[-1]
        for _ in range(400):
            if not last.step() or last.held is not None:
                break
        else:
            expect(False, "the lane makes no end")
        last._group_commit()
        self._check(last)

    def _move(self) -> None:
        random, chance = self.random, self.random.random()
        if not self._owners or chance < 0.06:
            self._take_over()
        elif chance < 0.2:
            self.database.assign()
            for each in self._owners:
                each.lane.extend_to(len(self.database.deliveries), self.now)
        elif chance < 0.24 and self.late:
            self.late.pop(random.randrange(len(self.late)))()
        elif chance < 0.28:
            self._skip()
        elif chance < 0.31:
            self._fault()
        else:
            # An owner that was replaced may not know it yet.
            former = self._owners[-2:] if random.random() < 0.2 else self._owners[-1:]
            random.choice(former).step()

    def _take_over(self) -> None:
        for each in self._owners:
            if each.request is not None and self.random.random() < 0.7:
                self.late.append(each.request[1])
                each.request = None
        self._owners.append(OwnerProcess(self, self._make_lane))

    def _skip(self) -> None:
        self.database.skip_seq = self.database.acked_seq + 1
        self._owners[-1].lane.skip(self.database.skip_seq)

    def _fault(self) -> None:
        match self.allowed:
            case "deleted":
                # With its fence: what former owners send then is stored, which no promise excludes.
                self.late.clear()
                self._owners = self._owners[-1:]
                self.broker.delete()
            case "trimmed":
                self.broker.trim()
            case "foreign":
                self.broker.is_foreign = True
            case "restored" if self.database.acked_seq and not self.seen["restored"]:
                self._restore()
            case _:
                return
        self.seen[self.allowed] += 1

    def _restore(self) -> None:
        """The database goes back to an older state, and assigns the sequences again."""
        database, kept = self.database, self.random.randrange(self.database.acked_seq)
        database.deliveries = database.deliveries[:kept]
        database.delivered = {s: at for s, at in database.delivered.items() if s <= kept}
        database.dead = {s for s in database.dead if s <= kept}
        database.history += 1
        database.skip_seq = 0
        for _ in range(self.random.randint(0, 6)):
            database.assign()
        # No process of before knows of it, and none survives it.
        self._owners.clear()
        self._take_over()

    def _check(self, last: OwnerProcess) -> None:
        database, seen = self.database, self.seen
        stored = [(each.sequence, each.delivery) for each in self.broker.entries]
        sequences = [sequence for sequence, _ in stored]
        expect(sequences == sorted(set(sequences)), "the stream is not in order", stored)
        if last.held is not None:
            expect(self.allowed in _CAUSES[last.held], f"{last.held} without a cause", self.allowed)
            expect(bool(seen[self.allowed]), f"{last.held} before its cause")
            return
        expect(not last.lane.pending, "deliveries are pending at the end")
        if seen["trimmed"]:
            expect(stored == database.expected()[len(database.expected()) - len(stored) :],
                   "the stream is no end of the lane", stored)  # fmt: skip
        elif seen["restored"]:
            missing = set(database.expected()) - set(stored)
            expect(not missing, "acknowledged deliveries are not in the stream", missing)
        else:
            expect(stored == database.expected(), "the stream is not the lane", stored)
        dead = database.dead & set(sequences)
        expect(not dead or bool(seen["restored"]), "dead letters are in the stream", dead)


_CAUSES = {
    HoldReason.FORGOT: ("deleted",),
    HoldReason.AHEAD: ("restored",),
    # Without the message, nothing shows that what the stream has is this database's.
    HoldReason.FOREIGN: ("foreign", "restored", "trimmed"),
    HoldReason.FENCED: ("restored",),
}

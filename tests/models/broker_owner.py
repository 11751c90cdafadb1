"""An owner of a broker's lane, which runs step by step.

It has the relay's own `Lane`, `BrokerAttempts` and `settle`, and a loop that mirrors the
dispatcher's and the recorder's for one lane.  Where these wait, the owner yields a `Step`; the
schedule decides when it continues, and with which result.
"""

from __future__ import annotations

import asyncio
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from outbox.core.brokers.port import Appended, Owner, Stop, StopKind
from outbox.core.cluster.observed_time import GracePeriod
from outbox.core.delivery.buffer_budget import BufferBudget
from outbox.core.delivery.circuit_breaker import BreakerState
from outbox.core.delivery.commands import End, Fetch, LaneSnapshot, Open, Record, Send, Wait
from outbox.core.delivery.signing_clock import ClockDifference, SigningClock
from outbox.core.delivery.stream_position import StreamPosition
from outbox.core.model.headers import NO_HEADERS
from outbox.core.model.message_format import ENVELOPE
from outbox.core.model.response import AttemptResult, Failure
from outbox.core.model.response_policy import RETRYABLE
from outbox.core.model.retry_policy import RetryPolicy
from outbox.relay.delivery.attempt import Attempt
from outbox.relay.delivery.attempt_sender import revalidate
from outbox.relay.delivery.breaker_follow_up import BreakerFollowUp
from outbox.relay.delivery.settle import settle
from tests.models.broker_database import LANE, Database

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Sequence

    from outbox.core.brokers.port import Message, Standing
    from outbox.core.brokers.repair import Repair
    from outbox.core.delivery.lane import Lane
    from outbox.relay.delivery.broker_attempts import BrokerAttempts
    from outbox.store.delivery.lanes import FoundDelivery, LaneStore, LostDeliveries
    from tests.models.broker_protocol import World

IDENTITY = "database"
POLICY = RetryPolicy(base_s=1.0, cap_s=8.0, attempts_max=2)
ROWS_PER_FETCH, REFILL_MAX, BATCH_MAX = 12, 3, 6
HOLDS = frozenset({Failure.FORGOT, Failure.AHEAD, Failure.FOREIGN, Failure.FENCED})


class Preempted(Exception):
    """Admission control has cancelled the request."""


class Step:
    """Where an owner waits."""

    def __await__(self) -> Generator[Step, Any, Any]:
        return (yield self)


class Sleep(Step):
    """Until a time, or until something happens."""

    def __init__(self, until: float) -> None:
        self.until = until


class Call(Step):
    """A request to the broker.  The schedule executes it when it likes, or never."""

    def __init__(
        self,
        owner: Owner,
        after: int,
        messages: Sequence[Message] | None,
        *,
        force: bool = False,
    ) -> None:
        self.owner = owner
        self.force = force
        self.after = after
        self.messages = messages
        """None: it opens the lane."""
        self.response: Standing | Appended | None = None
        """None: it was not executed yet."""

    def fails(self, kind: StopKind) -> Stop | Appended:
        """A response without a result."""
        stop = Stop(kind, "")
        return stop if self.messages is None else Appended(self.after, stop)


class Wire:
    """The broker of an owner."""

    async def open(
        self, lane: str, owner: Owner, after: int, receipt: str | None, *, force: bool = False
    ) -> Any:
        return await Call(owner, after, None, force=force)

    async def append(self, lane: str, owner: Owner, after: int, messages: Sequence[Message]) -> Any:
        return await Call(owner, after, messages)


class Admission:
    """Admission control with one slot for each lane."""

    is_sending = False
    """Whether the request can be preempted."""

    async def send(self, slot: Any, sending: Coroutine[Any, Any, Any]) -> Any:
        self.is_sending = True
        try:
            return await sending
        except Preempted:
            return AttemptResult.failed(Failure.TIMEOUT, "preempted", 0.0)
        finally:
            self.is_sending = False


class Store:
    """The store of lanes: each read is a step."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def _db(self) -> Database:
        return self._world.database

    async def identity(self) -> str:
        await Step()
        return IDENTITY

    async def delivery_at(self, lane: Any, seq: int) -> FoundDelivery | None:
        await Step()
        return self._db.delivery_at(seq)

    async def repair(self, lane_id: int) -> Repair | None:
        await Step()
        return self._db.repair

    async def lost_deliveries(self, lane: Any, after: int, through: int, *_: int) -> LostDeliveries:
        await Step()
        return self._db.lost_deliveries(after, through, REFILL_MAX)


class Recorder:
    """The recorder of one owner: groups of records, each written in one step."""

    def __init__(self, world: World, lane: Lane, epoch: int) -> None:
        self._world = world
        self._lane = lane
        self._epoch = epoch
        self.pending: list[Record] = []

    def write_group(self) -> None:
        """Write what is pending."""
        group, self.pending = self.pending, []
        self._world.database.write(self._epoch, group)
        for record in group:
            self._lane.confirm_recorded(record)

    def checkpoint(self) -> None:
        """Write a checkpoint."""
        self._world.database.checkpoint(self._epoch, self._lane.checkpoint())

    async def write(self, record: Record) -> None:
        self.pending.append(record)
        await self.flush()

    async def flush(self) -> None:
        await Step()
        self.write_group()

    async def acknowledge_found(
        self, lane: Lane, epoch: int, through: int, batch: int, at: float
    ) -> None:
        await Step()
        self._world.database.write_found(epoch, through, batch, at)

    async def write_end(self, lane: Lane, epoch: int, seq: int) -> None:
        await Step()
        self._world.database.write_end(epoch, seq)

    async def finish_repair(self, lane: Lane, epoch: int, repair: Repair) -> None:
        await Step()
        self._world.database.finish_repair(epoch, repair)


class LaneOwner:
    """One owner, from its claim on."""

    def __init__(self, world: World, lanes: type[Lane], attempts: type[BrokerAttempts]) -> None:
        self._world = world
        database, self.epoch = world.database, world.database.claim()
        snapshot = LaneSnapshot(
            1, database.last_seq, database.progress, database.tail(), ended=database.ended
        )
        stream = StreamPosition(end_written=database.end_seq is not None)
        self.lane = lanes(snapshot, 0, batch_max=BATCH_MAX, stream=stream)
        self.lane.clamp_times(POLICY, world.now)
        self.recorder = Recorder(world, self.lane, self.epoch)
        self.held: Failure | None = None
        """Why the lane could not be opened the last time, if it is held."""
        self.holds = 0
        """How often it was held for that since."""
        self.runtime = SimpleNamespace(
            share=BufferBudget().share_of(1),
            epoch=self.epoch,
            broker=Wire(),
            endpoint=SimpleNamespace(
                name="shop", headers=NO_HEADERS, message_format=ENVELOPE, retryable=RETRYABLE,
                retry=POLICY, blocks=False, on_forgotten="hold",
                kept_response=lambda response, _: response,
            ),
            breaker=_Breaker(),
            reported=_Reported(),
            grace=GracePeriod(0.0),
            budget_s=lambda since, at: 0.0 if since is None else at - since,
            signing=SigningClock(ClockDifference()),
            lanes={},
            stopped=False,
        )  # fmt: skip
        self._of_relay = cast(
            "Any",
            SimpleNamespace(
                state=self.lane, loaded=SimpleNamespace(id=1, name=LANE, lanes=1), slot=None,
                runtime=self.runtime, repair=None, repaired=None,
                requests=SimpleNamespace(signed_by=None),
            ),
        )  # fmt: skip
        self.lease_left_s = 1.0
        self.admission = Admission()
        store, reading = cast("LaneStore", Store(world)), asyncio.Lock()
        recorder, admission = cast("Any", self.recorder), cast("Any", self.admission)
        self._attempts = attempts(
            store,
            reading,
            recorder,
            admission,
            lambda: self.lease_left_s,
            lambda: 0.0,
            lambda: world.now,
        )
        self._run = self._work()
        self.waits: Step = self._run.send(None)

    def resume(self, response: Any = None) -> None:
        """Let it continue, up to the next step.

        Raises:
            Fenced: another owner has claimed the endpoint.
        """
        self.waits = self._run.send(response)

    def preempt(self) -> None:
        """Cancel its request."""
        self.waits = self._run.throw(Preempted())

    def kill(self) -> None:
        self._run.close()

    def reconfigure(self) -> None:
        """Change the credentials, or resume the endpoint, see `EndpointRuntime.apply_settings`."""
        self.runtime.broker = Wire()
        self.lane.retry_now(self._world.now)
        self.lane.reopen()

    def mark_ended(self) -> None:
        """Begin a newer generation, see `EndpointRuntime.add_lanes`."""
        self.lane.mark_ended()

    def apply_changes(self) -> None:
        """Apply what the operator has requested, see `Dispatcher.update_endpoints`."""
        database = self._world.database
        if database.ended:
            self.mark_ended()
        if database.repair is not None:
            self.lane.reopen()
            self.lane.retry_now(self._world.now)
            self.held = None

    async def _work(self) -> None:
        while True:
            match self.lane.next(self._world.now):
                case Send() | Open() | End() as send:
                    await self._attempt(send)
                case Record() as record:
                    await self.recorder.write(record)
                case Fetch() as fetch:
                    await Step()
                    self.lane.append_fetched(self._world.database.read(fetch, ROWS_PER_FETCH))
                case Wait(until=until):
                    await Sleep(until)
                case None:
                    await Sleep(inf)

    async def _attempt(self, send: Send | Open | End) -> None:
        """Make one attempt, see `AttemptSender` and `Dispatcher`."""
        if self._world.rng.random() < 0.3:
            await Step()  # It waits for a slot.
            left = revalidate(self._of_relay, send, BreakerState.HEALTHY, self._world.now)
            if left is None:
                self.lane.cancel_send()
                return
            send = left
        appended = None
        if isinstance(send, Open):
            response = await self._attempts.open(self._of_relay, self.runtime.broker)
            self._note_hold(response)
            if response is None:
                return
        else:
            attempts, given = self._attempts, (self._of_relay, self.runtime.broker)
            result = await (
                attempts.end(*given, send)
                if isinstance(send, End)
                else attempts.append(*given, send)
            )
            if result is None:
                self.lane.cancel_send()
                return
            response, appended = result
        attempt = Attempt(send, self._world.now, response, False, None, appended)
        telemetry: Any = _Telemetry()
        world = self._world
        breakers = BreakerFollowUp(
            cast("Any", self.admission), lambda _: True, lambda: True, lambda: None,
            lambda: world.now, world.rng, telemetry,
        )  # fmt: skip
        _, accepted, record = settle(
            self._of_relay, attempt, world.now, world.rng, breakers, telemetry
        )
        if accepted is not None:
            self.recorder.pending += [Record(self.lane.id, row.seq, row) for row in accepted.rows]
        if record is not None and record.urgent:
            await self.recorder.write(record)
        elif record is not None:
            self.recorder.pending.append(record)

    def _note_hold(self, response: AttemptResult | None) -> None:
        failure = None if response is None else response.failure
        held = failure if failure in HOLDS else None
        self.holds = self.holds + 1 if held is not None and held is self.held else 1
        self.held = held


class _Breaker:
    """A circuit breaker that stays closed."""

    state = BreakerState.HEALTHY

    def blocks_all(self, _: float) -> bool:
        return False

    def record_result(self, outcome: Any, *_: Any, **__: Any) -> Any:
        return outcome

    def released(self, _: int) -> None:
        pass


class _Reported:
    def record_failure(self, *_: Any, **__: Any) -> _Reported:
        return self


class _Telemetry:
    def batch_completed(self, *_: Any) -> None:
        pass

    attempt_completed = open_failed = batch_completed

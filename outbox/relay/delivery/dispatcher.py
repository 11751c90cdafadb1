"""The dispatcher: moves deliveries out of the lanes that this replica owns.

A lane that has something to do is *active*: one task asks it what to do next
and does it, until it has to wait for rows, for a time, for its turn or for
news.  What an endpoint's health allows is asked before every request; when
that changes, all its lanes that owe something are heard again.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

from outbox.core.delivery.batch import classify_batch
from outbox.core.delivery.circuit_breaker import PROBED, State
from outbox.core.delivery.commands import Fetch, Record, Send, Wait
from outbox.core.delivery.operational_events import is_operational
from outbox.core.model.http_status import GONE
from outbox.core.model.response import Verdict, classify, retry_after_s, summary, without
from outbox.relay.delivery.admission import Queueing
from outbox.relay.delivery.fetcher import Reader
from outbox.relay.delivery.owned_endpoints import OwnedEndpoint, OwnedLane, later
from outbox.relay.delivery.telemetry import Observer
from outbox.store.records import Fenced

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from uuid import UUID

    from outbox.core.admission.endpoint_queue import Why
    from outbox.core.admission.request_scheduler import Turns
    from outbox.core.delivery.lane import Lane
    from outbox.core.delivery.message import Delivery
    from outbox.core.model.response import Answer
    from outbox.destinations.interface import Transport
    from outbox.relay.delivery.recorder import Recorder
    from outbox.store.endpoints import Endpoint
    from outbox.store.lanes import LaneStore, LoadedLane
    from outbox.telemetry.tracing import AttemptSpan


# By name: Python 3.11 takes far longer to find the members of an enumeration.
_DELIVERED, _HEALTHY = Verdict.DELIVERED, State.HEALTHY


class Dispatcher:
    """Delivers what the lanes that it was given owe.

    Args:
        store: for the reader alone.
        lease_left_s: how long this replica may still send.
        turns: who may send.
        on_quiet: called when a lane that was stopped has nothing in flight
            any more.
        on_health: called when an endpoint's health changed, or it wants checkpoints.
        now: epoch seconds.
        rng: for the jitter of retries and probes.
    """

    def __init__(
        self,
        store: LaneStore,
        recorder: Recorder,
        transport: Transport,
        lease_left_s: Callable[[], float],
        turns: Turns,
        on_quiet: Callable[[], None] = lambda: None,
        on_health: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._reader = Reader(store, self._activate)
        self._recorder = recorder
        self._transport = transport
        self._lease_left_s = lease_left_s
        self._queueing = Queueing(turns)
        self._loop = asyncio.get_running_loop()
        self._on_quiet = on_quiet
        self._on_health = on_health
        self._now = now
        self._observer = observer or Observer()
        self._rng = rng or random.Random()  # noqa: S311 (jitter needs no secrecy)
        self._owned: dict[UUID, OwnedEndpoint] = {}
        self._lanes: dict[int, OwnedLane] = {}
        # Those whose health changed, for whoever looks after that.
        self._changed: set[UUID] = set()
        # None before it runs, and as soon as it is ending.
        self._tasks: asyncio.TaskGroup | None = None

    # ---------------------------------------------------------- what is owned

    def lane(self, lane_id: int) -> Lane:
        """An owned lane."""
        return self._lanes[lane_id].machine

    def endpoints(self) -> list[Endpoint]:
        """Every owned endpoint."""
        return [owned.endpoint for owned in self._owned.values()]

    def owned(self) -> list[OwnedEndpoint]:
        """Every owned endpoint with its lanes and health."""
        return list(self._owned.values())

    def take_changed(self) -> list[OwnedEndpoint]:
        """The owned endpoints whose health changed since this was last asked."""
        changed, self._changed = self._changed, set()
        return self._those(changed)

    def adopt(
        self,
        loaded: Iterable[LoadedLane],
        endpoints: Mapping[UUID, Endpoint],
        epochs: Mapping[UUID, int],
        sent_through_batch: int,
    ) -> None:
        """Begin with endpoints that were just claimed, and all their lanes.

        Args:
            sent_through_batch: deliveries up to this batch may have been sent
                by the last owner.
        """
        for endpoint_id, endpoint in endpoints.items():
            meters = self._observer.meters.taken(endpoint.name)
            epoch = epochs[endpoint_id]
            line = self._queueing.turns.join(
                endpoint.tenant, endpoint.in_flight_max, endpoint.rate_per_s
            )
            self._owned[endpoint_id] = OwnedEndpoint(endpoint, epoch, self._now(), meters, line)
        self._add_lanes(loaded, sent_through_batch)
        self._note_checkpoints(endpoints.values())

    def renew_lanes(self, loaded: Iterable[LoadedLane]) -> None:
        """The number of lanes was changed: all that the endpoints have now."""
        lanes = list(loaded)
        self.offer({lane.id: lane.last_seq for lane in lanes})
        # Nobody else ever had the new ones.
        self._add_lanes(lanes, sent_through_batch=0)

    def _add_lanes(self, loaded: Iterable[LoadedLane], sent_through_batch: int) -> None:
        of_endpoint: dict[UUID, list[LoadedLane]] = {}
        for lane in loaded:
            of_endpoint.setdefault(lane.endpoint_id, []).append(lane)
        for endpoint_id, lanes in of_endpoint.items():
            home = self._owned[endpoint_id]
            for owned in home.add(lanes, sent_through_batch, self._now()):
                self._lanes[owned.loaded.id] = owned
            self._activate_all(home)

    def update(self, endpoints: Collection[Endpoint], lifted: set[int]) -> None:
        """Settings were changed, or an operator let something go on.

        Args:
            lifted: the lanes that do not wait for an operator any more.
        """
        for endpoint in endpoints:
            home = self._owned[endpoint.id]
            before = home.health.state
            if endpoint.name != home.endpoint.name:
                self._observer.meters.left(home.meters)
                home.meters = self._observer.meters.taken(endpoint.name)
            home.change(endpoint, self._now())
            self._queueing.change(home.line, endpoint)
            self._reconsider(home)
            for lane_id in home.lanes.keys() & lifted:
                home.lanes[lane_id].machine.unblock()
                # Also when it owes nothing: newer generations may wait for it.
                self._activate(home.lanes[lane_id])
            if home.health.state is not before:
                self._observer.health(home, self._now())
                self._note_health(home)
            self._activate_all(home)
            self._attend(home)
        self._note_checkpoints(endpoints)

    def clock_jumped(self) -> None:
        """The clock was set: whoever waits for a time works out anew how long."""
        for home in self._owned.values():
            home.hold_to(self._now())
            self._activate_all(home)
            self._attend(home)

    def reread(self) -> None:
        """Events were erased: what lanes have in hand is read again before it is sent."""
        for home in self._owned.values():
            for lane in home.lanes.values():
                lane.machine.reread()
            self._reconsider(home)
            self._activate_all(home)

    def stop(self, endpoint_ids: Iterable[UUID]) -> None:
        """Send nothing more to the endpoints; what is in flight still ends."""
        for home in self._those(endpoint_ids):
            home.stopped = True
            home.clear_timers()
            for lane in home.lanes.values():
                lane.machine.stop()
            self._reconsider(home)

    def quiet_ones(self, endpoint_ids: Iterable[UUID]) -> list[Endpoint]:
        """Those of stopped endpoints of which nothing is in flight any more."""
        return [
            home.endpoint
            for home in self._those(endpoint_ids)
            if all(lane.task is None for lane in home.lanes.values())
        ]

    async def quiet(self, endpoint_ids: Iterable[UUID]) -> None:
        """Wait until nothing of stopped endpoints is in flight any more."""
        lanes = [lane for home in self._those(endpoint_ids) for lane in home.lanes.values()]
        tasks = [lane.task for lane in lanes if lane.task]
        if tasks:
            await asyncio.wait(tasks)

    def drop(self, endpoint_ids: Iterable[UUID]) -> list[Lane]:
        """Forget endpoints whose lanes are quiet; returns their lanes."""
        dropped: list[Lane] = []
        for endpoint_id in endpoint_ids:
            home = self._owned.pop(endpoint_id)
            self._observer.meters.left(home.meters)
            self._queueing.turns.leave(home.line)
            for lane in home.lanes.values():
                del self._lanes[lane.loaded.id]
                dropped.append(lane.machine)
        return dropped

    def cut(self, owned: OwnedEndpoint, through: Mapping[int, int]) -> None:
        """Give up what lanes of an endpoint owe up to these numbers."""
        for lane_id, seq in through.items():
            lane = owned.lanes[lane_id]
            lane.machine.cut(seq, "backlog")
            self._queueing.dismiss([lane.turn])
            self._activate(lane)

    def wants(self, lane_ids: Iterable[int]) -> dict[int, LoadedLane]:
        """Those of the lanes that have nothing left to read but what they are given now."""
        lanes = (self._lanes[each] for each in lane_ids if each in self._lanes)
        return {lane.loaded.id: lane.loaded for lane in lanes if lane.runs_dry}

    def offer(
        self,
        last_seqs: Mapping[int, int],
        given: Mapping[int, Iterable[Delivery]] | None = None,
    ) -> None:
        """Lanes were given deliveries up to these numbers, owned ones and others.

        A lane that has something in hand is at work, or waits for what will
        wake it; one that has nothing is woken by what is read for it.

        Args:
            given: by lane, what need not be read for it.
        """
        now = self._now()
        for lane_id, last_seq in last_seqs.items():
            lane = self._lanes.get(lane_id)
            if lane is None:
                continue
            lane.machine.offered(last_seq, now)
            if given and lane_id in given:
                lane.machine.given(given[lane_id])
                self._activate(lane)
            if lane.home.endpoint.usable and (fetch := lane.machine.fetch()) is not None:
                self._reader.want(lane, fetch)

    def _those(self, endpoint_ids: Iterable[UUID]) -> list[OwnedEndpoint]:
        return [self._owned[each] for each in endpoint_ids if each in self._owned]

    # ------------------------------------------------------------- delivering

    async def run(self) -> None:
        """Deliver until cancelled, which closes what is in flight.

        Raises:
            Fenced: the lease ran out, or another replica took over.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for home in self._owned.values():
                    self._activate_all(home)
                try:
                    await self._reader.run()
                finally:
                    self._tasks = None
        finally:
            self._queueing.close()
            for home in self._owned.values():
                home.clear_timers()

    def _activate_all(self, home: OwnedEndpoint) -> None:
        for lane in home.lanes.values():
            if lane.machine.owed:
                self._activate(lane)

    def _activate(self, lane: OwnedLane) -> bool:
        """Have a task work for the lane; False when it may not."""
        if lane.task is not None:
            return True
        if self._tasks is None or lane.home.stopped or not lane.home.endpoint.usable:
            return False
        lane.clear_timer()
        lane.task = self._tasks.create_task(self._work(lane))
        return True

    def _attend(self, home: OwnedEndpoint) -> None:
        """Give lanes their turns, and come back when the next one may be had."""
        if home.timer is not None:
            home.timer.cancel()
            home.timer = None
        if self._tasks is None or home.stopped:
            return
        while woken := home.health.wake(self._now()):
            for lane_id in woken:
                if not self._activate(home.lanes[lane_id]):
                    home.health.passed(lane_id)
        if (wake_at := home.health.wake_at()) is not None:
            home.timer = later(wake_at - self._now(), self._attend, home)

    async def _work(self, lane: OwnedLane) -> None:
        """Do what the lane says until it has to wait."""
        home, machine = lane.home, lane.machine
        try:
            now = self._now()
            while home.endpoint.usable:
                match machine.next(now, lane.gate(now)):
                    case Send() as send:
                        home.health.began(lane.loaded.id)
                        now = await self._send(lane, send, now)
                    case Record() as record:
                        await self._recorder.write(machine, home.epoch, record)
                        now = self._now()
                        self._observer.given_up(lane, record, now)
                    case Fetch() as fetch:
                        self._reader.want(lane, fetch)
                        return
                    case Wait(until=until):
                        lane.timer = later(until - self._now(), self._activate, lane)
                        return
                    case None:
                        return
        except BaseException:
            # The group is ending, and takes no more tasks: news is for nobody.
            self._tasks = None
            raise
        finally:
            lane.task = None
            self._rest(lane)

    def _rest(self, lane: OwnedLane) -> None:
        """The lane has nothing to do for now: who may go on instead?"""
        home = lane.home
        drained = lane.loaded.ended and lane.machine.drained
        if drained and home.generations.drained(lane.loaded.id, lane.loaded.generation):
            self._activate_all(home)
        if home.health.passed(lane.loaded.id) or home.timer is None:
            self._attend(home)
        if home.stopped:
            self._on_quiet()

    async def _send(self, lane: OwnedLane, send: Send, started_at: float) -> float:
        """One attempt, and what follows from its answer; returns when it was over.

        Args:
            started_at: epoch seconds; later, if it has to wait for its turn.
        """
        home, machine = lane.home, lane.machine
        if (more := machine.fetch()) is not None:
            self._reader.want(lane, more)
        state, queueing = home.health.state, self._queueing
        begun = at_once = queueing.begin(lane.turn)
        if not at_once:
            begun = await queueing.wait(lane.turn)
            started_at = self._now()
        answered = False
        try:
            if self._lease_left_s() <= 0:
                raise Fenced
            if not at_once:
                is_sent = (
                    begun
                    and not home.stopped
                    and home.health.state is state
                    and not home.health.silent(started_at)
                )
                left = machine.still(send, started_at) if is_sent else None
                if left is None:
                    # It would not be sent by now.
                    home.health.unsent(lane.loaded.id)
                    machine.unsent()
                    return started_at
                send = left
            # As of now: whoever changes the headers meanwhile changes what is sent next.
            credentials = home.endpoint.credentials
            request, span = self._observer.begins(
                lane, send, lane.request(send, started_at), started_at
            )
            if send.attempt == 1 and state is _HEALTHY:
                # While it is out: a lane that is alone waits for its receiver, not for us.
                self._loop.call_soon(lane.look_ahead, started_at)
            try:
                answer = await queueing.send(lane.turn, self._transport.send(request))
            except BaseException:
                self._observer.abandoned(span, self._now())
                raise
            answered = queueing.in_time(lane.turn, answer)
        finally:
            if begun:
                queueing.end(lane.turn, answered=answered)
        if credentials:
            answer = without(answer, credentials)
        now = self._now()
        verdict, record = self._settle(
            lane, send, answer, span, started_at, now, called_off=not answered
        )
        if not record.urgent:
            self._recorder.add(machine, home.epoch, record)
            if not self._recorder.full:
                return now
            await self._recorder.flushed()
            return self._now()
        await self._recorder.write(machine, home.epoch, record)
        if record.dead is None:
            self._observer.failed(lane, send, verdict, answer, record, now)
        else:
            self._observer.given_up(lane, record, now)
        return self._now()

    def _settle(
        self,
        lane: OwnedLane,
        send: Send,
        answer: Answer,
        span: AttemptSpan | None,
        started_at: float,
        now: float,
        *,
        called_off: bool,
    ) -> tuple[Verdict, Record]:
        """What follows from an answer: it is judged and told of.

        Returns:
            What it means, and what is to be written down, of several deliveries the last one.
        """
        home, machine = lane.home, lane.machine
        verdict, accepted_seq = _meaning(home.endpoint, send, answer)
        verdict = self._judge(home, send, verdict, answer, now)
        policy, u = home.endpoint.retry, self._rng.random()
        if len(send.batch) > 1:
            records = machine.batch_answered(
                send.batch, accepted_seq, verdict, answer, policy,
                started_at=started_at, now=now, u=u,
            )  # fmt: skip
            self._observer.batch_answered(lane, send, answer, records, span)
            for each in records[:-1]:
                self._recorder.add(machine, home.epoch, each)
            return verdict, records[-1]
        record = machine.answered(
            verdict, answer, policy,
            started_at=started_at, now=now, u=u,
            blocks=home.endpoint.blocks, called_off=called_off,
        )  # fmt: skip
        self._observer.answered(lane, send.delivery, answer, record, span)
        return verdict, record

    def _reconsider(self, home: OwnedEndpoint) -> None:
        """Whoever waits for a turn may not want it any more, or in another way."""
        if home.line.waiting:
            self._queueing.dismiss(list(home.line.waiting))

    def why_waiting(self, home: OwnedEndpoint) -> Why | None:
        """What lanes of an endpoint wait for that could be sent to; None: nothing."""
        return self._queueing.why(home.line)

    def _judge(
        self, home: OwnedEndpoint, send: Send, verdict: Verdict, answer: Answer, now: float
    ) -> Verdict:
        """What the answer means for the endpoint, and then for the delivery."""
        health = home.health
        before = health.state
        asked_s = None
        if verdict is _DELIVERED:
            health.answered(verdict, now, 0.0)
        else:
            asked_s = retry_after_s(answer.headers, now) if verdict is Verdict.RETRY else None
            verdict = health.answered(
                verdict,
                now,
                self._rng.random(),
                gone=answer.status == GONE,
                retry_after_s=asked_s or 0.0,
                last_answer=summary(answer),
            )
            ordinary = not is_operational(send.delivery.type)
            told = home.told.answered(health.state, now, ordinary=ordinary)
            if told != home.told:
                home.told = told
                self._note_health(home)
        if health.state is not before:
            self._observer.health(home, now)
            home.told = home.told.changed(health.state)
            self._note_health(home)
            if health.state in PROBED:
                for lane in home.lanes.values():
                    lane.machine.start_small()
            self._reconsider(home)
            # Whoever sleeps until a time of its own may have a turn sooner.
            self._activate_all(home)
            self._attend(home)
        elif health.state is not _HEALTHY:
            self._attend(home)
            if asked_s:
                self._note_health(home)  # The next owner has to leave it alone, too.
        return verdict

    def _note_checkpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Some of these may be due."""
        if any(endpoint.checkpoint_every_s is not None for endpoint in endpoints):
            self._on_health()

    def _note_health(self, home: OwnedEndpoint) -> None:
        """There is something new about it to be written down."""
        self._changed.add(home.endpoint.id)
        self._on_health()


def _meaning(endpoint: Endpoint, send: Send, answer: Answer) -> tuple[Verdict, int]:
    """What an answer means, and the last number that is delivered if it is a success."""
    before, retryable = send.maybe_sent_before, endpoint.retryable
    if send.batch:
        return classify_batch(send.batch, answer, maybe_sent_before=before, retryable=retryable)
    verdict = classify(answer, maybe_sent_before=before, retryable=retryable)
    return verdict, send.delivery.seq

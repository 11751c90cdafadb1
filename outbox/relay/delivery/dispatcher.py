"""The dispatcher: sends the deliveries of the lanes that this replica owns.

A lane with work is *active*: one task executes the lane's commands until the lane
waits for rows, for a time, for a slot or for new deliveries.  The endpoint's circuit
breaker is consulted before every request; when its state changes, all lanes of the
endpoint with pending deliveries are activated.
"""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from typing import TYPE_CHECKING

from outbox.core.cluster.observed_time import Odometer
from outbox.core.delivery.buffer_budget import BufferBudget
from outbox.core.delivery.commands import End, Fetch, Open, Record, Send, Wait
from outbox.relay.delivery.admission import AdmissionQueue
from outbox.relay.delivery.attempt import AttemptSender
from outbox.relay.delivery.broker_attempts import BrokerAttempts
from outbox.relay.delivery.fetcher import DeliveryFetcher
from outbox.relay.delivery.owned_endpoints import EndpointRuntime, LaneRuntime, call_later
from outbox.relay.delivery.settle import settle
from outbox.relay.delivery.telemetry import DeliveryTelemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from uuid import UUID

    from outbox.core.admission.endpoint_queue import WaitReason
    from outbox.core.admission.request_scheduler import RequestScheduler
    from outbox.core.brokers.repair import Repair
    from outbox.core.delivery.endpoint import Endpoint
    from outbox.core.delivery.lane import Lane
    from outbox.core.delivery.signing_clock import ClockDifference
    from outbox.core.model.delivery import Delivery
    from outbox.destinations.broker import Broker, BrokerFactory
    from outbox.destinations.interface import Transport
    from outbox.relay.delivery.attempts import Attempt, BreakerEffect
    from outbox.relay.delivery.recorder import Recorder
    from outbox.store.delivery.lanes import LaneStore, LoadedLane


RELEASE_WAIT_S = 1.0
"""A lane that waits longer releases the content of its deliveries, and reads it again later."""


class Dispatcher:
    """Sends the pending deliveries of owned lanes.

    Args:
        store: used by the delivery fetcher, and to open brokers' lanes.
        lease_left_s: remaining lease, in seconds; nothing is sent without it.
        scheduler: admission control.
        brokers: makes the brokers of endpoints; None: there are only HTTP receivers.
        on_idle: called when a stopped lane has no request in flight any more.
        wake_supervisor: called when an endpoint's state changed.
        now: epoch seconds.
        odometer: the observed time.
        rng: the source of the jitter of retries and probes.
        clocks: how far the relay's clock is from the database's; None: they agree.
        budget: what all lanes may hold in memory; None: the default.
    """

    def __init__(
        self,
        store: LaneStore,
        recorder: Recorder,
        transport: Transport,
        lease_left_s: Callable[[], float],
        scheduler: RequestScheduler,
        on_idle: Callable[[], None] = lambda: None,
        wake_supervisor: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.time,
        odometer: Odometer | None = None,
        rng: random.Random | None = None,
        telemetry: DeliveryTelemetry | None = None,
        brokers: BrokerFactory | None = None,
        clocks: ClockDifference | None = None,
        budget: BufferBudget | None = None,
    ) -> None:
        self._budget = budget or BufferBudget()
        self._brokers = brokers
        self._clocks = clocks
        reading = asyncio.Lock()
        self._fetcher = DeliveryFetcher(store, reading, self._activate)
        self._recorder = recorder
        self._admission = AdmissionQueue(scheduler, wake_supervisor)
        self._telemetry = telemetry or DeliveryTelemetry()
        self._attempts = AttemptSender(
            transport, self._admission, self._fetcher, recorder, self._telemetry,
            BrokerAttempts(
                store, reading, recorder, self._admission, lease_left_s,
                asyncio.get_running_loop().time, now,
            ),
            lease_left_s, now,
        )  # fmt: skip
        self._on_idle = on_idle
        self._wake_supervisor = wake_supervisor
        self._now = now
        self._odometer = odometer or Odometer()
        self._rng = rng or random.Random()  # noqa: S311 (jitter needs no secrecy)
        self._owned: dict[UUID, EndpointRuntime] = {}
        self._lanes: dict[int, LaneRuntime] = {}
        # Endpoints whose state changed, for the endpoint supervisor.
        self._changed: set[UUID] = set()
        # None before it runs, and as soon as it is ending.
        self._tasks: asyncio.TaskGroup | None = None

    # ---------------------------------------------------------- what is owned

    def lane(self, lane_id: int) -> Lane:
        """An owned lane."""
        return self._lanes[lane_id].state

    def endpoints(self) -> list[Endpoint]:
        """Every owned endpoint."""
        return [owned.endpoint for owned in self._owned.values()]

    def owned(self) -> list[EndpointRuntime]:
        """Every owned endpoint with its lanes and circuit breaker."""
        return list(self._owned.values())

    def pop_changed(self) -> list[EndpointRuntime]:
        """The owned endpoints whose state changed since the last call."""
        changed, self._changed = self._changed, set()
        return self._owned_among(changed)

    def add_endpoints(
        self,
        loaded: Iterable[LoadedLane],
        endpoints: Mapping[UUID, Endpoint],
        epochs: Mapping[UUID, int],
        sent_through_batch: int,
    ) -> None:
        """Add newly claimed endpoints and all their lanes.

        Args:
            sent_through_batch: the last owner may have sent deliveries up to this batch.
        """
        for endpoint_id, endpoint in endpoints.items():
            meters = self._telemetry.meters.acquire(endpoint.name)
            epoch = epochs[endpoint_id]
            queue = self._admission.scheduler.add_endpoint(
                endpoint.tenant, endpoint.in_flight_max, endpoint.rate_per_s
            )
            self._owned[endpoint_id] = EndpointRuntime(
                endpoint, epoch, self._now(), meters, queue, self._odometer,
                partial(self._record_unsolicited, endpoint_id), self._brokers, self._clocks,
                self._budget,
            )  # fmt: skip
        self._add_lanes(loaded, sent_through_batch)

    def replace_lanes(self, loaded: Iterable[LoadedLane]) -> None:
        """Replace the lanes of endpoints whose number of lanes was changed."""
        lanes = list(loaded)
        self.notify_new_deliveries({lane.id: lane.last_seq for lane in lanes})
        # The new lanes never had another owner.
        self._add_lanes(lanes, sent_through_batch=0)
        for endpoint_id in {lane.endpoint_id for lane in lanes}:
            for owned in list(self._owned[endpoint_id].lanes.values()):
                self._forget_drained(owned)

    def _add_lanes(self, loaded: Iterable[LoadedLane], sent_through_batch: int) -> None:
        of_endpoint: dict[UUID, list[LoadedLane]] = {}
        for lane in loaded:
            of_endpoint.setdefault(lane.endpoint_id, []).append(lane)
        for endpoint_id, lanes in of_endpoint.items():
            runtime = self._owned[endpoint_id]
            for owned in runtime.add_lanes(lanes, sent_through_batch, self._now()):
                self._lanes[owned.loaded.id] = owned
            self._activate_all(runtime)

    def update_endpoints(
        self,
        endpoints: Collection[Endpoint],
        lifted: set[int],
        skipped: Mapping[int, int],
        repairs: Mapping[int, Repair],
    ) -> None:
        """Apply changed settings and operators' decisions.

        Args:
            lifted: lanes that were unblocked.
            skipped: the sequence number of the delivery that was skipped last, by lane.
            repairs: what was requested for its stream, by lane.
        """
        for endpoint in endpoints:
            runtime = self._owned[endpoint.id]
            before = runtime.breaker.state
            if endpoint.name != runtime.endpoint.name:
                self._telemetry.meters.release(runtime.meters)
                runtime.meters = self._telemetry.meters.acquire(endpoint.name)
            self._close_broker(runtime.apply_settings(endpoint, self._now()))
            self._admission.change_endpoint(runtime.queue, endpoint)
            self._requeue(runtime)
            for lane_id in runtime.lanes.keys() & skipped.keys():
                runtime.lanes[lane_id].state.skip(skipped[lane_id])
            for lane_id in runtime.lanes.keys() & repairs.keys():
                runtime.lanes[lane_id].request_repair(repairs[lane_id], self._now())
            for lane_id in runtime.lanes.keys() & lifted:
                runtime.lanes[lane_id].state.unblock()
                # Also without pending deliveries: newer generations may wait for it.
                self._activate(runtime.lanes[lane_id])
            if runtime.breaker.state is not before:
                self._telemetry.breaker_changed(runtime, self._now())
                self._mark_changed(runtime)
            self._activate_all(runtime)
            self._schedule_probes(runtime)

    def clock_jumped(self) -> None:
        """Recompute all timers after the clock was set."""
        for runtime in self._owned.values():
            runtime.clamp_times(self._now())
            self._activate_all(runtime)
            self._schedule_probes(runtime)

    def reread(self) -> None:
        """Discard delivery buffers after events were erased; lanes read them again."""
        for runtime in self._owned.values():
            for lane in runtime.lanes.values():
                lane.state.invalidate_buffer()
            self._requeue(runtime)
            self._activate_all(runtime)

    def stop(self, endpoint_ids: Iterable[UUID]) -> None:
        """Start no further requests to the endpoints; requests in flight complete."""
        for runtime in self._owned_among(endpoint_ids):
            runtime.stopped = True
            runtime.clear_timers()
            for lane in runtime.lanes.values():
                lane.state.stop()
            self._requeue(runtime)

    def drained_endpoints(self, endpoint_ids: Iterable[UUID]) -> list[Endpoint]:
        """The stopped endpoints without requests in flight."""
        return [
            runtime.endpoint
            for runtime in self._owned_among(endpoint_ids)
            if all(lane.task is None for lane in runtime.lanes.values())
        ]

    async def drain(self, endpoint_ids: Iterable[UUID]) -> None:
        """Wait until stopped endpoints have no requests in flight."""
        lanes = [
            lane for runtime in self._owned_among(endpoint_ids) for lane in runtime.lanes.values()
        ]
        tasks = [lane.task for lane in lanes if lane.task]
        if tasks:
            await asyncio.wait(tasks)

    def drop(self, endpoint_ids: Iterable[UUID]) -> list[Lane]:
        """Remove drained endpoints; return their lanes."""
        dropped: list[Lane] = []
        for endpoint_id in endpoint_ids:
            runtime = self._owned.pop(endpoint_id)
            self._telemetry.meters.release(runtime.meters)
            self._admission.scheduler.remove_endpoint(runtime.queue)
            self._close_broker(runtime.broker)
            for lane in runtime.lanes.values():
                del self._lanes[lane.loaded.id]
                lane.state.close()
                dropped.append(lane.state)
        return dropped

    def dead_letter_through(self, owned: EndpointRuntime, through: Mapping[int, int]) -> None:
        """Dead-letter the pending deliveries of lanes up to these sequence numbers."""
        for lane_id in through.keys() & owned.lanes.keys():
            lane, seq = owned.lanes[lane_id], through[lane_id]
            lane.state.dead_letter_through(seq, "backlog")
            self._admission.cancel_waiting([lane.slot])
            self._activate(lane)

    def needs_inline_payloads(self, lane_ids: Iterable[int]) -> dict[int, LoadedLane]:
        """The lanes whose delivery buffers need the payloads of a new batch at once: they
        have no other unread deliveries.
        """
        lanes = (self._lanes[each] for each in lane_ids if each in self._lanes)
        return {lane.loaded.id: lane.loaded for lane in lanes if lane.runs_dry}

    def notify_new_deliveries(
        self,
        last_seqs: Mapping[int, int],
        inline_deliveries: Mapping[int, Iterable[Delivery]] | None = None,
    ) -> None:
        """Process new deliveries of lanes, whether owned or not.

        A lane with a filled delivery buffer is active or has a wake-up of its own; an
        empty one is activated when its rows are read.

        Args:
            last_seqs: the last assigned sequence number of each lane.
            inline_deliveries: deliveries that need not be read, by lane.
        """
        now = self._now()
        for lane_id, last_seq in last_seqs.items():
            lane = self._lanes.get(lane_id)
            if lane is None:
                continue
            lane.state.extend_to(last_seq, now)
            if inline_deliveries and lane_id in inline_deliveries:
                lane.state.append(inline_deliveries[lane_id])
                self._activate(lane)
            if lane.runtime.endpoint.usable:
                self._fetcher.refill(lane)

    def _owned_among(self, endpoint_ids: Iterable[UUID]) -> list[EndpointRuntime]:
        return [self._owned[each] for each in endpoint_ids if each in self._owned]

    # ------------------------------------------------------------- delivering

    async def run(self) -> None:
        """Deliver until cancelled; cancelling closes requests in flight.

        Raises:
            Fenced: the lease expired, or another replica acquired an endpoint.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for runtime in self._owned.values():
                    self._activate_all(runtime)
                try:
                    await self._fetcher.run()
                finally:
                    self._tasks = None
        finally:
            self._admission.close()
            for runtime in self._owned.values():
                runtime.clear_timers()
                if runtime.broker is not None:
                    await runtime.broker.aclose()

    def _close_broker(self, broker: Broker | None) -> None:
        """Close a broker that is used no more."""
        if broker is not None and self._tasks is not None:
            self._tasks.create_task(broker.aclose())

    def _activate_all(self, runtime: EndpointRuntime) -> None:
        for lane in runtime.lanes.values():
            if lane.state.has_work:
                self._activate(lane)

    def _activate(self, lane: LaneRuntime) -> bool:
        """Start the lane's task if needed; False if the lane may not run."""
        if lane.task is not None:
            return True
        if self._tasks is None or lane.runtime.stopped or not lane.runtime.endpoint.usable:
            lane.release_content()
            return False
        lane.clear_timer()
        lane.task = self._tasks.create_task(self._work(lane))
        return True

    def _schedule_probes(self, runtime: EndpointRuntime) -> None:
        """Activate the lanes that the circuit breaker admits now, and set a timer for the
        next probe.
        """
        if runtime.timer is not None:
            runtime.timer.cancel()
            runtime.timer = None
        if self._tasks is None or runtime.stopped:
            return
        while woken := runtime.breaker.wake(self._now()):
            for lane_id in woken:
                lane = runtime.lanes.get(lane_id)
                if lane is None or not self._activate(lane):
                    runtime.breaker.yielded(lane_id)
        if (wake_at := runtime.breaker.wake_at()) is not None:
            runtime.timer = call_later(wake_at - self._now(), self._schedule_probes, runtime)

    async def _work(self, lane: LaneRuntime) -> None:
        """Execute the lane's commands until it has to wait."""
        runtime, lane_state = lane.runtime, lane.state
        try:
            now = self._now()
            while runtime.endpoint.usable:
                match lane_state.next(now, lane.gate(now)):
                    case Send() | Open() | End() as send:
                        attempt = await self._attempts.send(lane, send, now)
                        now = self._now() if attempt is None else await self._finish(lane, attempt)
                    case Record() as record:
                        written = await self._record(lane, record)
                        now = self._now()
                        self._telemetry.recorded_unsent(lane, written, now)
                    case Fetch() as fetch if runtime.breaker.is_admitted(lane.loaded.id):
                        # Its admission stays its own: every other lane would have to read, too.
                        await self._fetcher.read(lane, fetch)
                        if not lane_state.is_buffered:
                            return
                        now = self._now()
                    case Fetch() as fetch:
                        self._fetcher.request(lane, fetch)
                        return
                    case Wait(until=until):
                        wait_s = until - self._now()
                        if wait_s > RELEASE_WAIT_S:
                            lane.release_content()
                        lane.timer = call_later(wait_s, self._activate, lane)
                        return
                    case None:
                        break
            lane.release_content()
        except BaseException:
            # The task group is ending and accepts no more tasks.
            self._tasks = None
            raise
        finally:
            lane.task = None
            self._release_lane(lane)

    def _release_lane(self, lane: LaneRuntime) -> None:
        """End the lane's activity, and activate lanes that waited for it."""
        runtime = lane.runtime
        drained = lane.loaded.ended and lane.state.drained
        if drained and runtime.generations.remove_drained(lane.loaded.id, lane.loaded.generation):
            self._activate_all(runtime)
        if runtime.breaker.yielded(lane.loaded.id) or runtime.timer is None:
            self._schedule_probes(runtime)
        self._forget_drained(lane)
        if runtime.stopped:
            self._on_idle()

    def _forget_drained(self, lane: LaneRuntime) -> None:
        """Forget a lane of an older generation that is drained; the recorder needs its id only."""
        lane_id = lane.loaded.id
        if self._lanes.get(lane_id) is lane and lane.runtime.is_over(lane):
            del self._lanes[lane_id], lane.runtime.lanes[lane_id]
            lane.clear_timer()
            lane.state.close()

    async def _finish(self, lane: LaneRuntime, attempt: Attempt) -> float:
        """Settle a completed attempt and write its records; return when the lane may go on."""
        runtime, recorder, now = lane.runtime, self._recorder, self._now()
        settlement = settle(lane, attempt, now, self._rng, self._telemetry)
        self._follow_breaker(runtime, settlement.breaker)
        if settlement.accepted:
            recorder.add_run(lane.state, runtime.epoch, settlement.accepted)
        record = settlement.record
        if record is None or not record.urgent:
            if record is not None:
                recorder.add(lane.state, runtime.epoch, record)
            if not recorder.is_full(lane.state):
                return now
            await recorder.flush()
            return self._now()
        record = await self._record(lane, record)
        if record.dead is None:
            self._telemetry.attempt_failed(lane, attempt, settlement.outcome, record, now)
        else:
            self._telemetry.dead_lettered(lane, record, record.dead, now)
        return self._now()

    async def _record(self, lane: LaneRuntime, record: Record) -> Record:
        """Write a record; its lane waits if the database refuses its dead letter.

        Returns:
            What was written.
        """
        written = await self._recorder.write(lane.state, lane.runtime.epoch, record)
        if written is not record:
            self._telemetry.dead_letter_refused(lane, lane.state.hold_refused(self._now()))
        return written

    def _follow_breaker(self, runtime: EndpointRuntime, effect: BreakerEffect) -> None:
        """Act on what a result changed about the endpoint's circuit breaker."""
        if effect.must_be_stored:
            self._mark_changed(runtime)
        if effect.state_changed:
            self._requeue(runtime)
            # Lanes that sleep until a retry time may be admitted sooner.
            self._activate_all(runtime)
        if effect.probes_changed:
            self._schedule_probes(runtime)

    def _requeue(self, runtime: EndpointRuntime) -> None:
        """Cancel the endpoint's waiting requests, so that each lane decides again."""
        if runtime.queue.waiting:
            self._admission.cancel_waiting(list(runtime.queue.waiting))

    @property
    def buffered_bytes(self) -> int:
        """What deliveries and unwritten responses hold in memory."""
        return self._budget.held + self._budget.beyond + self._recorder.response_bytes

    @property
    def exhausted(self) -> str | None:
        """What this process has lacked for connections just now; None: nothing."""
        return self._admission.exhausted

    @property
    def missing_plugin(self) -> str | None:
        """What this installation lacks to deliver to an active endpoint; None: nothing."""
        active = (each for each in self._owned.values() if each.endpoint.state == "active")
        return next((lack for each in active if (lack := each.lack) is not None), None)

    def wait_reason(self, runtime: EndpointRuntime) -> WaitReason | None:
        """Why the sendable lanes of an endpoint wait for a slot; None: none waits."""
        return self._admission.wait_reason(runtime.queue)

    def _record_unsolicited(self, endpoint_id: UUID) -> None:
        """Record that the endpoint's receiver sent data that belongs to no request."""
        if (runtime := self._owned.get(endpoint_id)) is None:
            return
        reuse = runtime.reuse.record_unsolicited(self._now())
        if reuse is not runtime.reuse:
            runtime.reuse = reuse
            self._telemetry.unsolicited_data(runtime)
            self._mark_changed(runtime)

    def _mark_changed(self, runtime: EndpointRuntime) -> None:
        """Mark the endpoint's state as changed; the supervisor stores it."""
        self._changed.add(runtime.endpoint.id)
        self._wake_supervisor()

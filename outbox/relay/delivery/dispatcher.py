"""The dispatcher: the endpoints and lanes that this replica owns, and what changes about them.

`LaneWorker` sends their deliveries; `BreakerFollowUp` acts on changes of their circuit breakers.
"""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from typing import TYPE_CHECKING

from outbox.core.cluster.observed_time import Odometer
from outbox.core.delivery.buffer_budget import BufferBudget
from outbox.core.delivery.event_cache import EventCache
from outbox.relay.delivery.admission import AdmissionQueue
from outbox.relay.delivery.lane_worker import LaneWorker
from outbox.relay.delivery.owned_endpoints import EndpointRuntime, LaneRuntime
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
    from outbox.destinations.broker import BrokerFactory
    from outbox.destinations.interface import Transport
    from outbox.relay.delivery.recorder import Recorder
    from outbox.relay.sequencing.cursor import SequencedBatch
    from outbox.store.delivery.lanes import LaneStore, LoadedLane


class Dispatcher:
    """Registers owned endpoints and lanes, and reports their changes to what sends.

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
        self._recorder = recorder
        self._admission = AdmissionQueue(scheduler, wake_supervisor)
        self._telemetry = telemetry or DeliveryTelemetry()
        self._on_idle = on_idle
        self._now = now
        self._odometer = odometer or Odometer()
        rng = rng or random.Random()  # noqa: S311 (jitter needs no secrecy)
        # How often events were erased, as far as it is known.
        self._erasures = 0
        self._worker = LaneWorker(
            store, EventCache(self._budget.events_bytes_max), recorder, transport,
            self._admission, lease_left_s, self._release_lane, wake_supervisor, now, rng,
            self._telemetry,
        )  # fmt: skip
        self._breakers = self._worker.breakers
        self._owned: dict[UUID, EndpointRuntime] = {}
        self._lanes: dict[int, LaneRuntime] = {}

    async def run(self) -> None:
        """Deliver until cancelled; cancelling closes requests in flight.

        Raises:
            Fenced: the lease expired, or another replica acquired an endpoint.
        """
        try:
            await self._worker.run(self._owned.values())
        finally:
            self._admission.close()
            for runtime in self._owned.values():
                runtime.clear_timers()
                if runtime.broker is not None:
                    await runtime.broker.aclose()

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
        changed, self._breakers.changed = self._breakers.changed, set()
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
            self._breakers.activate_lanes(runtime)

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
            self._worker.close_broker(runtime.apply_settings(endpoint, self._now()))
            self._admission.change_endpoint(runtime.queue, endpoint)
            self._breakers.requeue(runtime)
            for lane_id in runtime.lanes.keys() & skipped.keys():
                runtime.lanes[lane_id].state.skip(skipped[lane_id])
            for lane_id in runtime.lanes.keys() & repairs.keys():
                runtime.lanes[lane_id].request_repair(repairs[lane_id], self._now())
            for lane_id in runtime.lanes.keys() & lifted:
                runtime.lanes[lane_id].state.unblock()
                # Also without pending deliveries: newer generations may wait for it.
                self._worker.activate(runtime.lanes[lane_id])
            if runtime.breaker.state is not before:
                self._telemetry.breaker_changed(runtime, self._now())
                self._breakers.mark_changed(runtime)
            self._breakers.activate_lanes(runtime)
            self._breakers.schedule_probes(runtime)

    def clock_jumped(self) -> None:
        """Recompute all timers after the clock was set."""
        for runtime in self._owned.values():
            runtime.clamp_times(self._now())
            self._breakers.activate_lanes(runtime)
            self._breakers.schedule_probes(runtime)

    def reread(self, erasures: int) -> None:
        """Discard what was read of events, because some were erased; lanes read them again.

        Args:
            erasures: how often events were erased.
        """
        self._erasures = erasures
        self._worker.fetcher.replace_events(EventCache(self._budget.events_bytes_max))
        for runtime in self._owned.values():
            for lane in runtime.lanes.values():
                lane.state.invalidate_buffer()
            self._breakers.requeue(runtime)
            self._breakers.activate_lanes(runtime)

    def stop(self, endpoint_ids: Iterable[UUID]) -> None:
        """Start no further requests to the endpoints; requests in flight complete."""
        for runtime in self._owned_among(endpoint_ids):
            runtime.stopped = True
            runtime.clear_timers()
            for lane in runtime.lanes.values():
                lane.state.stop()
            self._breakers.requeue(runtime)

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
            self._worker.close_broker(runtime.broker)
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
            self._worker.activate(lane)

    def notify_batch(self, sequenced: SequencedBatch) -> bool:
        """Process a batch of this replica's own; returns as `notify_new_deliveries` does."""
        # What was read before an erasure is sent by no lane that has not read it yet.
        if sequenced.contents and sequenced.erasures >= self._erasures:
            self._worker.fetcher.remember(sequenced, self._lanes)
        return self.notify_new_deliveries(sequenced.deliveries.counters)

    def notify_new_deliveries(self, last_seqs: Mapping[int, int]) -> bool:
        """Process new deliveries of lanes, whether owned or not.

        A lane with a filled delivery buffer is active or has a wake-up of its own; an
        empty one is activated when it has its rows.

        Args:
            last_seqs: the last assigned sequence number of each lane.

        Returns:
            Whether a lane had no other deliveries to send.
        """
        now, needed = self._now(), False
        for lane_id, last_seq in last_seqs.items():
            lane = self._lanes.get(lane_id)
            if lane is None:
                continue
            known_seq = lane.state.last_seq
            lane.state.extend_to(last_seq, now)
            if lane.runtime.usable:
                after_seq = self._worker.fetcher.refill(lane)
                needed |= after_seq is not None and after_seq >= known_seq
        return needed

    def _owned_among(self, endpoint_ids: Iterable[UUID]) -> list[EndpointRuntime]:
        return [self._owned[each] for each in endpoint_ids if each in self._owned]

    def _release_lane(self, lane: LaneRuntime) -> None:
        """Process the end of the task of a lane that is not needed much longer."""
        self._forget_drained(lane)
        if lane.runtime.stopped:
            self._on_idle()

    def _forget_drained(self, lane: LaneRuntime) -> None:
        """Forget a lane of an older generation that is drained; the recorder needs its id only."""
        lane_id = lane.loaded.id
        if self._lanes.get(lane_id) is lane and lane.runtime.is_over(lane):
            del self._lanes[lane_id], lane.runtime.lanes[lane_id]
            lane.clear_timer()
            lane.state.close()

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
            self._breakers.mark_changed(runtime)

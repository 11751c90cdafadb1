"""The worker: executes the commands of the lanes that have work.

A lane with work is *active*: one task executes the lane's commands until the lane waits for rows,
for a time, for a slot or for new deliveries.  The endpoint's circuit breaker is consulted before
every request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from outbox.core.delivery.commands import End, Fetch, Open, Record, Send, Wait
from outbox.relay.delivery.attempt_sender import AttemptSender
from outbox.relay.delivery.breaker_follow_up import BreakerFollowUp
from outbox.relay.delivery.broker_attempts import BrokerAttempts
from outbox.relay.delivery.fetcher import DeliveryFetcher
from outbox.relay.delivery.owned_endpoints import call_later
from outbox.relay.delivery.settle import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from random import Random

    from outbox.core.delivery.event_cache import EventCache
    from outbox.destinations.broker import Broker
    from outbox.destinations.interface import Transport
    from outbox.relay.delivery.admission import AdmissionQueue
    from outbox.relay.delivery.attempt import Attempt
    from outbox.relay.delivery.owned_endpoints import EndpointRuntime, LaneRuntime
    from outbox.relay.delivery.recorder import Recorder
    from outbox.relay.delivery.telemetry import DeliveryTelemetry
    from outbox.store.delivery.lanes import LaneStore


RELEASE_WAIT_S = 1.0
"""A lane that waits longer releases the content of its deliveries, and reads it again later."""


class LaneWorker:
    """Runs one task for each active lane.

    Args:
        store: used by the delivery fetcher, and to open brokers' lanes.
        events: the events that were read lately.
        lease_left_s: remaining lease, in seconds; nothing is sent without it.
        on_release: called when the task of a lane has ended whose generation is an older one, or
            whose endpoint is stopped.
        wake_supervisor: called when an endpoint's state changed.
        now: epoch seconds.
        rng: the source of the jitter of retries and probes.
    """

    def __init__(
        self,
        store: LaneStore,
        events: EventCache,
        recorder: Recorder,
        transport: Transport,
        admission: AdmissionQueue,
        lease_left_s: Callable[[], float],
        on_release: Callable[[LaneRuntime], None],
        wake_supervisor: Callable[[], None],
        now: Callable[[], float],
        rng: Random,
        telemetry: DeliveryTelemetry,
    ) -> None:
        self._recorder = recorder
        self._on_release = on_release
        self._now = now
        self._rng = rng
        self._telemetry = telemetry
        # None before it runs, and as soon as it is ending.
        self._tasks: asyncio.TaskGroup | None = None
        reading = asyncio.Lock()
        self.fetcher = DeliveryFetcher(store, reading, self.activate, events)
        self.breakers = BreakerFollowUp(
            admission, self.activate, lambda: self._tasks is not None, wake_supervisor, now, rng,
            telemetry,
        )  # fmt: skip
        self._attempts = AttemptSender(
            transport, admission, self.fetcher, recorder, telemetry,
            BrokerAttempts(
                store, reading, recorder, admission, lease_left_s,
                asyncio.get_running_loop().time, now,
            ),
            lease_left_s, now,
        )  # fmt: skip

    async def _work(self, lane: LaneRuntime) -> None:
        """Execute the lane's commands until it has to wait."""
        runtime, lane_state = lane.runtime, lane.state
        try:
            now = self._now()
            while runtime.usable:
                match lane_state.next(now, lane.gate(now)):
                    case Send() | Open() | End() as send:
                        self.fetcher.refill(lane)
                        attempt = await self._attempts.send(lane, send, now)
                        now = self._now() if attempt is None else await self._finish(lane, attempt)
                    case Record() as record:
                        written = await self._record(lane, record)
                        now = self._now()
                        self._telemetry.recorded_unsent(lane, written, now)
                    case Fetch() as fetch if runtime.breaker.is_admitted(lane.loaded.id):
                        # Its admission stays its own: every other lane would have to read, too.
                        await self.fetcher.read(lane, fetch)
                        if not lane_state.is_buffered:
                            return
                        now = self._now()
                    case Fetch() as fetch:
                        self.fetcher.request(lane, fetch)
                        return
                    case Wait(until=until):
                        wait_s = until - self._now()
                        if wait_s > RELEASE_WAIT_S:
                            lane.release_content()
                        lane.timer = call_later(wait_s, self.activate, lane)
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

    def activate(self, lane: LaneRuntime) -> bool:
        """Start the lane's task if needed; False if the lane may not run."""
        if lane.task is not None:
            return True
        if self._tasks is None or lane.runtime.stopped or not lane.runtime.usable:
            lane.release_content()
            return False
        lane.clear_timer()
        lane.task = self._tasks.create_task(self._work(lane))
        return True

    async def run(self, owned: Iterable[EndpointRuntime]) -> None:
        """Deliver until cancelled; cancelling closes requests in flight.

        Args:
            owned: the endpoints that are owned already.

        Raises:
            Fenced: the lease expired, or another replica acquired an endpoint.
        """
        async with asyncio.TaskGroup() as self._tasks:
            for runtime in owned:
                self.breakers.activate_lanes(runtime)
            try:
                await self.fetcher.run()
            finally:
                self._tasks = None

    def close_broker(self, broker: Broker | None) -> None:
        """Close a broker that is used no more."""
        if broker is not None and self._tasks is not None:
            self._tasks.create_task(broker.aclose())

    def _release_lane(self, lane: LaneRuntime) -> None:
        """End the lane's activity, and activate lanes that waited for it."""
        runtime, loaded = lane.runtime, lane.loaded
        drained = loaded.ended and lane.state.drained
        if drained and runtime.generations.remove_drained(loaded.id, loaded.generation):
            self.breakers.activate_lanes(runtime)
        breaker = runtime.breaker
        if breaker.yielded(loaded.id) or (runtime.timer is None and breaker.waiting):
            self.breakers.schedule_probes(runtime)
        if loaded.generation < runtime.newest_generation or runtime.stopped:
            self._on_release(lane)

    async def _finish(self, lane: LaneRuntime, attempt: Attempt) -> float:
        """Settle a completed attempt and write its records; return when the lane may go on."""
        epoch, recorder, now = lane.runtime.epoch, self._recorder, self._now()
        outcome, accepted, record = settle(
            lane, attempt, now, self._rng, self.breakers, self._telemetry
        )
        if accepted:
            recorder.add(lane.state, epoch, accepted)
        if record is None or record.progress is None:
            if record is not None:
                recorder.add(lane.state, epoch, record)
            if not recorder.is_full(lane.state):
                return now
            await recorder.flush()
            return self._now()
        record = await self._record(lane, record)
        if record.dead is None:
            self._telemetry.attempt_failed(lane, attempt, outcome, record, now)
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

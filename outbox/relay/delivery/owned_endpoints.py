"""Runtime state of owned endpoints and their lanes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, TypeVar

from outbox.core.admission.endpoint_queue import Slot
from outbox.core.cluster.observed_time import GracePeriod
from outbox.core.delivery.buffer_budget import BufferBudget
from outbox.core.delivery.circuit_breaker import BreakerState, CircuitBreaker
from outbox.core.delivery.commands import Gate
from outbox.core.delivery.lane import Lane
from outbox.core.delivery.lane_generations import LaneGenerations
from outbox.core.delivery.signing_clock import ClockDifference, SigningClock
from outbox.core.delivery.stream_position import StreamPosition
from outbox.core.model.redaction import SecretRedactor
from outbox.destinations.broker_address import broker_address
from outbox.destinations.brokers import UnusableBroker
from outbox.destinations.http.request import recipient_of
from outbox.relay.delivery.request_cache import RequestCache

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from outbox.core.admission.endpoint_queue import EndpointQueue
    from outbox.core.brokers.repair import Repair
    from outbox.core.cluster.observed_time import Odometer
    from outbox.core.delivery.endpoint import Endpoint
    from outbox.core.messages.signature import SigningKey
    from outbox.destinations.broker import Broker, BrokerFactory
    from outbox.store.delivery.lanes import LoadedLane
    from outbox.telemetry.meters import EndpointMeters

T = TypeVar("T")


def call_later(delay_s: float, call: Callable[[T], object], what: T) -> asyncio.TimerHandle:
    """Schedule a call on the event loop; a negative delay counts as 0."""
    return asyncio.get_running_loop().call_later(max(delay_s, 0.0), call, what)


class LaneRuntime:
    """A lane: its state machine and its task."""

    __slots__ = (
        "loaded",
        "read",
        "refilled_at",
        "repair",
        "repaired",
        "requests",
        "runtime",
        "slot",
        "state",
        "task",
        "timer",
    )

    def __init__(
        self, runtime: EndpointRuntime, loaded: LoadedLane, sent_through_batch: int
    ) -> None:
        self.runtime = runtime
        self.loaded = loaded
        stream = None
        if runtime.broker is not None:
            stream = StreamPosition(loaded.receipt, end_written=loaded.end_written)
        self.state = Lane(
            loaded,
            sent_through_batch,
            batch_max=runtime.endpoint.batch_max,
            stream=stream,
            share=runtime.share,
        )
        self.slot = Slot(runtime.queue)
        # What an operator has requested for the lane, and what was carried out of that but is not
        # deleted yet.
        self.repair: Repair | None = None
        self.repaired: Repair | None = None
        # When its stream was last refilled without a request, by the loop's clock.
        self.refilled_at = -inf
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        # Set while its task waits for a read.
        self.read: asyncio.Future[None] | None = None
        self.requests = RequestCache(runtime)

    def apply_failure_settings(self, endpoint: Endpoint) -> None:
        """Apply what its endpoint's settings say of deliveries that fail."""
        self.state.apply_policy(endpoint.retry, blocks=endpoint.blocks)
        self.state.holds_missing = endpoint.holds_missing
        self.state.probes = endpoint.probes

    def gate(self, now: float) -> Gate:
        """What lane generations and the circuit breaker allow the lane."""
        if not self.runtime.generations.may_send(self.loaded.generation):
            return Gate.SHUT
        return self.runtime.breaker.admit(self.loaded.id, now)

    def prefetch_next(self, now: float, keep_alive: bool) -> None:
        """Build the following request while the current one is in flight."""
        if (send := self.state.peek_next_send()) is not None:
            self.requests.prefetch(send, now, keep_alive=keep_alive)

    def cancel_send(self) -> None:
        """Report that an attempt was not made; the lane decides again."""
        self.runtime.breaker.released(self.loaded.id)
        self.state.cancel_send()

    def release_content(self) -> None:
        """Release what is in memory to be sent, because the lane waits long."""
        self.requests.prepared = None
        self.state.release_content()

    def request_repair(self, repair: Repair, now: float) -> None:
        """Open the lane again at once, if this is a new request of an operator."""
        if repair != self.repair:
            self.repair = repair
            self.state.reopen()
            self.state.retry_now(now)

    def clear_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class EndpointRuntime:
    """An endpoint: settings, circuit breaker, and the lanes of all generations.

    Args:
        odometer: the observed time.
        on_unsolicited: called when its receiver sent data that belongs to no request.
        brokers: makes the endpoint's broker, if its URL names one.
        clocks: how far the relay's clock is from the database's.
        budget: what all lanes of the relay may hold in memory.
    """

    __slots__ = (
        "_brokers",
        "_budget",
        "breaker",
        "broker",
        "endpoint",
        "epoch",
        "generations",
        "grace",
        "lanes",
        "lasting_keys",
        "meters",
        "newest_generation",
        "odometer",
        "queue",
        "recipient",
        "redactor",
        "reported",
        "reuse",
        "share",
        "signing",
        "stopped",
        "stored",
        "stored_unsolicited_at",
        "timer",
        "usable",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        epoch: int,
        now: float,
        meters: EndpointMeters,
        queue: EndpointQueue,
        odometer: Odometer,
        on_unsolicited: Callable[[], object] | None = None,
        brokers: BrokerFactory | None = None,
        clocks: ClockDifference | None = None,
        budget: BufferBudget | None = None,
    ) -> None:
        self._budget = budget or BufferBudget()
        self._configure(endpoint, on_unsolicited)
        self.signing = SigningClock(clocks or ClockDifference())
        self._brokers = brokers
        # None: the destination is an HTTP receiver.
        self.broker = self._make_broker()
        self.redactor = _redactor_of(endpoint)
        # Where its lanes wait for slots.
        self.queue = queue
        self.meters = meters
        self.epoch = epoch
        self.odometer = odometer
        self.begin_grace()
        self.breaker = CircuitBreaker(endpoint.health)
        self.breaker.clamp_times(now)
        if endpoint.resumes != endpoint.applied_resumes:
            self.breaker.resume(now)
        if endpoint.state == "paused":
            self.breaker.pause()
        # What operational events have reported about it.
        self.reported = endpoint.reported.clamp_times(now)
        # Breaker record and reported state as stored.
        self.stored = (endpoint.health, endpoint.reported)
        # Whether its connections are reused, and the stored part of that.
        self.reuse = endpoint.reuse.clamp_times(now)
        self.stored_unsolicited_at = endpoint.reuse.unsolicited_at
        self.generations = LaneGenerations()
        self.newest_generation = 0
        self.lanes: dict[int, LaneRuntime] = {}
        self.stopped = False
        self.timer: asyncio.TimerHandle | None = None

    def add_lanes(
        self, loaded: Iterable[LoadedLane], sent_through_batch: int, now: float
    ) -> list[LaneRuntime]:
        """Add lanes, and update known ones from newly read rows; return all of them.

        New lanes have a newer generation.  An unknown one of an older generation was forgotten
        because it is drained, but its last acknowledgements may not be written yet: read again, it
        would be sent again.
        """
        touched: list[LaneRuntime] = []
        known_generation = self.newest_generation
        for each in loaded:
            lane = self.lanes.get(each.id)
            if lane is None and each.generation <= known_generation:
                continue
            if lane is None:
                lane = self.lanes[each.id] = LaneRuntime(self, each, sent_through_batch)
                lane.state.clamp_times(self.endpoint.retry, now)
                lane.apply_failure_settings(self.endpoint)
            elif each.ended:
                # Its counter was read after the change, so it is final.
                lane.state.mark_ended()
                lane.loaded = each
            touched.append(lane)
        self.newest_generation = max(each.loaded.generation for each in self.lanes.values())
        self.generations = LaneGenerations(
            (lane.loaded.id, lane.loaded.generation)
            for lane in self.lanes.values()
            if lane.loaded.ended and not lane.state.drained
        )
        return touched

    def is_over(self, lane: LaneRuntime) -> bool:
        """Whether a lane of an older generation is drained, so that it is not needed any more.

        As when it is acquired: then a lane that is drained is not read at all.
        """
        return (
            lane.loaded.generation < self.newest_generation
            and lane.task is None
            and lane.read is None
            and lane.state.drained
        )

    def _make_broker(self) -> Broker | None:
        address = broker_address(self.endpoint)
        return None if address is None or self._brokers is None else self._brokers(address)

    @property
    def lack(self) -> str | None:
        """What this installation lacks to deliver to it; None: nothing."""
        return self.broker.lack if isinstance(self.broker, UnusableBroker) else None

    def begin_grace(self) -> None:
        """Let nothing end before this owner has tried again: see `GracePeriod`."""
        self.grace = GracePeriod(self.odometer.observed_s)

    def endable_lanes(self, limit_s: float) -> Collection[int]:
        """The lanes whose deliveries may end after a time: see `GracePeriod`."""
        return self.lanes.keys() if self._has_tried(limit_s) else self.untried_lanes()

    def untried_lanes(self) -> Collection[int]:
        """The lanes whose next delivery is not sent before an operator acts."""
        if not self.endpoint.usable or self.breaker.state is BreakerState.PAUSED:
            return self.lanes.keys()
        stopped, sending, later = set(), False, set()
        for lane_id, lane in self.lanes.items():
            if lane.state.blocked or lane.state.held:
                stopped.add(lane_id)
            elif not self.generations.may_send(lane.loaded.generation):
                later.add(lane_id)
            else:
                sending = sending or lane.state.has_work
        # Lanes of later generations wait for those of earlier ones, maybe only for stopped ones.
        return stopped if sending else stopped | later

    def budget_s(self, first_attempt_at: float | None, started_at: float) -> float:
        """How much of a delivery's budget of time is used up by an attempt that began then."""
        if first_attempt_at is None or not self._has_tried(self.endpoint.retry.age_max_s):
            return 0.0
        return self.odometer.between(first_attempt_at, started_at)

    def _has_tried(self, limit_s: float) -> bool:
        return self.grace.is_over(
            self.endpoint.retry, limit_s, self.odometer.observed_s, probes=self.endpoint.probes
        )

    def _configure(self, endpoint: Endpoint, on_unsolicited: Callable[[], object] | None) -> None:
        """Derive from the settings what each delivery needs."""
        self.endpoint = endpoint
        self.usable = endpoint.usable
        # Replaced by each change of the settings, so that no prepared request outlives one.
        self.recipient = recipient_of(endpoint, on_unsolicited)
        self.lasting_keys = _lasting_keys(endpoint)
        # Of its tenant, which it may share with other endpoints.
        self.share = self._budget.share_of(endpoint.tenant or endpoint.id)

    def apply_settings(self, endpoint: Endpoint, now: float) -> Broker | None:
        """Apply changed settings, a pause or a resume.

        Returns:
            The broker that a new one has replaced, to be closed.
        """
        was, replaced = self.endpoint, None
        self._configure(endpoint, self.recipient.on_unsolicited)
        if broker_address(was) != broker_address(endpoint):
            replaced, self.broker = self.broker, self._make_broker()
        if was.headers != endpoint.headers:
            self.redactor = _redactor_of(endpoint)
        self.reuse = replace(self.reuse, keep_alive=endpoint.reuse.keep_alive)
        for lane in self.lanes.values():
            lane.requests.prepared = None
            lane.state.set_share(self.share)
            lane.state.set_batch_max(endpoint.batch_max)
            lane.apply_failure_settings(endpoint)
        if endpoint.state == "paused":
            self.breaker.pause()
        elif was.resumes != endpoint.resumes:
            self.breaker.resume(now)
        if replaced is not None or was.resumes != endpoint.resumes:
            # Meanwhile the streams may have changed.
            for lane in self.lanes.values():
                lane.state.reopen()
                lane.state.retry_now(now)
        return replaced

    def clamp_times(self, now: float) -> None:
        """Clamp stored times after the clock was set, possibly backwards."""
        self.breaker.clamp_times(now)
        self.reported = self.reported.clamp_times(now)
        self.reuse = self.reuse.clamp_times(now)
        for lane in self.lanes.values():
            lane.state.clamp_times(self.endpoint.retry, now)

    def clear_timers(self) -> None:
        for lane in self.lanes.values():
            lane.clear_timer()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def _lasting_keys(endpoint: Endpoint) -> list[SigningKey] | None:
    """The signing keys, unless one of them ends: found once instead of twice for each request."""
    lasting = [key for key, ends_at in endpoint.secrets if ends_at is None]
    return lasting if len(lasting) == len(endpoint.secrets) else None


def _redactor_of(endpoint: Endpoint) -> SecretRedactor | None:
    """The redactor of responses; None if the endpoint sends no headers of its own."""
    return SecretRedactor(endpoint.credentials) if endpoint.headers.own else None

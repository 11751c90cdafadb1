"""One attempt of a lane: from the slot that it waits for to the receiver's response.

A request run that follows the attempt stays within it, and the attempt's result is the response
that the run did not take.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from outbox.core.delivery.circuit_breaker import BreakerState
from outbox.core.delivery.commands import End, Open, Send
from outbox.core.delivery.request_run import RequestRun
from outbox.core.model.response import Failure
from outbox.relay.delivery.attempt import Attempt
from outbox.relay.delivery.broker_attempts import stream_of
from outbox.relay.delivery.lane_run import LaneRun
from outbox.store.errors import Fenced

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.destinations.broker import Broker
    from outbox.destinations.interface import Transport
    from outbox.relay.delivery.admission import AdmissionQueue
    from outbox.relay.delivery.broker_attempts import BrokerAttempts
    from outbox.relay.delivery.fetcher import DeliveryFetcher
    from outbox.relay.delivery.owned_endpoints import LaneRuntime
    from outbox.relay.delivery.recorder import Recorder
    from outbox.relay.delivery.telemetry import DeliveryTelemetry
    from outbox.telemetry.tracing import AttemptSpan

# By name: Python 3.11 takes far longer to find the members of an enumeration.
_HEALTHY, _LOCAL = BreakerState.HEALTHY, Failure.LOCAL


class AttemptSender:
    """Sends the attempts of all lanes.

    Args:
        lease_left_s: remaining lease, in seconds; nothing is sent without it.
        now: epoch seconds.
    """

    def __init__(
        self,
        transport: Transport,
        admission: AdmissionQueue,
        fetcher: DeliveryFetcher,
        recorder: Recorder,
        telemetry: DeliveryTelemetry,
        brokers: BrokerAttempts,
        lease_left_s: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._brokers = brokers
        self._transport = transport
        self._admission = admission
        self._fetcher = fetcher
        self._recorder = recorder
        self._telemetry = telemetry
        self._lease_left_s = lease_left_s
        self._now = now
        # Kept, because `get_running_loop` makes a system call (getpid) each time.
        self._loop = asyncio.get_running_loop()

    async def send(
        self, lane: LaneRuntime, send: Send | Open | End, started_at: float
    ) -> Attempt | None:
        """Make one attempt; None: nothing was sent, or a lane was opened, and it decides again.

        Args:
            started_at: epoch seconds; replaced if the attempt waits for a slot.

        Raises:
            Fenced: the lease expired.
        """
        runtime, slot, admission = lane.runtime, lane.slot, self._admission
        state = runtime.breaker.state
        runtime.breaker.started(lane.loaded.id)
        if not admission.begin(slot):
            granted = await admission.wait(slot)
            started_at = self._now()
            left = revalidate(lane, send, state, started_at) if granted else None
            if left is None:
                # The wait changed the decision: nothing is sent.
                lane.cancel_send()
                if granted:
                    admission.end(slot, responded=False)
                return None
            send = left
        responded = False
        try:
            if runtime.broker is not None:
                attempt = await self._send_to_broker(lane, runtime.broker, send, started_at)
            else:
                assert isinstance(send, Send)
                attempt = await self._request(lane, send, started_at, state)
            if (
                attempt is not None
                and attempt.response.failure is _LOCAL
                and (attempt.appended is None or attempt.appended.through == stream_of(lane).seq)
            ):
                # Nothing was sent, so it is no attempt: the lane waits for fewer open requests.
                admission.record_exhausted(slot, attempt.response.detail)
                self._telemetry.attempt_abandoned(attempt.span, self._now())
                runtime.begin_grace()
                lane.cancel_send()
                return None
            responded = attempt is None or not attempt.preempted
            return attempt
        finally:
            admission.end(slot, responded=responded)

    async def _send_to_broker(
        self, lane: LaneRuntime, broker: Broker, send: Send | Open | End, started_at: float
    ) -> Attempt | None:
        """Open the lane, append to it or end it; None: it is open, or must be opened again."""
        self._require_lease()
        # Settings may change while the request is in flight.
        redactor, attempts, appended = lane.runtime.redactor, self._brokers, None
        if isinstance(send, Open):
            failed = await attempts.open(lane, broker)
            if failed is None:
                lane.runtime.breaker.released(lane.loaded.id)
                return None
            response = failed
        else:
            result = await (
                attempts.end(lane, broker, send)
                if isinstance(send, End)
                else attempts.append(lane, broker, send)
            )
            if result is None:
                lane.cancel_send()
                return None
            response, appended = result
        preempted = lane.slot.preempted and response.failure is not None
        if redactor is not None:
            response = redactor.redact(response)
        return Attempt(send, started_at, response, preempted, None, appended)

    async def _request(
        self, lane: LaneRuntime, send: Send, started_at: float, state: BreakerState
    ) -> Attempt:
        """Send the request, and those of the request run after it."""
        self._require_lease()
        telemetry, redactor = self._telemetry, lane.runtime.redactor
        keep_alive = lane.runtime.reuse.is_allowed(started_at)
        request = lane.requests.build(send, started_at, keep_alive=keep_alive)
        span = run = None
        if telemetry.tracing is not None:
            request, span = telemetry.attempt_started(lane, send, request, started_at)
        if lane.state.may_run(send):
            if state is _HEALTHY:
                # During the request, so that building the next one adds no latency.
                self._loop.call_soon(lane.prefetch_next, started_at, keep_alive)
            if keep_alive:
                run = self._begin_run(lane, send, span, started_at)
        try:
            sending = self._transport.send(request, run, self._require_lease)
            response = await self._admission.send(lane.slot, sending)
        except BaseException:
            telemetry.attempt_abandoned(span if run is None else run.span, self._now())
            raise
        finally:
            if run is not None:
                run.record_rest()
        if run is not None:
            # The request that the response is for.
            send, span, started_at = run.run.send, run.span, run.run.started_at
        preempted = lane.slot.preempted and response.failure is not None
        if redactor is not None:
            response = redactor.redact(response)
        return Attempt(send, started_at, response, preempted, span)

    def _require_lease(self) -> None:
        """Raise Fenced without a lease.

        Called before an attempt, and before each write: the process may have been frozen since the
        decision.
        """
        if self._lease_left_s() <= 0:
            raise Fenced

    def _begin_run(
        self, lane: LaneRuntime, send: Send, span: AttemptSpan | None, started_at: float
    ) -> LaneRun:
        """The request run that may follow a request."""
        run = RequestRun(
            lane.state,
            lane.runtime.breaker,
            partial(self._admission.scheduler.continue_run, lane.slot, self._loop.time()),
            send,
            started_at,
        )
        return LaneRun(
            lane, run, span, self._fetcher, self._recorder, self._telemetry,
            self._loop.time, self._now,
        )  # fmt: skip


def revalidate(
    lane: LaneRuntime, send: Send | Open | End, state: BreakerState, now: float
) -> Send | Open | End | None:
    """What to send after a wait for a slot; None: nothing, as the decision changed.

    Args:
        state: the state of the circuit breaker before the wait.
    """
    runtime = lane.runtime
    if runtime.stopped or runtime.breaker.state is not state or runtime.breaker.blocks_all(now):
        return None
    return lane.state.revalidate(send, now)

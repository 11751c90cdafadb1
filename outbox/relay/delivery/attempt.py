"""One attempt of a lane: from the slot that it waits for to the receiver's response.

A delivery run that follows the attempt stays within it, and the attempt's result is the response
that the run did not take.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from outbox.core.delivery.circuit_breaker import BreakerState
from outbox.core.delivery.commands import End, Open, Send
from outbox.core.delivery.delivery_run import DeliveryRun
from outbox.core.model.response import Failure
from outbox.relay.delivery.attempts import Attempt
from outbox.relay.delivery.broker_attempts import stream_of
from outbox.relay.delivery.lane_run import LaneRun
from outbox.store.errors import Fenced

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.core.model.response import AttemptResult
    from outbox.destinations.broker import Broker
    from outbox.destinations.interface import Request, Transport
    from outbox.relay.delivery.admission import AdmissionQueue
    from outbox.relay.delivery.broker_attempts import BrokerAttempts
    from outbox.relay.delivery.fetcher import DeliveryFetcher
    from outbox.relay.delivery.owned_endpoints import LaneRuntime
    from outbox.relay.delivery.recorder import Recorder
    from outbox.relay.delivery.telemetry import DeliveryTelemetry
    from outbox.telemetry.tracing import AttemptSpan

# By name: Python 3.11 takes far longer to find the members of an enumeration.
_HEALTHY = BreakerState.HEALTHY


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
        admission, state = self._admission, lane.runtime.breaker.state
        self._fetcher.refill(lane)
        lane.runtime.breaker.started(lane.loaded.id)
        started = at_once = admission.begin(lane.slot)
        if not at_once:
            started = await admission.wait(lane.slot)
            started_at = self._now()
        responded = False
        try:
            self._require_lease()
            if not at_once:
                left = revalidate(lane, send, state, started_at) if started else None
                if left is None:
                    # The wait changed the decision: nothing is sent.
                    lane.runtime.breaker.released(lane.loaded.id)
                    lane.state.cancel_send()
                    return None
                send = left
            if lane.runtime.broker is not None:
                attempt = await self._send_to_broker(lane, lane.runtime.broker, send, started_at)
            else:
                assert isinstance(send, Send)
                attempt = await self._request(lane, send, started_at, state)
            if attempt is not None and self._is_own_failure(lane, attempt):
                # Nothing was sent, so it is no attempt: the lane waits for fewer open requests.
                self._admission.record_exhausted(lane.slot, attempt.response.detail)
                lane.runtime.begin_grace()
                lane.runtime.breaker.released(lane.loaded.id)
                lane.state.cancel_send()
                return None
            responded = attempt is None or not attempt.preempted
        finally:
            if started:
                admission.end(lane.slot, responded=responded)
        return attempt

    async def _send_to_broker(
        self, lane: LaneRuntime, broker: Broker, send: Send | Open | End, started_at: float
    ) -> Attempt | None:
        """Open the lane, append to it or end it; None: it is open, or must be opened again."""
        redactor = lane.runtime.redactor
        response: AttemptResult | None = None
        appended = None
        if isinstance(send, Open):
            response = await self._brokers.open(lane, broker)
        else:
            attempts = self._brokers
            result = await (
                attempts.end(lane, broker, send)
                if isinstance(send, End)
                else attempts.append(lane, broker, send)
            )
            if result is None:
                lane.state.cancel_send()
            else:
                response, appended = result
        if response is None:
            lane.runtime.breaker.released(lane.loaded.id)
            return None
        preempted = not self._admission.has_response(lane.slot, response)
        if redactor is not None:
            response = redactor.redact(response)
        return Attempt(send, started_at, response, preempted, None, appended)

    async def _request(
        self, lane: LaneRuntime, send: Send, started_at: float, state: BreakerState
    ) -> Attempt:
        """Send the request, and those of the delivery run after it."""
        # Of this request: settings may change while it is in flight.
        redactor = lane.runtime.redactor
        request, span = self._telemetry.attempt_started(
            lane, send, lane.request(send, started_at), started_at
        )
        if send.attempt == 1 and state is _HEALTHY:
            # During the request, so that building the next one adds no latency.
            self._loop.call_soon(lane.prefetch_next, started_at)
        run = self._begin_run(lane, send, request, span, started_at)
        try:
            sending = self._transport.send(request, run, self._require_lease)
            response = await self._admission.send(lane.slot, sending)
        except BaseException:
            self._telemetry.attempt_abandoned(span if run is None else run.span, self._now())
            raise
        finally:
            if run is not None:
                run.record_rest()
        if run is not None:
            # The request that the response is for.
            send, span, started_at = run.send, run.span, run.started_at
        preempted = not self._admission.has_response(lane.slot, response)
        if response.failure is Failure.LOCAL:
            self._telemetry.attempt_abandoned(span, self._now())
        if redactor is not None:
            response = redactor.redact(response)
        return Attempt(send, started_at, response, preempted, span)

    @staticmethod
    def _is_own_failure(lane: LaneRuntime, attempt: Attempt) -> bool:
        """Whether nothing was sent, because this process lacks resources."""
        appended = attempt.appended
        return attempt.response.failure is Failure.LOCAL and (
            appended is None or appended.through == stream_of(lane).seq
        )

    def _require_lease(self) -> None:
        """Raise Fenced without a lease.

        Called again before each write: the process may have been frozen since the decision.
        """
        if self._lease_left_s() <= 0:
            raise Fenced

    def _begin_run(
        self,
        lane: LaneRuntime,
        send: Send,
        request: Request,
        span: AttemptSpan | None,
        started_at: float,
    ) -> LaneRun | None:
        """The delivery run that may follow a request; None: none may."""
        if not request.keep_alive or not lane.state.may_run(send):
            return None
        run = DeliveryRun(
            lane.state,
            lane.runtime.breaker,
            lane.runtime.may_reuse,
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

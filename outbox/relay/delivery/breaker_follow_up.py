"""What follows from a result for an endpoint's circuit breaker and its lanes.

When the breaker's state changes, all lanes of the endpoint with pending deliveries are activated,
and decide again.  While it is open, a timer activates the lanes that probe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.delivery.circuit_breaker import PROBED_STATES, BreakerState
from outbox.core.delivery.operational_events import is_operational
from outbox.core.model.response import Failure
from outbox.core.model.response_policy import AttemptOutcome, disables_endpoint, retry_after_s
from outbox.core.model.stored_response import stored_response
from outbox.relay.delivery.owned_endpoints import call_later

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random
    from uuid import UUID

    from outbox.relay.delivery.admission import AdmissionQueue
    from outbox.relay.delivery.attempt import Attempt
    from outbox.relay.delivery.owned_endpoints import EndpointRuntime, LaneRuntime
    from outbox.relay.delivery.telemetry import DeliveryTelemetry

# By name: Python 3.11 takes far longer to find the members of an enumeration.
_DELIVERED, _RETRY, _HEALTHY = AttemptOutcome.DELIVERED, AttemptOutcome.RETRY, BreakerState.HEALTHY


class BreakerFollowUp:
    """Records results in the circuit breakers of endpoints, and acts on what they change.

    Args:
        activate: starts a lane's task if needed; returns False if the lane may not run.
        is_running: whether lanes may be activated at all.
        wake_supervisor: called when an endpoint's state changed, which is to be stored.
        now: epoch seconds.
        rng: the source of the jitter of probes.
    """

    def __init__(
        self,
        admission: AdmissionQueue,
        activate: Callable[[LaneRuntime], bool],
        is_running: Callable[[], bool],
        wake_supervisor: Callable[[], None],
        now: Callable[[], float],
        rng: Random,
        telemetry: DeliveryTelemetry,
    ) -> None:
        self._admission = admission
        self._activate = activate
        self._is_running = is_running
        self._wake_supervisor = wake_supervisor
        self._now = now
        self._rng = rng
        self._telemetry = telemetry
        self.changed: set[UUID] = set()
        """Endpoints whose state changed, for the endpoint supervisor."""

    def record_result(
        self, runtime: EndpointRuntime, attempt: Attempt, outcome: AttemptOutcome, now: float
    ) -> AttemptOutcome:
        """Apply a result to the circuit breaker of its endpoint, and follow what it changes.

        Args:
            now: when it completed, in epoch seconds.

        Returns:
            The outcome for the delivery, which the breaker may change.
        """
        breaker = runtime.breaker
        before = breaker.state
        if outcome is _DELIVERED:
            breaker.record_result(outcome, now, 0.0)
        else:
            outcome = self._record_failure(runtime, attempt, outcome, now)
        if breaker.state is before:
            if before is not _HEALTHY:
                self.schedule_probes(runtime)
            return outcome
        self._telemetry.breaker_changed(runtime, now)
        runtime.reported = runtime.reported.record_state(breaker.state)
        for lane in runtime.lanes.values():
            if breaker.state in PROBED_STATES:
                lane.state.reset_batch_size()
            elif attempt.send.attempt > 1:
                # What has failed before succeeds now, so others may as well.
                lane.state.probe_now()
        self.mark_changed(runtime)
        self.requeue(runtime)
        # Lanes that sleep until a retry time may be admitted sooner.
        self.activate_lanes(runtime)
        self.schedule_probes(runtime)
        return outcome

    def _record_failure(
        self, runtime: EndpointRuntime, attempt: Attempt, outcome: AttemptOutcome, now: float
    ) -> AttemptOutcome:
        """Apply a failure to the circuit breaker; the outcome for the delivery."""
        breaker, response = runtime.breaker, attempt.response
        was_healthy = breaker.state is _HEALTHY
        hold_off_s = (retry_after_s(response.headers, now) if outcome is _RETRY else None) or 0.0
        outcome = breaker.record_result(
            outcome, now, self._rng.random(),
            gone=disables_endpoint(response), preempted=attempt.preempted,
            retry_after_s=hold_off_s, opens=response.failure is Failure.MISCONFIGURED,
            last_response=stored_response(runtime.endpoint.kept_response(response, outcome)),
        )  # fmt: skip
        ordinary = not is_operational(attempt.send.delivery.type)
        reported = runtime.reported.record_failure(breaker.state, now, ordinary=ordinary)
        # The next owner must respect the hold-off, too.
        if reported != runtime.reported or (hold_off_s and not was_healthy):
            runtime.reported = reported
            self.mark_changed(runtime)
        return outcome

    def activate_lanes(self, runtime: EndpointRuntime) -> None:
        """Activate the lanes of an endpoint that have work; each decides whether to send."""
        for lane in runtime.lanes.values():
            if lane.state.has_work:
                self._activate(lane)

    def requeue(self, runtime: EndpointRuntime) -> None:
        """Cancel the endpoint's waiting requests, so that each lane decides again."""
        if runtime.queue.waiting:
            self._admission.cancel_waiting(list(runtime.queue.waiting))

    def schedule_probes(self, runtime: EndpointRuntime) -> None:
        """Activate the lanes that the circuit breaker admits now, and set a timer for the
        next probe.
        """
        if runtime.timer is not None:
            runtime.timer.cancel()
            runtime.timer = None
        if runtime.stopped or not self._is_running():
            return
        while woken := runtime.breaker.wake(self._now()):
            for lane_id in woken:
                lane = runtime.lanes.get(lane_id)
                if lane is None or not self._activate(lane):
                    runtime.breaker.yielded(lane_id)
        if (wake_at := runtime.breaker.wake_at()) is not None:
            runtime.timer = call_later(wake_at - self._now(), self.schedule_probes, runtime)

    def mark_changed(self, runtime: EndpointRuntime) -> None:
        """Mark the endpoint's state as changed; the supervisor stores it."""
        self.changed.add(runtime.endpoint.id)
        self._wake_supervisor()

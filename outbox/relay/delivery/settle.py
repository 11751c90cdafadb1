"""Settling an attempt: what its response means for the delivery, its lane and its endpoint.

Nothing here waits: the dispatcher acts on the settlement, and the recorder writes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.brokers.results import append_outcome
from outbox.core.delivery.circuit_breaker import PROBED_STATES, BreakerState
from outbox.core.delivery.commands import End, Open
from outbox.core.delivery.operational_events import is_operational
from outbox.core.messages.batch import classify_batch
from outbox.core.model.response import OWN_FAILURES, STREAM_HOLD_FAILURES, Failure
from outbox.core.model.response_policy import (
    AttemptOutcome,
    classify,
    disables_endpoint,
    retry_after_s,
)
from outbox.core.model.stored_response import stored_response
from outbox.relay.delivery.attempts import BreakerEffect, Settlement

if TYPE_CHECKING:
    from random import Random

    from outbox.relay.delivery.attempts import Attempt
    from outbox.relay.delivery.owned_endpoints import EndpointRuntime, LaneRuntime
    from outbox.relay.delivery.telemetry import DeliveryTelemetry

# By name: Python 3.11 takes far longer to find the members of an enumeration.
_DELIVERED, _RETRY, _HEALTHY = AttemptOutcome.DELIVERED, AttemptOutcome.RETRY, BreakerState.HEALTHY
_NO_EFFECT = BreakerEffect()


def settle(
    lane: LaneRuntime, attempt: Attempt, now: float, rng: Random, telemetry: DeliveryTelemetry
) -> Settlement:
    """Apply a completed attempt to its lane and its endpoint's circuit breaker, and report it.

    Args:
        now: when it completed, in epoch seconds.
        rng: the source of the jitter of retries and probes.
    """
    endpoint, send, response = lane.runtime.endpoint, attempt.send, attempt.response
    if not attempt.preempted and response.failure not in OWN_FAILURES:
        lane.runtime.grace.record_response()
    if isinstance(send, Open | End):
        return _settle_without_delivery(lane, attempt, now, rng, telemetry)
    before, signing = send.maybe_sent_before or response.resent, lane.runtime.signing
    retryable = signing.retryable(lane.signed_by, response, endpoint.retryable)
    signing.record(lane.signed_by, response)
    if attempt.appended is not None:
        outcome, accepted_seq = append_outcome(attempt.appended), attempt.appended.through
    elif send.batch:
        outcome, accepted_seq = classify_batch(
            send.batch, response, maybe_sent_before=before, retryable=retryable
        )
    else:
        outcome = classify(response, maybe_sent_before=before, retryable=retryable)
        accepted_seq = send.delivery.seq
    outcome, effect = _apply_to_breaker(lane.runtime, attempt, outcome, now, rng, telemetry)
    policy, u = endpoint.retry, rng.random()
    if len(send.batch) > 1:
        accepted, failed = lane.state.record_batch_result(
            send.batch, accepted_seq, outcome, response, policy,
            started_at=attempt.started_at, now=now, u=u,
        )  # fmt: skip
        telemetry.batch_completed(lane, send, response, accepted, failed, attempt.span)
        return Settlement(outcome, accepted, failed, effect)
    observed_s = 0.0
    if outcome is not _DELIVERED:
        observed_s = lane.runtime.budget_s(lane.state.first_attempt_at, attempt.started_at)
    record = lane.state.record_result(
        outcome, response, policy,
        started_at=attempt.started_at, now=now, u=u, observed_s=observed_s,
        blocks=endpoint.blocks, preempted=attempt.preempted,
        endpoint_healthy=lane.runtime.breaker.state is _HEALTHY,
    )  # fmt: skip
    telemetry.attempt_completed(lane, send.delivery, response, record, attempt.span)
    return Settlement(outcome, None, record, effect)


def _settle_without_delivery(
    lane: LaneRuntime,
    attempt: Attempt,
    now: float,
    rng: Random,
    telemetry: DeliveryTelemetry,
) -> Settlement:
    """Apply a lane's end, or the failure to open a broker's lane or to end it.

    An end entry that is stored shows that the broker works; there is no delivery to record.  A lane
    whose stream does not match is held alone: the broker works, and so may other lanes.
    """
    runtime, outcome, effect = lane.runtime, _RETRY, _NO_EFFECT
    if attempt.appended is not None and attempt.appended.stop is None:
        outcome, effect = _apply_to_breaker(runtime, attempt, _DELIVERED, now, rng, telemetry)
        return Settlement(outcome, None, None, effect)
    held = attempt.response.failure in STREAM_HOLD_FAILURES
    if held:
        runtime.breaker.released(lane.loaded.id)
        effect = BreakerEffect(probes_changed=runtime.breaker.state is not _HEALTHY)
    else:
        outcome, effect = _apply_to_breaker(runtime, attempt, outcome, now, rng, telemetry)
    record = lane.state.record_stream_failed(
        attempt.response, runtime.endpoint.retry,
        started_at=attempt.started_at, now=now, u=rng.random(), held=held,
    )  # fmt: skip
    telemetry.open_failed(lane, attempt.response, record)
    return Settlement(outcome, None, record, effect)


def _apply_to_breaker(
    runtime: EndpointRuntime,
    attempt: Attempt,
    outcome: AttemptOutcome,
    now: float,
    rng: Random,
    telemetry: DeliveryTelemetry,
) -> tuple[AttemptOutcome, BreakerEffect]:
    """Apply a result to the circuit breaker.

    Returns:
        The outcome for the delivery, which the breaker may change; and the effect.
    """
    breaker, response = runtime.breaker, attempt.response
    before = breaker.state
    if outcome is _DELIVERED:
        breaker.record_result(outcome, now, 0.0)
        if before is _HEALTHY and breaker.state is _HEALTHY:
            return outcome, _NO_EFFECT
    retry_after = retry_after_s(response.headers, now) if outcome is _RETRY else None
    must_be_stored = False
    if outcome is not _DELIVERED:
        outcome = breaker.record_result(
            outcome,
            now,
            rng.random(),
            gone=disables_endpoint(response),
            preempted=attempt.preempted,
            retry_after_s=retry_after or 0.0,
            opens=response.failure is Failure.MISCONFIGURED,
            last_response=stored_response(response),
        )
        ordinary = not is_operational(attempt.send.delivery.type)
        reported = runtime.reported.record_failure(breaker.state, now, ordinary=ordinary)
        must_be_stored = reported != runtime.reported
        runtime.reported = reported
    if breaker.state is before:
        probes = before is not _HEALTHY
        # The next owner must respect the hold-off, too.
        held_off = probes and bool(retry_after)
        return outcome, BreakerEffect(
            probes_changed=probes, must_be_stored=must_be_stored or held_off
        )
    telemetry.breaker_changed(runtime, now)
    runtime.reported = runtime.reported.record_state(breaker.state)
    if breaker.state in PROBED_STATES:
        for lane in runtime.lanes.values():
            lane.state.reset_batch_size()
    return outcome, BreakerEffect(state_changed=True, probes_changed=True, must_be_stored=True)

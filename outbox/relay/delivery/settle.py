"""Settling an attempt: what its response means for the delivery, its lane and its endpoint.

Nothing here waits: the worker writes the records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.brokers.results import append_outcome
from outbox.core.delivery.circuit_breaker import BreakerState
from outbox.core.delivery.commands import End, Open
from outbox.core.messages.batch import classify_batch
from outbox.core.model.response import OWN_FAILURES, STREAM_HOLD_FAILURES
from outbox.core.model.response_policy import AttemptOutcome, classify

if TYPE_CHECKING:
    from random import Random

    from outbox.core.delivery.commands import Record, Successes
    from outbox.relay.delivery.attempt import Attempt
    from outbox.relay.delivery.breaker_follow_up import BreakerFollowUp
    from outbox.relay.delivery.owned_endpoints import LaneRuntime
    from outbox.relay.delivery.telemetry import DeliveryTelemetry

# By name: Python 3.11 takes far longer to find the members of an enumeration.
_DELIVERED, _RETRY, _HEALTHY = AttemptOutcome.DELIVERED, AttemptOutcome.RETRY, BreakerState.HEALTHY


def settle(
    lane: LaneRuntime,
    attempt: Attempt,
    now: float,
    rng: Random,
    breakers: BreakerFollowUp,
    telemetry: DeliveryTelemetry,
) -> tuple[AttemptOutcome, Successes | None, Record | None]:
    """Apply a completed attempt to its lane and its endpoint's circuit breaker, and report it.

    Args:
        now: when it completed, in epoch seconds.
        rng: the source of the jitter of retries.

    Returns:
        The outcome of the delivery, or of a batch's last one; the deliveries of a batch that were
        accepted, to be written first; and the record of the delivery, or of the first one of a
        batch that was not accepted.
    """
    runtime, send, response = lane.runtime, attempt.send, attempt.response
    endpoint = runtime.endpoint
    if not attempt.preempted and response.failure not in OWN_FAILURES:
        runtime.grace.responses += 1
    if isinstance(send, Open | End):
        return _settle_without_delivery(lane, attempt, now, rng, breakers, telemetry)
    before, signing = send.maybe_sent_before or response.resent, runtime.signing
    signed_by = lane.requests.signed_by
    retryable = signing.retryable(signed_by, response, endpoint.retryable)
    if signed_by is not None:
        signing.record(signed_by, response)
    if attempt.appended is not None:
        outcome, accepted_seq = append_outcome(attempt.appended), attempt.appended.through
    elif send.batch:
        outcome, accepted_seq = classify_batch(
            send.batch, response, maybe_sent_before=before, retryable=retryable
        )
    else:
        outcome = classify(response, maybe_sent_before=before, retryable=retryable)
        accepted_seq = send.delivery.seq
    if outcome is _DELIVERED and runtime.breaker.state is _HEALTHY:
        # Nothing follows from it, so it is recorded without the follow-up.
        runtime.breaker.record_result(outcome, now, 0.0)
    else:
        outcome = breakers.record_result(runtime, attempt, outcome, now)
    response = endpoint.kept_response(response, outcome)
    policy, u = endpoint.retry, rng.random()
    if len(send.batch) > 1:
        accepted, failed = lane.state.record_batch_result(
            send.batch, accepted_seq, outcome, response, policy,
            started_at=attempt.started_at, now=now, u=u,
        )  # fmt: skip
        telemetry.batch_completed(lane, send, response, accepted, failed, attempt.span)
        return outcome, accepted, failed
    observed_s = 0.0
    if outcome is not _DELIVERED:
        observed_s = runtime.budget_s(lane.state.first_attempt_at, attempt.started_at)
    record = lane.state.record_result(
        outcome, response, policy,
        started_at=attempt.started_at, now=now, u=u, observed_s=observed_s,
        blocks=endpoint.blocks, preempted=attempt.preempted,
        endpoint_healthy=runtime.breaker.state is _HEALTHY,
    )  # fmt: skip
    telemetry.attempt_completed(lane, send.delivery, response, record, attempt.span)
    return outcome, None, record


def _settle_without_delivery(
    lane: LaneRuntime,
    attempt: Attempt,
    now: float,
    rng: Random,
    breakers: BreakerFollowUp,
    telemetry: DeliveryTelemetry,
) -> tuple[AttemptOutcome, None, Record | None]:
    """Apply a lane's end, or the failure to open a broker's lane or to end it.

    An end entry that is stored shows that the broker works; there is no delivery to record.  A lane
    whose stream does not match is held alone: the broker works, and so may other lanes.
    """
    runtime, outcome = lane.runtime, _RETRY
    if attempt.appended is not None and attempt.appended.stop is None:
        return breakers.record_result(runtime, attempt, _DELIVERED, now), None, None
    held = attempt.response.failure in STREAM_HOLD_FAILURES
    if held:
        runtime.breaker.released(lane.loaded.id)
        if runtime.breaker.state is not _HEALTHY:
            breakers.schedule_probes(runtime)
    else:
        outcome = breakers.record_result(runtime, attempt, outcome, now)
    record = lane.state.record_stream_failed(
        attempt.response, runtime.endpoint.retry,
        started_at=attempt.started_at, now=now, u=rng.random(), held=held,
    )  # fmt: skip
    telemetry.open_failed(lane, attempt.response, record)
    return outcome, None, record

"""Redaction of API responses by scope and tenant.

Receiver responses (headers, body, detail) are visible to system tokens with the scope
`operate` only: a user who points an endpoint at an internal service must not read its
response (SSRF).  Other tokens see the status or the failure, and the elapsed time.

Tenant tokens see nothing about other tenants or about the installation.  Redacted are

    actors        operators become `operator`, relays `relay`; tokens of the same tenant
                  keep their names
    totals        batches, sequencing progress, number of scanned events
    network       whether a host name did not resolve or resolved to a refused address, and how
                  fast

Ids (events, dead letters, jobs, journal entries) and cursors count over the whole
installation.  They are not redacted: clients need them to address an object, and
X-Delivery contains the event's id.  They reveal that something happened, not what.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from outbox.core.model.stored_response import (
    generalize_elapsed_s,
    generalize_failure,
    outcome_fields,
)
from outbox.operations import tenancy
from outbox.operations.endpoints.queries import NOT_SHOWN
from outbox_doctor.trace.diagnosis import add_diagnosis

if TYPE_CHECKING:
    from collections.abc import Set

    from outbox.destinations.endpoint_test import EndpointTestResult
    from outbox.operations.dead_letters.queries import DeadLetter, DeadLetterRow
    from outbox.operations.deliveries.model import DeliveryRow
    from outbox.operations.endpoints.queries import EndpointDetail, EndpointRow
    from outbox.operations.endpoints.statuses import EndpointStatus, EndpointStatuses
    from outbox.operations.journal import JournalRow
    from outbox.operations.replays.jobs import ReplayJob
    from outbox.operations.schedules.queries import ListedSchedule
    from outbox.operations.status import Overview
    from outbox_api.route import Call
    from outbox_doctor.trace.model import EventTrace, TracedAttempt, TracedDelivery

S = TypeVar("S", bound="ListedSchedule")
D = TypeVar("D", bound="DeadLetterRow")

OPERATOR, RELAY = "operator", "relay"
INTERNAL_FIELDS = frozenset(
    ("epoch", "from_batch", "from_id", "relay", "replica", "timeline", "to_batch", "to_id")
)
"""Journal fields that describe the installation."""
PERCENT = 100


@dataclass(frozen=True, slots=True)
class Redactor:
    """Redacts results for one caller.

    Args:
        own_actors: actor names of the tenant's tokens; None: no tenant restriction.
        may_see_responses: whether the caller may read receiver responses.
    """

    own_actors: Set[str] | None
    may_see_responses: bool

    def redact_actor(self, actor: str | None) -> str | None:
        if self.own_actors is None or actor is None or actor in self.own_actors:
            return actor
        return RELAY if actor.startswith("replica ") else OPERATOR

    def redact_response(self, response: dict[str, Any] | None) -> dict[str, Any] | None:
        """Reduce a stored response to its status or failure."""
        if self.may_see_responses or response is None:
            return response
        summary = outcome_fields(response)
        if self.own_actors is not None and "failure" in summary:
            elapsed_s = generalize_elapsed_s(summary["failure"], summary["elapsed_ms"] / 1000)
            summary["elapsed_ms"] = elapsed_s * 1000
            summary["failure"] = generalize_failure(summary["failure"])
        return summary

    def redact_test(self, result: EndpointTestResult) -> EndpointTestResult:
        # The phrase may quote Retry-After.
        if self.may_see_responses:
            return result
        response = self.redact_response(result.response) or {}
        return replace(result, response=response, meaning=None, findings=())

    def redact_endpoint(self, row: EndpointRow) -> EndpointRow:
        return replace(row, state_by=self.redact_actor(row.state_by))

    def redact_endpoint_detail(self, found: EndpointDetail) -> EndpointDetail:
        health = replace(
            found.health, last_response=self.redact_response(found.health.last_response)
        )
        lanes = tuple(
            replace(lane, last_response=self.redact_response(lane.last_response))
            for lane in found.lanes
        )
        history, feed = found.ownership_history, found.feed
        if self.own_actors is not None:
            # These numbers are of all tenants' events.
            history = ()
            feed = feed and replace(feed, left_max=None, rate_per_s=None, expired=0, erased=0)
        return replace(
            found,
            endpoint=self.redact_endpoint(found.endpoint),
            health=health,
            lanes=lanes,
            ownership_history=history,
            feed=feed,
        )

    def redact_dead_letter_row(self, row: D) -> D:
        if self.may_see_responses:
            return row
        failure = row.failure if self.own_actors is None else generalize_failure(row.failure)
        return replace(row, failure=failure, excerpt=None)

    def redact_dead_letter(self, found: DeadLetter) -> DeadLetter:
        row = self.redact_dead_letter_row(found)
        return replace(row, last_response=self.redact_response(found.last_response))

    def redact_delivery_row(self, row: DeliveryRow) -> DeliveryRow:
        if self.own_actors is None or row.failure is None:
            return row
        elapsed_ms = row.elapsed_ms
        if elapsed_ms is not None:
            elapsed_ms = generalize_elapsed_s(row.failure, elapsed_ms / 1000) * 1000
        return replace(row, failure=generalize_failure(row.failure), elapsed_ms=elapsed_ms)

    def redact_overview(self, overview: Overview) -> Overview:
        return replace(overview, endpoints=tuple(map(self._redact_status, overview.endpoints)))

    def redact_statuses(self, found: EndpointStatuses) -> EndpointStatuses:
        return replace(found, endpoints=tuple(map(self._redact_status, found.endpoints)))

    def _redact_status(self, row: EndpointStatus) -> EndpointStatus:
        head = row.failing
        if head is not None:
            head = replace(head, last_response=self.redact_response(head.last_response))
        if self.own_actors is None:
            return replace(row, failing=head)
        relay = None if row.replica is None else NOT_SHOWN
        return replace(row, failing=head, replica=relay, state_by=self.redact_actor(row.state_by))

    def redact_schedule(self, found: S) -> S:
        return replace(found, state_by=self.redact_actor(found.state_by))

    def redact_job(self, job: ReplayJob) -> ReplayJob:
        """Redact a replay job; a backfill's range counts events of all tenants, so show percent."""
        if self.own_actors is None:
            return job
        redacted = replace(job, requested_by=self.redact_actor(job.requested_by) or OPERATOR)
        if job.kind != "history" or not job.all:
            return redacted
        return replace(redacted, done=int(job.share * PERCENT), all=PERCENT)

    def redact_journal_row(self, row: JournalRow) -> JournalRow:
        data = dict(row.data)
        if "last_response" in data:
            data["last_response"] = self.redact_response(data["last_response"])
        if self.own_actors is None:
            return replace(row, data=data)
        data = {name: value for name, value in data.items() if name not in INTERNAL_FIELDS}
        return replace(
            row, actor=self.redact_actor(row.actor) or OPERATOR, session_role=None, data=data
        )

    def redact_trace(self, trace: EventTrace) -> EventTrace:
        """Redact a trace, and diagnose what is left: its sentences repeat the trace."""
        if self.own_actors is None:
            deliveries = tuple(map(self._redact_responses, trace.deliveries))
            return add_diagnosis(replace(trace, deliveries=deliveries))
        sequenced, sequencing = trace.sequenced, trace.sequencing
        redacted = replace(
            trace,
            sequenced=sequenced and replace(sequenced, batch=None),
            sequencing=sequencing
            and replace(sequencing, high=None, in_gap=None, relays=None, leader=None),
            deliveries=tuple(map(self._redact_delivery, trace.deliveries)),
        )
        return add_diagnosis(redacted)

    def _redact_delivery(self, delivery: TracedDelivery) -> TracedDelivery:
        lane_state = delivery.lane_state
        if lane_state is not None:
            relay = None if lane_state.relay is None else NOT_SHOWN
            lane_state = replace(
                lane_state, relay=relay, state_by=self.redact_actor(lane_state.state_by)
            )
        attempts = tuple(replace(each, replica_id=None) for each in delivery.attempts)
        return self._redact_responses(replace(delivery, lane_state=lane_state, attempts=attempts))

    def _redact_responses(self, delivery: TracedDelivery) -> TracedDelivery:
        if self.may_see_responses:
            return delivery
        lane_state = delivery.lane_state
        if lane_state is not None:
            head = replace(
                lane_state.head, last_response=self.redact_response(lane_state.head.last_response)
            )
            lane_state = replace(lane_state, head=head)
        return replace(
            delivery,
            lane_state=lane_state,
            attempts=tuple(map(self._redact_attempt, delivery.attempts)),
        )

    def _redact_attempt(self, attempt: TracedAttempt) -> TracedAttempt:
        # A detail may quote the response.
        failure = (attempt.response or {}).get("failure") if attempt.status is None else None
        if self.own_actors is None:
            return replace(attempt, response=None, error=failure)
        return replace(
            attempt,
            response=None,
            error=generalize_failure(failure),
            elapsed_ms=generalize_elapsed_s(failure, attempt.elapsed_ms / 1000) * 1000,
        )


async def redactor_for(call: Call[Any, Any]) -> Redactor:
    """Return the redactor for a caller's scopes and tenant."""
    if call.tenant is None:
        return Redactor(None, may_see_responses="operate" in call.caller.scopes)
    return Redactor(await tenancy.list_actors(call.db, call.tenant), may_see_responses=False)

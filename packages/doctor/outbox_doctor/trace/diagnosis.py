"""Diagnosis of a trace: why an event is not delivered, and what can be done.

One sentence per cause, with the command that resolves it; and the same as data, from which a page
makes buttons.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from outbox.core.delivery.circuit_breaker import PROBED_STATES, describe_probing
from outbox.core.delivery.operational_events import STUCK_EVERY
from outbox.core.model.duration import rounded
from outbox.core.model.response import STREAM_HOLD_FAILURES, Failure
from outbox.core.model.response_policy import is_application_failure
from outbox.core.model.stored_response import describe_attempts, describe_response
from outbox.core.model.text import count
from outbox.operations.dead_letters.skip import Standing, is_held, skip_helps, stuck_advice
from outbox_doctor.trace.model import TraceAction, TraceCause

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from outbox_doctor.trace.model import (
        EventTrace,
        PendingLaneState,
        SequencingProgress,
        TracedDeadLetter,
        TracedDelivery,
        UnsentGroup,
    )


class Finding(NamedTuple):
    """A cause, and the end of its sentence: the command that resolves it."""

    cause: TraceCause
    advice: str = ""

    @property
    def sentence(self) -> str:
        cause = self.cause
        if cause.endpoint is None:
            return f"{cause.text}{self.advice}"
        where = f"{cause.endpoint}: sequence {cause.sequence} of lane {cause.lane}"
        return f"{where} {cause.text}{self.advice}"


def _finding(text: str, advice: str = "", *actions: TraceAction) -> Finding:
    return Finding(TraceCause(text, actions=actions), advice)


def add_diagnosis(trace: EventTrace) -> EventTrace:
    """Return the trace with its diagnosis, which replaces an earlier one."""
    found = list(diagnose(trace))
    return replace(
        trace,
        diagnosis=tuple(each.sentence for each in found),
        causes=tuple(each.cause for each in found),
    )


def diagnose(trace: EventTrace) -> Iterator[Finding]:
    """Find the causes why an event is not delivered; none when it is."""
    if trace.sequencing is not None:
        yield _explain_unsequenced(trace.sequencing, trace.event.outbox_id)
        return
    if trace.log_dropped:
        yield _finding(
            "retention dropped the log of its deliveries, none of which was pending; the journal "
            "entry period_dropped has the time"
        )
        return
    lost = [missed for missed in trace.missed if missed.reason == "lost"]
    if not trace.deliveries_total:
        unsent = "; ".join(map(describe_unsent, trace.missed)) or "there is none"
        yield _finding(f"no endpoint received it: {unsent}")
    elif lost:
        yield _finding("it was not sent to " + describe_unsent(lost[0]))
    for delivery in trace.deliveries:
        found: list[Finding] = []
        if delivery.dead_letter is not None:
            if delivery.dead_letter.state not in ("replayed", "dead_again"):
                found = [_explain_dead_letter(delivery.endpoint, delivery.dead_letter)]
        elif delivery.lane_state is not None:
            found = list(_find_obstacles(delivery, delivery.lane_state, trace.at))
            found = found or [_finding("is about to be sent")]
        for each in found:
            cause = replace(
                each.cause,
                endpoint=delivery.endpoint,
                lane=delivery.lane,
                sequence=delivery.sequence,
            )
            yield each._replace(cause=cause)


def _explain_unsequenced(sequencing: SequencingProgress, outbox_id: int) -> Finding:
    if sequencing.high is None:
        return _finding("it is not sequenced yet")
    if not sequencing.relays:
        return _finding(
            "it is not sequenced because no relay is running", "; start one: outbox relay"
        )
    if sequencing.in_gap:
        return _finding(
            "it is not sequenced yet because it committed late; it is read when the concurrent "
            "producer transactions have ended",
            "; outbox doctor lists them",
        )
    behind = outbox_id - sequencing.high
    who = f"leader {sequencing.leader}" if sequencing.leader else "no relay leads; sequencing"
    text = f"it is not sequenced yet: {who} is {count(behind, 'id')} behind"
    return _finding(text, "; see outbox doctor")


_UNSENT_REASONS = {
    "type": "{n} not subscribed to its type",
    "tenant": "{n} of another tenant",
    "filter": "{n} with a filter that excludes its payload",
    "before": "{n} added after it was published",
    "after": "{n} disabled or removed before it was sequenced",
    "feed": "{n} that will get it, because earlier events are sent first",
    "seen": "{n} that began at a position whose snapshot contains it",
    "skipped": "{n} that began at an earlier place, when it was erased or expired",
    "lost": "{n} that should have received it: run outbox verify",
}


def describe_unsent(missed: UnsentGroup) -> str:
    """Describe how many endpoints the event was not sent to, and why."""
    text = _UNSENT_REASONS[missed.reason].format(n=missed.endpoints)
    return f"{text} ({', '.join(missed.examples)})" if missed.examples else text


_DEAD_LETTER_REASONS = {
    "refused": "its receiver refused it",
    "exhausted": "its retries were exhausted",
    "expired": "it had expired",
    "erased": "its event was erased",
    "missing": "its event was gone, although nothing had erased it",
    "skipped": "an operator skipped it",
    "backlog": "its endpoint exceeded a backlog limit",
    "adopted": "an operator adopted a stream into which it does not fit",
    "disabled": "its endpoint was disabled",
    "removed": "its endpoint was removed",
}


def _explain_dead_letter(endpoint: str, letter: TracedDeadLetter) -> Finding:
    reason = _DEAD_LETTER_REASONS[letter.reason]
    match letter.state:
        case "discarded":
            return _finding(
                f"was dead-lettered because {reason}; dead letter {letter.id} was discarded"
            )
        case "replaying":
            return _finding(f"was dead-lettered because {reason}; it is being replayed")
    text = f"was dead-lettered because {reason}; it is dead letter {letter.id}"
    if letter.reason in ("removed", "erased"):
        return _finding(text)
    replay = TraceAction("replay", endpoint, dead_letter=letter.id)
    return _finding(text, f": outbox dead replay {letter.id}", replay)


def _find_obstacles(
    delivery: TracedDelivery, lane: PendingLaneState, now: datetime
) -> Iterator[Finding]:
    """Everything that blocks a pending delivery: the endpoint first, then the lane."""
    name = shlex.quote(delivery.endpoint)

    def lasted(at: datetime) -> str:
        return f"for {rounded((now - at).total_seconds())}"

    if lane.state != "active":
        by = f" by {lane.state_by}" if lane.state_by else ""
        reason = f" ({lane.state_comment})" if lane.state_comment else ""
        text = f"waits: its endpoint has been {lane.state}{by} {lasted(lane.state_at)}{reason}"
        match lane.state:
            case "paused":
                resume = TraceAction("resume", delivery.endpoint)
                yield _finding(text, f"; outbox endpoint resume {name}", resume)
            case "disabled" | "disabling":
                enable = TraceAction("enable", delivery.endpoint)
                yield _finding(text, f"; outbox endpoint enable {name}", enable)
            case _:
                yield _finding(text)
    elif lane.relay is None:
        yield _finding("waits: no live relay owns its endpoint", "; see outbox status")
    if lane.blocked_since is not None:
        letter = lane.blocked_by
        by = f"dead letter {letter}" if letter else "a dead letter"
        act = f"outbox dead replay {letter}, outbox dead discard {letter} or " if letter else ""
        actions = [TraceAction("resume", delivery.endpoint)]
        if letter:
            actions = [
                TraceAction("replay", delivery.endpoint, dead_letter=letter),
                TraceAction("discard", delivery.endpoint, dead_letter=letter),
                *actions,
            ]
        yield _finding(
            f"waits: its lane has been blocked by {by} {lasted(lane.blocked_since)}",
            f"; unblock it: {act}outbox endpoint resume {name}",
            *actions,
        )
    if lane.older_pending:
        yield _finding(
            f"waits for {count(lane.older_pending, 'pending delivery')} in lanes of an older "
            "generation, to be delivered first"
        )
    elif lane.older_unended:
        lanes = count(lane.older_unended, "lane")
        text = f"waits for the end entry of {lanes} of an older generation"
        yield _finding(text, "; see outbox status")
    if lane.held_until is not None and lane.held_until > now:
        left_s = (lane.held_until - now).total_seconds()
        yield _finding(f"waits {rounded(left_s)} more: its receiver sent Retry-After")
    elif lane.health in PROBED_STATES:
        tried = (
            f"; {describe_probing(probes=lane.probes)}"
            if lane.state == "active" and lane.relay
            else ""
        )
        text = f"waits: its endpoint has been {lane.health} {lasted(lane.health_since)}{tried}"
        yield _finding(text)
    head = lane.head
    if head.sequence < delivery.sequence:
        ahead = delivery.sequence - head.sequence
        first = f" (event {head.event_id})" if head.event_id else ""
        text = (
            f"waits behind {count(ahead, 'delivery')} of its lane; the first is sequence "
            f"{head.sequence}{first}"
        )
        if not head.attempts:
            yield _finding(text)
            return
        failure = _explain_failure(delivery, lane, now)
        cause = replace(failure.cause, text=f"{text}, which {failure.cause.text}")
        yield failure._replace(cause=cause)
    elif head.attempts:
        yield _explain_failure(delivery, lane, now)


def _explain_failure(delivery: TracedDelivery, lane: PendingLaneState, now: datetime) -> Finding:
    """Describe the attempts of the lane's next delivery, and the command that skips it."""
    head = lane.head
    tried = describe_attempts(head.attempts, head.probes)
    text = f"failed after {tried}, the last: {describe_response(head.last_response)}"
    if head.next_attempt_at is not None and _retries_on_schedule(lane):
        left_s = (head.next_attempt_at - now).total_seconds()
        text += f"; the next is {f'in {rounded(left_s)}' if left_s > 0 else 'due now'}"
    # The event is probably to blame if its receiver responds to others.
    last = head.last_response or {}
    if (
        (lane.health == "healthy" and is_application_failure(last.get("status")))
        or head.attempts >= STUCK_EVERY
        or is_held(last)
    ):
        where = delivery.endpoint, delivery.lane, head.sequence
        standing = Standing(lane.state, lane.health, lane.failing_lanes)
        if (advice := stuck_advice(*where, last, standing)) is not None:
            actions = [TraceAction("adopt", delivery.endpoint)]
            if last.get("failure") == Failure.FORGOT:
                actions.insert(0, TraceAction("refill", delivery.endpoint))
            elif last.get("failure") not in STREAM_HOLD_FAILURES:
                skips = skip_helps(last, standing) or last.get("failure") == Failure.MISSING
                pause = TraceAction("pause", delivery.endpoint)
                actions = [TraceAction("skip", *where) if skips else pause]
            return _finding(text, f"; {advice}", *actions)
    return _finding(text)


def _retries_on_schedule(lane: PendingLaneState) -> bool:
    """Whether only the retry policy decides when a failed delivery is attempted again."""
    return (
        lane.state == "active"
        and lane.health == "healthy"
        and lane.relay is not None
        and lane.blocked_since is None
    )

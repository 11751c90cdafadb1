"""A lane that is held because the event of its next delivery is gone, and what ends that."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from outbox.core.delivery.commands import (
    DeadLetter,
    DeadRange,
    ErasedEvent,
    Fetch,
    Gate,
    LaneSnapshot,
    MissingEvent,
    Open,
    Progress,
    Record,
    Send,
    Wait,
)
from outbox.core.delivery.lane import MISSING_POLL_S, Lane
from outbox.core.delivery.stream_position import StreamPosition
from outbox.core.model.response import AttemptResult
from outbox.core.model.stored_response import missing_response
from tests.core.lane_invariants import POLICY
from tests.core.lane_steps import BUSY, NOW, attempt
from tests.core.lane_tables import ENDPOINT, delivery

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.core.delivery.commands import Command
    from outbox.core.model.delivery import Delivery

LATER = NOW + MISSING_POLL_S


def missing(seq: int) -> MissingEvent:
    """A delivery whose event is gone; a new object, as each read returns one."""
    return MissingEvent(ENDPOINT, seq, 1, 100 + seq)


def holding(
    *deliveries: Delivery | MissingEvent, kind: type[Lane] = Lane, batch_max: int | None = None
) -> Lane:
    """A lane with these deliveries in its buffer, whose endpoint holds missing events."""
    lane = kind(LaneSnapshot(7, len(deliveries), Progress()), 0, batch_max=batch_max)
    lane.holds_missing = True
    assert lane.next(NOW) == Fetch(0, 0)
    lane.append_fetched(deliveries)
    return lane


def recorded(lane: Lane, now: float = NOW, gate: Gate = Gate.OPEN) -> Record:
    """The record that the lane returns, after it was written."""
    record = lane.next(now, gate)
    assert isinstance(record, Record)
    assert lane.next(now) is None
    lane.confirm_recorded(record)
    return record


def held(kind: type[Lane] = Lane, batch_max: int | None = None) -> Lane:
    """A lane that is held by its first delivery, with another one behind it."""
    lane = holding(missing(1), delivery(2), kind=kind, batch_max=batch_max)
    recorded(lane)
    return lane


def test_a_hold_is_stored_with_its_reason_by_the_proof_that_the_event_is_gone() -> None:
    lane = holding(missing(1), delivery(2))
    record = recorded(lane)
    assert (record.dead, record.attempt, record.missing) == (None, None, (101,))
    assert record.stuck
    assert record.progress is not None
    progress = record.progress
    assert (progress.acked_seq, progress.retry_seq, progress.spent) == (0, 1, 0)
    assert progress.next_attempt_at == LATER
    assert progress.last_response == missing_response(101)
    assert "101" in str(progress.last_response)
    assert lane.failing
    assert lane.stalled_since is None  # A new owner knows it from the log.
    lane.extend_to(3, NOW)
    assert lane.stalled_since == NOW
    assert lane.next(NOW) == Wait(LATER)
    assert lane.next(NOW, Gate.PROBE) == Wait(LATER)


def test_the_event_is_searched_for_again_and_reported_once() -> None:
    lane = held()
    assert lane.next(LATER) == Fetch(0, 1)
    lane.append_fetched([missing(1), delivery(2)])
    again = recorded(lane, LATER)
    assert (again.missing, again.stuck) == ((101,), False)
    assert lane.next(LATER) == Wait(LATER + MISSING_POLL_S)


@pytest.mark.parametrize("holds", [True, False])
def test_an_event_that_was_missing_long_ago_is_searched_for_first(holds: bool) -> None:
    """Otherwise the proof finds an event that was restored meanwhile, and ends the session."""
    lane = holding(delivery(1), missing(2))
    lane.holds_missing = holds
    _, record = attempt(lane, AttemptResult.completed(200, 0.01))
    lane.confirm_recorded(record)
    assert lane.next(LATER) == Fetch(1, 1)
    lane.append_fetched([missing(2)])
    assert recorded(lane, LATER).missing == (102,)


def test_a_new_owner_holds_the_lane_and_does_not_report_it_again() -> None:
    progress = held().checkpoint()
    lane = Lane(LaneSnapshot(7, 2, progress), sent_through_batch=5)
    lane.holds_missing = True
    assert lane.next(LATER) == Fetch(0, 1)
    lane.append_fetched([missing(1), delivery(2)])
    assert not recorded(lane, LATER).stuck
    # It begins anew when the event is there, although it had been held for long.
    other = Lane(LaneSnapshot(7, 2, progress), sent_through_batch=5)
    assert other.next(LATER) == Fetch(0, 1)
    other.append_fetched([delivery(1), delivery(2)])
    send = other.next(LATER)
    assert isinstance(send, Send)
    assert (send.delivery, send.attempt) == (delivery(1), 1)


def returns(lane: Lane) -> Command:
    """Its event exists again."""
    assert lane.next(LATER) == Fetch(0, 1)
    lane.append_fetched([delivery(1), delivery(2)])
    return lane.next(LATER)


def is_skipped(lane: Lane) -> Command:
    """An operator skips it."""
    lane.skip(1)
    return lane.next(NOW)


def is_allowed(lane: Lane) -> Command:
    """The setting is changed."""
    lane.holds_missing = False
    return lane.next(NOW)


def exceeds(lane: Lane) -> Command:
    """It exceeds a limit of the backlog."""
    lane.dead_letter_through(1, "backlog")
    return lane.next(NOW)


def was_erased(lane: Lane) -> Command:
    """A record says that the event was erased."""
    assert lane.next(LATER) == Fetch(0, 1)
    lane.append_fetched([ErasedEvent(ENDPOINT, 1, 1, 101), delivery(2)])
    return lane.next(LATER)


ENDS: dict[Callable[[Lane], Command], str] = {
    returns: "sent",
    is_skipped: "skipped",
    is_allowed: "missing",
    exceeds: "backlog",
    was_erased: "erased",
}


def outcome(command: Command) -> str:
    """How a hold has ended; empty: it has not."""
    match command:
        case Send(delivery=first, attempt=1) if first == delivery(1):
            return "sent"
        case Record(dead=DeadLetter() | DeadRange() as dead):
            assert dead.attempts == 0, "a search for the event counted as a request"
            return dead.reason
    return ""


@pytest.mark.parametrize("batch_max", [None, 10], ids=["one", "batches"])
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_a_hold_ends(end: Callable[[Lane], Command], batch_max: int | None) -> None:
    lane = held(batch_max=batch_max)
    command = end(lane)
    assert outcome(command) == ENDS[end]
    if isinstance(command, Record):
        lane.confirm_recorded(command)
        following = lane.next(LATER)
        assert isinstance(following, Send)
        assert following.delivery == delivery(2)


class NeverSearches(Lane):
    """Never reads a missing event again."""

    def _hold(self, first: MissingEvent, now: float) -> Command:
        command = super()._hold(first, now)
        return None if isinstance(command, Fetch | Wait) else command


class HoldsBeforeSkip(Lane):
    """Holds a delivery that an operator has skipped."""

    def skip(self, seq: int) -> None:
        pass


class HoldsForEver(Lane):
    """Decides once whether to hold."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        self.holds_missing = self.holds_missing or self._held_event is not None
        return super().next(now, gate)


class HoldsBeforeLimits(Lane):
    """Ignores the limits of the backlog."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        self._pending_cut = None
        return super().next(now, gate)


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        (NeverSearches, returns),
        (HoldsBeforeSkip, is_skipped),
        (HoldsForEver, is_allowed),
        (HoldsBeforeLimits, exceeds),
    ],
)
def test_a_hold_that_never_ends_is_found(kind: type[Lane], end: Callable[[Lane], Command]) -> None:
    try:
        ended = outcome(end(held(kind)))
    except AssertionError:
        ended = ""
    assert ended != ENDS[end]


def test_the_time_of_the_retry_policy_begins_when_the_event_is_there() -> None:
    lane = held()
    lane.next(NOW + 86400)
    lane.append_fetched([delivery(1), delivery(2)])
    _, record = attempt(lane, BUSY, NOW + 86400)
    assert record.dead is None
    assert record.progress is not None
    assert (record.progress.attempts, record.progress.first_attempt_at) == (1, NOW + 86400)


def test_attempts_before_the_hold_count() -> None:
    lane = holding(delivery(1))
    _, record = attempt(lane, BUSY)
    lane.confirm_recorded(record)
    lane.invalidate_buffer()
    assert lane.next(NOW) == Fetch(0, 1)
    lane.append_fetched([missing(1)])
    recorded(lane)
    lane.next(LATER)
    lane.append_fetched([delivery(1)])
    send, _ = attempt(lane, BUSY, LATER)
    assert (send.attempt, send.maybe_sent_before) == (2, True)


def test_an_operator_who_resumes_the_endpoint_need_not_wait() -> None:
    lane = held()
    lane.retry_now(NOW + 1)
    assert lane.next(NOW + 1) == Fetch(0, 1)


def test_a_broker_s_lane_is_opened_before_it_is_held() -> None:
    lane = Lane(LaneSnapshot(7, 2, Progress()), sent_through_batch=0, stream=StreamPosition())
    lane.holds_missing = True
    assert lane.next(NOW) == Fetch(0, 0)
    lane.append_fetched([missing(1), delivery(2)])
    assert isinstance(lane.next(NOW), Open)
    lane.record_position(0)
    assert recorded(lane).missing == (101,)
    lane.next(LATER)
    lane.append_fetched([delivery(1), delivery(2)])
    send = lane.next(LATER)
    assert isinstance(send, Send)
    assert send.attempt == 1


def test_a_changed_policy_does_not_exhaust_a_held_delivery() -> None:
    lane = held()
    lane.apply_policy(replace(POLICY, attempts_max=1), blocks=False)
    assert lane.next(NOW) == Wait(LATER)


def test_a_refused_dead_letter_of_a_missing_event_is_decided_again() -> None:
    """The event may exist again when the database accepts the dead letter."""
    lane = holding(missing(1), delivery(2))
    lane.holds_missing = False
    record = lane.next(NOW)
    assert isinstance(record, Record)
    assert isinstance(record.dead, DeadLetter)
    assert record.dead.reason == "missing"
    lane.confirm_recorded(lane.refuse_dead_letter(record))
    later = NOW + lane.hold_refused(NOW)
    assert lane.next(later) == Fetch(0, 1)
    lane.append_fetched([delivery(1), delivery(2)])
    send = lane.next(later)
    assert isinstance(send, Send)
    assert (send.delivery, send.attempt) == (delivery(1), 1)

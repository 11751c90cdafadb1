"""Gates, cuts, blocks and the end of a lane, one test each.

`test_lane` combines them in any order.
"""

from __future__ import annotations

import pytest

from outbox.core.delivery.commands import (
    DeadLetter,
    DeadRange,
    ErasedEvent,
    Fetch,
    Gate,
    LaneSnapshot,
    Progress,
    Record,
    Send,
)
from outbox.core.delivery.lane import Lane
from outbox.core.model.response import AttemptResult, Failure
from outbox.core.model.response_policy import classify
from outbox.core.model.stored_response import stored_response
from tests.core.lane_invariants import POLICY
from tests.core.lane_steps import BUSY, NO, NOW, OK, attempt, lane_with
from tests.core.lane_tables import ENDPOINT, delivery

# ------------------------------------------------------------------- gates


def test_a_probe_before_its_time_is_free() -> None:
    lane = lane_with(delivery(1))
    _, first = attempt(lane, BUSY)
    lane.confirm_recorded(first)
    assert first.progress is not None
    for n in range(2, 20):
        # Neither the number nor the age of free probes can end the delivery.
        lane = Lane(LaneSnapshot(7, 1, lane.checkpoint()._replace(next_attempt_at=NOW + 1e6)), 0)
        lane.next(NOW)
        lane.append_fetched([delivery(1)])
        send, record = attempt(lane, BUSY, NOW + 1000 * n, gate=Gate.PROBE)
        assert send.attempt == n
        assert record.dead is None
        lane.confirm_recorded(record)
        progress = lane.checkpoint()
        assert (progress.attempts, progress.spent, progress.next_attempt_at) == (n, 1, NOW + 1e6)
        assert progress.first_attempt_at == NOW


def test_a_free_probe_may_deliver_or_be_refused() -> None:
    for response, outcome in ((OK, "delivered"), (NO, "refused")):
        lane = lane_with(delivery(1))
        lane.confirm_recorded(attempt(lane, BUSY)[1])
        _, record = attempt(lane, response, gate=Gate.PROBE)
        assert record.attempt is not None
        assert record.attempt.outcome == outcome
        assert lane.acked_seq == 1


def test_a_preempted_request_uses_time_but_no_attempt() -> None:
    lane = lane_with(delivery(1))
    cut = AttemptResult.failed(Failure.TIMEOUT, "called off", 2.0)
    now = NOW
    while now < NOW + POLICY.age_max_s:
        _, record = attempt(lane, cut, now, preempted=True)
        assert record.dead is None
        assert record.progress is not None
        assert record.progress.spent == 0
        assert record.progress.next_attempt_at == now + POLICY.delay_s(1, 0.5)
        lane.confirm_recorded(record)
        now = record.progress.next_attempt_at
    assert lane.checkpoint().attempts > POLICY.attempts_max
    _, record = attempt(lane, cut, now, preempted=True)
    assert isinstance(record.dead, DeadLetter)
    assert record.dead.reason == "exhausted"


def test_a_probe_at_its_time_counts() -> None:
    lane = lane_with(delivery(1))
    for n in range(1, POLICY.attempts_max):
        _, record = attempt(lane, BUSY, NOW + 4 * n, gate=Gate.PROBE)
        assert record.progress is not None
        assert (record.dead, record.progress.spent) == (None, n)
        lane.confirm_recorded(record)
    _, record = attempt(lane, BUSY, NOW + 1e6, gate=Gate.PROBE)
    assert record.dead is not None
    assert record.dead.reason == "exhausted"


def test_a_shut_gate_sends_nothing_but_fetches() -> None:
    lane = Lane(LaneSnapshot(7, 1, Progress()), 0)
    assert lane.next(NOW, Gate.SHUT) == Fetch(0, 0)
    lane.append_fetched([delivery(1)])
    assert lane.next(NOW, Gate.SHUT) is None
    assert isinstance(lane.next(NOW), Send)


def test_a_shut_gate_lets_erased_deliveries_end() -> None:
    lane = lane_with(ErasedEvent(ENDPOINT, 1, 1, 101), delivery(2))
    record = lane.next(NOW, Gate.SHUT)
    assert isinstance(record, Record)
    assert isinstance(record.dead, DeadLetter)
    assert record.dead.reason == "erased"


# --------------------------------------------------------------------- cuts


def cut_of(command: object) -> DeadRange:
    assert isinstance(command, Record)
    assert command.attempt is None
    assert isinstance(command.dead, DeadRange)
    return command.dead


def test_a_cut_is_one_range_in_one_record() -> None:
    lane = lane_with(*(delivery(n, batch=n) for n in range(1, 6)))
    attempt(lane, OK)
    lane.confirm_recorded(attempt(lane, BUSY)[1])
    lane.dead_letter_through(4, "backlog")
    assert lane.acked_seq == 1
    record = lane.next(NOW, Gate.SHUT)
    assert cut_of(record) == DeadRange(2, 2, 4, "backlog", 1, stored_response(BUSY))
    assert isinstance(record, Record)
    assert record.progress == Progress(4, 1, 4, success_at=NOW)
    assert lane.next(NOW) is None
    lane.confirm_recorded(record)
    send, _ = attempt(lane, OK)
    assert (send.delivery.seq, send.previous_seq, send.attempt) == (5, 1, 1)


def test_a_cut_waits_for_the_request_in_flight() -> None:
    for response, first in ((OK, 2), (BUSY, 1)):
        lane = lane_with(*map(delivery, range(1, 5)))
        lane.next(NOW)
        lane.dead_letter_through(3, "backlog")
        assert lane.next(NOW) is None
        outcome = classify(response, maybe_sent_before=False)
        lane.confirm_recorded(
            lane.record_result(outcome, response, POLICY, started_at=NOW, now=NOW, u=0.5)
        )
        record = lane.next(NOW)
        assert (cut_of(record).seq, cut_of(record).to_seq) == (first, 3)


def test_a_cut_may_extend_beyond_the_fetched_deliveries() -> None:
    lane = Lane(LaneSnapshot(7, 20, Progress(floor_batch=2)), sent_through_batch=0)
    assert lane.next(NOW) == Fetch(0, 2)
    lane.dead_letter_through(5, "backlog")
    record = lane.next(NOW)
    assert cut_of(record) == DeadRange(2, 1, 5, "backlog", 0, None)
    assert isinstance(record, Record)
    lane.confirm_recorded(record)
    # The fetch in progress covers a part of the cut; the deliveries after it are not lost.
    lane.append_fetched([delivery(n, batch=2 + n) for n in range(1, 8)])
    assert attempt(lane, OK)[0].delivery == delivery(6, batch=8)
    lane.dead_letter_through(12, "backlog")
    record = lane.next(NOW)
    assert cut_of(record) == DeadRange(8, 7, 12, "backlog", 0, None)
    assert isinstance(record, Record)
    lane.confirm_recorded(record)
    assert lane.next(NOW) == Fetch(12, 9)
    lane.append_fetched([delivery(13, batch=20)])
    assert attempt(lane, OK)[0].previous_seq == 6


def test_a_cut_of_ended_deliveries_does_nothing() -> None:
    lane = lane_with(delivery(1), delivery(2), delivery(3))
    lane.dead_letter_through(2, "backlog")
    lane.dead_letter_through(1, "backlog")
    record = lane.next(NOW)
    assert cut_of(record).to_seq == 2
    assert isinstance(record, Record)
    lane.confirm_recorded(record)
    lane.dead_letter_through(2, "backlog")
    attempt(lane, OK)
    lane.dead_letter_through(99, "backlog")
    assert lane.next(NOW) is None
    assert lane.drained


# ------------------------------------------------------ blocks and lane end


def test_a_blocked_lane_waits_for_an_operator() -> None:
    for response in (NO, BUSY):
        lane = lane_with(delivery(1), delivery(2), delivery(3), delivery(4))
        lane.confirm_recorded(attempt(lane, BUSY, blocks=True)[1])
        assert not lane.blocked
        for n in range(1, POLICY.attempts_max - 1):
            lane.confirm_recorded(attempt(lane, BUSY, NOW + 4 * n, blocks=True)[1])
        _, record = attempt(lane, response, NOW + 1e6, blocks=True)
        assert record.blocks
        lane.confirm_recorded(record)
        assert lane.blocked
        assert [lane.next(NOW, gate) for gate in Gate] == [None, None, None]
        # The next owner's lane is blocked too.
        lane = Lane(LaneSnapshot(7, 4, lane.checkpoint(), blocked=True), 0)
        assert lane.next(NOW) is None
        lane.dead_letter_through(2, "backlog")
        record = lane.next(NOW)
        assert isinstance(record, Record)
        assert not record.blocks
        lane.confirm_recorded(record)
        assert lane.next(NOW) is None
        lane.unblock()
        assert lane.next(NOW) == Fetch(2, 1)


def test_the_last_delivery_of_a_lane_is_marked_on_every_attempt() -> None:
    lane = lane_with(delivery(1), delivery(2))
    lane.mark_ended()
    assert not attempt(lane, OK)[0].lane_ends
    send, record = attempt(lane, BUSY)
    lane.confirm_recorded(record)
    assert send.lane_ends
    assert attempt(lane, BUSY, gate=Gate.PROBE)[0].lane_ends
    # The next owner marks it too.
    lane = Lane(LaneSnapshot(7, 2, lane.checkpoint(), ended=True), 0)
    lane.next(NOW)
    lane.append_fetched([delivery(2)])
    assert attempt(lane, OK, gate=Gate.PROBE)[0].lane_ends


# ----------------------------------------------------------------- stalling


def test_stalled_since_is_the_time_of_pending_deliveries_without_a_success() -> None:
    lane = Lane(LaneSnapshot(7, 0, Progress()), 0)
    assert lane.stalled_since is None
    lane.extend_to(3, NOW)
    lane.extend_to(4, NOW + 1)
    assert lane.stalled_since == NOW
    lane.next(NOW)
    lane.append_fetched([delivery(n) for n in range(1, 5)])
    lane.confirm_recorded(attempt(lane, NO, NOW + 2)[1])
    assert lane.stalled_since == NOW
    attempt(lane, OK, NOW + 3)
    assert lane.stalled_since == NOW + 3
    attempt(lane, OK, NOW + 4)
    lane.confirm_recorded(attempt(lane, NO, NOW + 5)[1])
    assert lane.stalled_since is None
    lane.extend_to(5, NOW + 9)
    assert lane.stalled_since == NOW + 9


def test_deliveries_fetched_before_they_were_announced_are_pending_once() -> None:
    lane = Lane(LaneSnapshot(7, 1, Progress(), pending_since=NOW), 0)
    lane.next(NOW)
    lane.append_fetched([delivery(1), delivery(2)])
    assert lane.pending == 2
    attempt(lane, OK)
    assert not lane.drained
    attempt(lane, OK)
    assert (lane.pending, lane.stalled_since, lane.drained) == (0, None, True)
    lane.extend_to(2, NOW + 1)
    assert lane.stalled_since is None


@pytest.mark.parametrize(
    ("pending_since", "success_at", "stalled_since"),
    [(5.0, None, 5.0), (5.0, 7.0, 7.0), (7.0, 5.0, 7.0), (None, 5.0, 5.0), (None, None, None)],
)
def test_a_new_owner_restores_stalled_since(
    pending_since: float | None, success_at: float | None, stalled_since: float | None
) -> None:
    progress = Progress(1, 1, 1, success_at=success_at)
    lane = Lane(LaneSnapshot(7, 2, progress, pending_since=pending_since), 0)
    assert lane.stalled_since == stalled_since
    assert Lane(LaneSnapshot(7, 1, progress, pending_since=pending_since), 0).stalled_since is None
    lane.extend_to(3, 9.0)
    assert lane.stalled_since == (9.0 if stalled_since is None else stalled_since)

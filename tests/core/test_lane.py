"""A lane against a receiver with memory, and owners that crash at any step.

`LaneMachine` lets Hypothesis choose the events; `test_random_histories` does the same with a seeded
random generator.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from outbox.core.delivery.commands import (
    DeadLetter,
    DeadRange,
    ErasedEvent,
    Fetch,
    Gate,
    LaneSnapshot,
    Open,
    Progress,
    Record,
    Send,
    Wait,
)
from outbox.core.delivery.delivery_buffer import REFILL_LEVEL
from outbox.core.delivery.lane import Lane
from outbox.core.delivery.operational_events import STUCK_EVERY
from outbox.core.delivery.stream_position import StreamPosition
from outbox.core.model.response import AttemptResult, Failure
from outbox.core.model.response_policy import AttemptOutcome
from outbox.core.model.stored_response import stored_response
from tests.core.lane_invariants import POLICY
from tests.core.lane_model import World
from tests.core.lane_steps import BUSY, NO, NOW, OK, attempt, lane_with
from tests.core.lane_tables import ENDPOINT, delivery
from tests.core.random_walk import STATUSES, hunt_lane

statuses = st.sampled_from(STATUSES)
uniforms = st.sampled_from([0.0, 0.5, 0.99])


class LaneMachine(RuleBasedStateMachine):
    """Deliveries, responses, writes and crashes in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(
        count=st.integers(1, 20),
        expires_in_s=st.sampled_from([None, None, 0.5, 5.0]),
        announced=st.booleans(),
        given=st.booleans(),
    )
    def offer(self, count: int, expires_in_s: float | None, announced: bool, given: bool) -> None:
        self.world.offer(count, expires_in_s=expires_in_s, announced=announced, given=given)

    @rule(i=st.integers(0, 3))
    def erase(self, i: int) -> None:
        self.world.erase(i)

    @rule()
    def reread(self) -> None:
        self.world.reread()

    @rule()
    def release(self) -> None:
        self.world.release()

    @rule(gate=st.sampled_from([Gate.OPEN, Gate.OPEN, Gate.PROBE, Gate.SHUT]))
    def proceed(self, gate: Gate) -> None:
        self.world.proceed(gate)

    @precondition(lambda self: self.world.fetching is not None)
    @rule(rows=st.integers(1, 12))
    def fetched(self, rows: int) -> None:
        self.world.fetched(rows)

    @precondition(lambda self: self.world.sending is not None)
    @rule(
        status=statuses,
        received=st.booleans(),
        u=uniforms,
        after_s=st.sampled_from([0.1, 20.0]),
        blocks=st.booleans(),
        part=st.sampled_from([None, 0, 1, 2, 7]),
    )
    def response(
        self,
        status: int | None,
        received: bool,
        u: float,
        after_s: float,
        blocks: bool,
        part: int | None,
    ) -> None:
        self.world.response(
            status, received=received, u=u, after_s=after_s, blocks=blocks, part=part
        )

    @precondition(lambda self: self.world.sending is not None)
    @rule(after_s=st.sampled_from([0.1, 20.0]))
    def follow(self, after_s: float) -> None:
        self.world.follow(after_s)

    @rule()
    def peek(self) -> None:
        self.world.peek()

    @rule(batch_max=st.sampled_from([None, 1, 3, 50]))
    def batch_up_to(self, batch_max: int | None) -> None:
        self.world.batch_up_to(batch_max)

    @precondition(lambda self: self.world.sending is not None)
    @rule()
    def unsent(self) -> None:
        self.world.unsent()

    @precondition(lambda self: self.world.pending)
    @rule(records=st.integers(1, 5))
    def write_group(self, records: int) -> None:
        self.world.write_group(records)

    @rule()
    def checkpoint(self) -> None:
        self.world.checkpoint()

    @rule(seconds=st.sampled_from([0.1, 2.0, 20.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(count=st.integers(0, 20))
    def cut(self, count: int) -> None:
        self.world.cut(count)

    @rule()
    def skip(self) -> None:
        self.world.skip()

    @rule()
    def notice_skip(self) -> None:
        self.world.notice_skip()

    @rule()
    def unblock(self) -> None:
        self.world.unblock()

    @rule()
    def end(self) -> None:
        self.world.end()

    @rule(written=st.integers(0, 5), received=st.booleans(), skew_s=st.sampled_from([0, -3, 3]))
    def crash(self, written: int, received: bool, skew_s: float) -> None:
        self.world.crash(written, received=received, skew_s=skew_s)

    @precondition(lambda self: self.world.ghosts)
    @rule(i=st.integers(0, 3))
    def deliver_late_copy(self, i: int) -> None:
        self.world.deliver_late_copy(i)

    @rule()
    def stop(self) -> None:
        self.world.stop()

    @rule()
    def hand_over(self) -> None:
        self.world.hand_over()

    @rule()
    def everything_ends(self) -> None:
        self.world.expect_everything_ends()


TestLane = LaneMachine.TestCase


@pytest.mark.slow
def test_random_histories(seed: int) -> None:
    hunt_lane(3 * settings().max_examples, first_seed=seed)


# -------------------------------------------------------------- single cases


def test_a_success_does_not_wait_for_its_write() -> None:
    lane = lane_with(delivery(1), delivery(2))
    first, record = attempt(lane, OK)
    assert not record.urgent
    assert record.attempt is not None
    assert (record.attempt.outcome, record.attempt.status) == ("delivered", 200)
    second, _ = attempt(lane, OK)
    assert [(s.delivery.seq, s.previous_seq, s.attempt) for s in (first, second)] == [
        (1, 0, 1),
        (2, 1, 1),
    ]
    assert (lane.acked_seq, lane.committed_seq, lane.settled) == (2, 0, False)
    lane.confirm_recorded(record)
    assert lane.checkpoint() == Progress(1, 1, 1, success_at=NOW + 0.1)


def test_a_failure_is_written_before_the_lane_goes_on() -> None:
    lane = lane_with(delivery(1), delivery(2))
    _, record = attempt(lane, BUSY)
    assert record.progress == Progress(0, 0, 1, 1, 1, 1, NOW, NOW + 0.5, stored_response(BUSY))
    assert lane.next(NOW + 60) is None
    assert lane.checkpoint() == Progress()
    lane.confirm_recorded(record)
    assert lane.checkpoint() == record.progress
    assert lane.next(NOW) == Wait(NOW + 0.5)
    assert lane.fetch() is None
    send, _ = attempt(lane, OK, NOW + 0.5)
    assert (send.delivery.seq, send.attempt, send.maybe_sent_before) == (1, 2, True)


def test_previous_sequence_skips_dead_letters() -> None:
    lane = lane_with(*map(delivery, range(1, 5)))
    attempt(lane, OK)
    for seq in (2, 3):
        _, record = attempt(lane, NO)
        assert record.dead == DeadLetter(delivery(seq), "refused", 1, stored_response(NO))
        assert record.progress == Progress(seq, 1, 1, success_at=NOW)
        assert lane.next(NOW) is None
        lane.confirm_recorded(record)
    send, _ = attempt(lane, OK)
    assert (send.delivery.seq, send.previous_seq) == (4, 1)


def test_a_refused_dead_letter_is_pending_again_and_waits_longer_each_time() -> None:
    """For weeks, too, without sending again; and from the beginning after one that was written."""
    lane = lane_with(delivery(1), delivery(2), delivery(3))
    now, waits = NOW, []
    _, record = attempt(lane, NO, now)
    for _ in range(1_100):
        pending = lane.refuse_dead_letter(record)
        assert pending.dead is None
        assert pending.progress is not None
        assert (pending.progress.acked_seq, pending.progress.retry_seq) == (0, 1)
        lane.confirm_recorded(pending)
        waits.append(lane.hold_refused(now))
        assert lane.next(now) == Wait(now + waits[-1])
        now += waits[-1]
        assert lane.next(now) == Fetch(0, 1)
        lane.append_fetched([delivery(1), delivery(2), delivery(3)])
        again = lane.next(now)
        assert isinstance(again, Record)
        assert again.dead == DeadLetter(delivery(1), "refused", 1, stored_response(NO))
        assert again.attempt is None
        record = again
    assert waits[:8] == [10, 20, 40, 80, 160, 320, 600, 600]
    lane.confirm_recorded(record)
    _, record = attempt(lane, NO, now)
    lane.confirm_recorded(lane.refuse_dead_letter(record))
    assert lane.hold_refused(now) == 10


def test_a_refused_range_is_cut_again_as_far_as_was_decided_meanwhile() -> None:
    lane = lane_with(*map(delivery, range(1, 10)))
    lane.dead_letter_through(3, "backlog")
    record = lane.next(NOW)
    assert isinstance(record, Record)
    lane.dead_letter_through(5, "backlog")
    lane.confirm_recorded(lane.refuse_dead_letter(record))
    again = lane.next(NOW)
    assert isinstance(again, Record)
    assert isinstance(again.dead, DeadRange)
    assert (again.dead.seq, again.dead.to_seq) == (1, 5)


def test_a_budget_ends_only_after_an_attempt() -> None:
    lane = lane_with(delivery(1))
    for n in range(1, POLICY.attempts_max):
        _, record = attempt(lane, BUSY, NOW + 4 * n)
        assert record.progress is not None
        assert (record.dead, record.progress.attempts, record.progress.spent) == (None, n, n)
        lane.confirm_recorded(record)
    _, record = attempt(lane, BUSY, NOW + 1e6)
    assert record.dead is not None
    assert (record.dead.reason, record.dead.attempts) == ("exhausted", POLICY.attempts_max)
    assert record.dead.last_response == stored_response(BUSY)

    lane = lane_with(delivery(1))
    lane.confirm_recorded(attempt(lane, BUSY, NOW)[1])
    # The budget has expired, and yet the delivery gets the attempt that it waited for.
    send, record = attempt(lane, BUSY, NOW + POLICY.age_max_s)
    assert (send.attempt, record.dead and record.dead.reason) == (2, "exhausted")


def test_an_expired_delivery_is_dead_lettered_unsent() -> None:
    ends_at = NOW + 3
    lane = lane_with(delivery(1, expires_at=ends_at), delivery(2))
    lane.confirm_recorded(attempt(lane, BUSY)[1])
    # An open circuit breaker must not delay the deliveries behind an expired one.
    assert lane.next(NOW + 1, Gate.SHUT) == Wait(NOW + 3)
    record = lane.next(NOW + 3, Gate.SHUT)
    assert isinstance(record, Record)
    assert record.attempt is None
    assert record.dead is not None
    assert (record.dead.reason, record.dead.attempts) == ("expired", 1)
    assert lane.next(NOW + 3) is None
    lane.confirm_recorded(record)
    assert lane.next(NOW + 3, Gate.SHUT) is None
    assert attempt(lane, OK)[0].previous_seq == 0


def test_a_retry_waits_no_longer_than_the_event_expiry() -> None:
    ends_at = NOW + 0.25
    lane = lane_with(delivery(1, expires_at=ends_at))
    lane.confirm_recorded(attempt(lane, BUSY)[1])
    assert lane.next(NOW) == Wait(NOW + 0.25)


def test_a_skipped_delivery_is_dead_lettered_when_it_is_the_next_one() -> None:
    lane = lane_with(*map(delivery, range(1, 4)))
    send = lane.next(NOW)
    assert isinstance(send, Send)
    lane.skip(1)
    record = lane.record_result(AttemptOutcome.RETRY, BUSY, POLICY, started_at=NOW, now=NOW, u=0.5)
    lane.confirm_recorded(record)
    # Neither its retry time nor the circuit breaker delays it.
    skipped = lane.next(NOW, Gate.SHUT)
    assert isinstance(skipped, Record)
    assert skipped.dead == DeadLetter(delivery(1), "skipped", 1, stored_response(BUSY))
    assert not skipped.blocks
    lane.confirm_recorded(skipped)
    lane.skip(1)
    send, record = attempt(lane, OK)
    assert (send.delivery.seq, send.previous_seq) == (2, 0)


def test_a_skip_of_what_was_delivered_has_no_effect() -> None:
    lane = lane_with(delivery(1), delivery(2))
    send = lane.next(NOW)
    assert isinstance(send, Send)
    lane.skip(1)
    record = lane.record_result(
        AttemptOutcome.DELIVERED, OK, POLICY, started_at=NOW, now=NOW, u=0.0
    )
    assert record.dead is None
    assert attempt(lane, OK)[0].delivery.seq == 2


def test_a_skipped_delivery_is_not_sent_when_its_slot_comes() -> None:
    lane = lane_with(delivery(1), delivery(2))
    send = lane.next(NOW)
    assert isinstance(send, Send)
    assert lane.revalidate(send, NOW) is send
    lane.skip(1)
    assert lane.revalidate(send, NOW) is None
    lane.cancel_send()
    assert isinstance(lane.next(NOW), Record)


def test_a_held_lane_is_no_probe_before_its_time() -> None:
    """The circuit breaker does not count its result, and would admit it again at once."""
    lane = Lane(LaneSnapshot(1, 1, Progress()), 0, stream=StreamPosition())
    assert lane.fetch() is not None
    lane.append_fetched([delivery(1)])
    forgot = AttemptResult.failed(Failure.FORGOT, "", 0.1)
    for now in (NOW, NOW + 60):
        assert isinstance(lane.next(now, Gate.PROBE), Open)
        record = lane.record_stream_failed(
            forgot, POLICY, started_at=now, now=now, u=0.5, held=True
        )
        lane.confirm_recorded(record)
        command = lane.next(now, Gate.PROBE)
        assert isinstance(command, Wait)
        assert now < command.until <= now + 60
    lane.retry_now(NOW + 60)
    assert isinstance(lane.next(NOW + 60, Gate.PROBE), Open)


def test_a_delivery_is_not_appended_when_its_slot_comes_to_a_lane_that_must_be_opened() -> None:
    """The credentials of the broker have changed while it waited."""
    lane = Lane(LaneSnapshot(1, 1, Progress()), 0, stream=StreamPosition())
    assert lane.fetch() is not None
    lane.append_fetched([delivery(1)])
    assert isinstance(lane.next(NOW), Open)
    lane.record_position(0)
    send = lane.next(NOW)
    assert isinstance(send, Send)
    assert lane.revalidate(send, NOW) is send
    lane.reopen()
    assert lane.revalidate(send, NOW) is None
    lane.cancel_send()
    assert isinstance(lane.next(NOW), Open)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_policy_with_fewer_attempts_ends_a_delivery_that_has_made_them(blocks: bool) -> None:
    lane = lane_with(delivery(1), delivery(2))
    for n in range(2):
        lane.confirm_recorded(attempt(lane, BUSY, NOW + 4 * n)[1])
    lane.apply_policy(replace(POLICY, attempts_max=3), blocks=blocks)
    assert lane.next(NOW + 4, Gate.SHUT) is None
    lane.apply_policy(replace(POLICY, attempts_max=2), blocks=blocks)
    record = lane.next(NOW + 4, Gate.SHUT)
    assert isinstance(record, Record)
    assert record.dead == DeadLetter(delivery(1), "exhausted", 2, stored_response(BUSY))
    assert record.blocks == blocks
    lane.confirm_recorded(record)
    assert isinstance(lane.next(NOW + 4), Send) != blocks


def test_a_delivery_that_fails_alone_is_reported_as_stuck() -> None:
    lane = lane_with(delivery(1))
    policy = replace(POLICY, attempts_max=100, age_max_s=86400.0)
    stuck = []
    for n in range(2 * STUCK_EVERY + 1):
        send = lane.next(NOW + 60 * n, Gate.OPEN)
        assert isinstance(send, Send)
        record = lane.record_result(
            AttemptOutcome.RETRY, BUSY, policy, started_at=NOW, now=NOW + 60 * n, u=0.0,
            endpoint_healthy=n != STUCK_EVERY - 1,
        )  # fmt: skip
        stuck.append(record.stuck)
        lane.confirm_recorded(record)
    # At the fifth attempt the whole endpoint was failing.
    assert [n for n, each in enumerate(stuck, 1) if each] == [STUCK_EVERY + 1, 2 * STUCK_EVERY + 1]


def test_an_erased_event_keeps_its_sequence_number() -> None:
    erased = ErasedEvent(ENDPOINT, 1, 1, 101)
    lane = lane_with(erased, delivery(2))
    record = lane.next(NOW)
    assert isinstance(record, Record)
    assert record.dead == DeadLetter(erased, "erased", 0, None)
    lane.confirm_recorded(record)
    assert attempt(lane, OK)[0].delivery.seq == 2


def test_a_new_owner_reads_checkpoint_and_tail() -> None:
    progress = Progress(4, 4, 2, retry_seq=5, attempts=2, first_attempt_at=NOW, next_attempt_at=NOW)
    tail = [(6, 3, NOW + 2), (5, 2, NOW + 1)]
    lane = Lane(LaneSnapshot(7, 9, progress, tail), sent_through_batch=3)
    assert lane.checkpoint() == Progress(6, 6, 3, success_at=NOW + 2)
    assert (lane.pending, lane.settled) == (3, True)
    assert lane.next(NOW) == Fetch(6, 3)
    lane.append_fetched([delivery(7, batch=3), delivery(8, batch=4)])
    first, record = attempt(lane, AttemptResult.completed(409, 0.1))
    # The delivery may have been sent before: the receiver already has it.
    assert (first.attempt, first.maybe_sent_before) == (1, True)
    assert not record.urgent
    second, record = attempt(lane, AttemptResult.completed(409, 0.1))
    assert not second.maybe_sent_before
    assert record.dead is not None


def test_a_stale_tail_is_sent_again_rather_than_skipped() -> None:
    tail = [(6, 3, NOW), (4, 2, NOW), (3, 1, NOW)]
    lane = Lane(LaneSnapshot(7, 9, Progress(4, 4, 2), tail), sent_through_batch=9)
    assert lane.acked_seq == 4
    assert lane.next(NOW) == Fetch(4, 2)


def test_a_lane_prefetches_within_its_limit() -> None:
    lane = Lane(LaneSnapshot(7, 40, Progress()), sent_through_batch=0)
    assert lane.next(NOW) == Fetch(0, 0)
    assert lane.next(NOW) is None
    lane.append_fetched([delivery(n, batch=n) for n in range(1, 21)])
    assert lane.fetch() is None
    while lane.acked_seq < 20 - REFILL_LEVEL:
        attempt(lane, OK)
    assert lane.fetch() == Fetch(20, 20)
    assert lane.fetch() is None
    with pytest.raises(AssertionError, match="sequence 22 follows 20"):
        lane.append_fetched([delivery(22)])


def test_a_stopping_lane_finishes_its_request_in_flight() -> None:
    lane = lane_with(delivery(1), delivery(2))
    send = lane.next(NOW)
    assert isinstance(send, Send)
    lane.stop()
    assert lane.in_flight
    record = lane.record_result(
        AttemptOutcome.DELIVERED, OK, POLICY, started_at=NOW, now=NOW, u=0.0
    )
    assert lane.next(NOW) is None
    assert not lane.settled
    lane.confirm_recorded(record)
    assert lane.settled


def test_the_first_copy_that_the_receiver_got_counts() -> None:
    """The only way for `previous_seq` to change: an acknowledgement was lost, and the duplicate was
    then dead-lettered.
    """
    world = World()
    world.offer(2)
    world.proceed()
    world.fetched(2)
    for status in (200, None):
        world.proceed()
        world.response(status, received=True, u=0.0, after_s=0.0)
    world.crash(written=0, received=False)
    world.proceed()
    world.fetched(2)
    world.proceed()
    world.response(400, received=False, u=0.0, after_s=0.0)
    world.write_group(1)
    command = world.proceed()
    assert isinstance(command, Send)
    assert (command.delivery.seq, command.previous_seq) == (2, 0)
    assert world.receiver.got.keys() == {1, 2}
    world.expect_everything_ends()

"""A request run goes on after plain successes only, and while nothing else is to be done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox.core.delivery.circuit_breaker import CircuitBreaker
from outbox.core.delivery.commands import ErasedEvent, Progress, Send
from outbox.core.delivery.connection_reuse import DISTRUST_S, ConnectionReuse
from outbox.core.delivery.request_run import RESULTS_MAX, RESULTS_S, RequestRun
from outbox.core.model.response import AttemptResult, Failure
from outbox.core.model.response_policy import AttemptOutcome
from tests.core.lane_steps import NOW, OK, lane_with
from tests.core.lane_tables import ENDPOINT, delivery

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.core.model.delivery import Delivery

ELAPSED_S = OK.elapsed_s


class Running:
    """A run of a lane, whose first request is in flight."""

    def __init__(self, *deliveries: Delivery | ErasedEvent) -> None:
        self.lane = lane_with(*(deliveries or [delivery(n) for n in range(1, 4)]))
        self.breaker = CircuitBreaker()
        self.reuse = ConnectionReuse()
        self.admits = True
        self.admitted: list[float] = []
        send = self.lane.next(NOW)
        assert isinstance(send, Send)
        assert self.lane.may_run(send)
        self.breaker.started(7)
        self.run = RequestRun(self.lane, self.breaker, self._admit, send, NOW)

    def _admit(self, now: float) -> bool:
        self.admitted.append(now)
        return self.admits

    def advance(self, response: AttemptResult = OK, now: float = NOW + 1) -> Send | None:
        may_reuse = self.reuse.is_allowed(now)
        return self.run.advance(
            response, {"body": "ok"}, None, now=now, admission_now=5.0, may_reuse=may_reuse
        )


def test_after_a_success_the_next_delivery_is_sent_at_once() -> None:
    running = Running()
    lane, run = running.lane, running.run
    send = running.advance()
    assert send is run.send
    assert send is not None
    assert (send.delivery.seq, send.previous_seq, send.attempt) == (2, 1, 1)
    assert (lane.acked_seq, lane.committed_seq, lane.in_flight, lane.pending) == (1, 0, True, 2)
    assert run.started_at == NOW + 1
    assert lane.next(NOW + 1) is None
    assert running.advance(now=NOW + 2)
    assert running.advance(now=NOW + 3) is None  # Nothing follows the third one.
    results = run.results
    assert [row[:5] for row in results.rows] == [
        (1, 1, 1, "delivered", 200),
        (1, 2, 1, "delivered", 200),
    ]
    assert [row.started_at for row in results.rows] == [NOW, NOW + 1]
    assert results.elapsed_s == [ELAPSED_S] * 2
    assert [row.response for row in results.rows] == [{"body": "ok"}] * 2
    assert results.latencies_s == [pytest.approx(ELAPSED_S), pytest.approx(1 + ELAPSED_S)]
    lane.confirm_run(results)
    assert lane.checkpoint() == Progress(2, 2, 1, success_at=NOW + 1 + ELAPSED_S)


@pytest.mark.parametrize(
    "response",
    [
        *(AttemptResult.completed(status, 0.1) for status in (199, 300, 304, 404, 409, 429, 503)),
        AttemptResult.completed(200, 0.1, detail="incomplete body: the connection was closed"),
        AttemptResult.failed(Failure.TIMEOUT, "", 0.1),
    ],
)
def test_any_other_response_ends_it(response: AttemptResult) -> None:
    running = Running()
    assert running.advance(response) is None
    assert (running.lane.acked_seq, len(running.run.results), running.admitted) == (0, 0, [])
    assert running.run.send.delivery.seq == 1


def fail(running: Running) -> None:
    """Another lane's request fails."""
    running.breaker.started(8)
    running.breaker.record_result(AttemptOutcome.RETRY, NOW, 0.5)


def hold_off(running: Running) -> None:
    """Another lane's request gets a Retry-After."""
    running.breaker.started(8)
    running.breaker.record_result(AttemptOutcome.RETRY, NOW, 0.5, retry_after_s=5.0)


def receive_unsolicited_data(running: Running) -> None:
    """On any connection of the endpoint, also that of another lane."""
    running.reuse = running.reuse.record_unsolicited(NOW)


def turn_keep_alive_off(running: Running) -> None:
    running.reuse = ConnectionReuse(keep_alive=False)


STOPS: list[Callable[[Running], object]] = [
    fail,
    hold_off,
    receive_unsolicited_data,
    turn_keep_alive_off,
    lambda running: running.breaker.pause(),
    lambda running: running.breaker.resume(NOW),
    lambda running: running.lane.stop(),
    lambda running: running.lane.invalidate_buffer(),
    lambda running: running.lane.dead_letter_through(2, "backlog"),
    lambda running: running.lane.set_batch_max(10),
]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("after", [0, 1])
def test_whatever_else_is_to_be_done_ends_it(stop: Callable[[Running], object], after: int) -> None:
    running = Running()
    for _ in range(after):
        assert running.advance() is not None
    stop(running)
    assert running.advance() is None
    assert running.lane.acked_seq == len(running.run.results) == len(running.admitted) == after


def test_connection_reuse_is_checked_at_the_time_of_the_next_request() -> None:
    running = Running()
    running.reuse = ConnectionReuse(unsolicited_at=NOW + 2 - DISTRUST_S)
    assert running.advance(now=NOW + 1) is None
    assert running.advance(now=NOW + 2) is not None


def test_admission_control_ends_it() -> None:
    running = Running()
    running.admits = False
    assert running.advance() is None
    assert (running.admitted, running.lane.acked_seq) == ([5.0], 0)


def test_an_expired_or_erased_event_ends_it() -> None:
    expires_at = NOW + 3
    assert Running(delivery(1), delivery(2, expires_at=expires_at)).advance(now=NOW + 2)
    assert Running(delivery(1), delivery(2, expires_at=expires_at)).advance(now=NOW + 3) is None
    assert Running(delivery(1), ErasedEvent(ENDPOINT, 2, 1, 102)).advance() is None


def test_its_results_are_due_by_their_number() -> None:
    count = 2 * RESULTS_MAX + 3
    running = Running(*(delivery(n) for n in range(1, count + 1)))
    recorded = []
    while running.advance(now=NOW) is not None:
        if (due := running.run.pop_due(NOW)) is not None:
            recorded.append([row.seq for row in due.rows])
    recorded.append([row.seq for row in running.run.results.rows])
    assert [len(seqs) for seqs in recorded] == [RESULTS_MAX, RESULTS_MAX, 2]
    assert [seq for seqs in recorded for seq in seqs] == list(range(1, count))


def test_its_results_are_due_by_the_age_of_the_first_one() -> None:
    running = Running()
    for n in (1, 2):
        assert running.advance(now=NOW + 0.6 * n * RESULTS_S) is not None
        due = running.run.pop_due(NOW + 0.6 * n * RESULTS_S)
        assert (due and [row.seq for row in due.rows]) == ([1, 2] if n == 2 else None)
    assert not running.run.results


def test_a_retry_or_a_single_delivery_begins_none() -> None:
    lane = lane_with(delivery(1))
    send = lane.next(NOW)
    assert isinstance(send, Send)
    assert not lane.may_run(send)
    lane = lane_with(delivery(1), delivery(2))
    send = lane.next(NOW)
    assert isinstance(send, Send)
    assert lane.may_run(send)
    assert not lane.may_run(send._replace(attempt=2))
    assert not lane.may_run(send._replace(batch=(send.delivery,)))

"""A delivery that its receiver cannot process: how often it is sent, and what others lose by it.

Lanes and the circuit breaker of their endpoint run on a clock of the test.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

import pytest

from outbox.core.delivery.circuit_breaker import BreakerRecord, BreakerState, CircuitBreaker
from outbox.core.delivery.commands import Gate, Send, Wait
from outbox.core.model.response import AttemptResult, Failure
from outbox.core.model.response_policy import classify
from outbox.core.model.retry_policy import STANDARD
from tests.core.lane_steps import NOW, attempt, lane_with
from tests.core.lane_tables import delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox.core.delivery.commands import AttemptRow
    from outbox.core.delivery.lane import Lane

OK, RAISED, MISSING = (AttemptResult.completed(status, 0.02) for status in (200, 500, 404))
DOWN = AttemptResult.completed(503, 0.02)
REFUSED_CONNECTION = AttemptResult.failed(Failure.CONNECT, "connection refused", 0.02)
TAKES_S = 0.02


def own_lane(number: int, *, probes: bool = True, deliveries: int = 1) -> Lane:
    """A lane with its deliveries in memory."""
    lane = lane_with(*map(delivery, range(1, deliveries + 1)), lane_id=number)
    lane.probes = probes
    return lane


@dataclass
class Run:
    """What the receiver got, in seconds since the start, by lane."""

    requests: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    rows: list[AttemptRow] = field(default_factory=list)
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)


def run(
    lanes: Sequence[Lane],
    respond: Callable[[int, float], AttemptResult],
    seconds: float,
    rng: Random,
    breaker: CircuitBreaker | None = None,
) -> Run:
    """Run the lanes as their worker does.

    Args:
        respond: the response to a lane's request at a time, in seconds since the start.
    """
    found = Run(breaker=breaker or CircuitBreaker())
    breaker, by_id = found.breaker, {lane.id: lane for lane in lanes}
    wakes = dict.fromkeys(by_id, NOW)
    now = NOW
    while True:
        for lane_id in breaker.wake(now):
            wakes[lane_id] = now
        due = [(at, lane_id) for lane_id, at in wakes.items() if at <= now]
        if not due:
            times = [*wakes.values(), breaker.wake_at()]
            now = max(now, min((at for at in times if at is not None), default=NOW + seconds))
            if now >= NOW + seconds:
                return found
            continue
        _, lane_id = min(due)
        del wakes[lane_id]
        lane = by_id[lane_id]
        command = lane.next(now, breaker.admit(lane_id, now))
        if isinstance(command, Wait):
            wakes[lane_id] = command.until
            breaker.yielded(lane_id)
        elif isinstance(command, Send):
            started_at, before = now, breaker.state
            breaker.started(lane_id)
            response = respond(lane_id, now - NOW)
            found.requests[lane_id].append(now - NOW)
            now += TAKES_S
            outcome = breaker.record_result(
                classify(response, maybe_sent_before=command.maybe_sent_before), now, rng.random()
            )
            record = lane.record_result(
                outcome, response, STANDARD, started_at=started_at, now=now, u=rng.random(),
                observed_s=started_at - (lane.first_attempt_at or started_at),
            )  # fmt: skip
            lane.confirm_recorded(record)
            assert record.attempt is not None
            found.rows.append(record.attempt)
            wakes[lane_id] = now
            if breaker.state is not before:
                is_probed = breaker.state in (BreakerState.FAILING, BreakerState.REJECTING)
                if not is_probed and command.attempt > 1:
                    for each in lanes:
                        each.probe_now()
                wakes |= {each.id: now for each in lanes if each.has_work}
        else:
            breaker.yielded(lane_id)


def failing_breaker() -> CircuitBreaker:
    return CircuitBreaker(BreakerRecord(BreakerState.FAILING, since=NOW))


@pytest.mark.parametrize("response", [RAISED, MISSING], ids=["500", "404"])
@pytest.mark.parametrize("begins", ["healthy", "failing"])
def test_a_poisonous_delivery_is_sent_at_most_12_times_in_two_minutes(
    response: AttemptResult, begins: str
) -> None:
    """Of a lane that is alone, and where the circuit breaker is open from the beginning."""
    counts = []
    for seed in range(300):
        breaker = None if begins == "healthy" else failing_breaker()
        if response is MISSING:
            breaker = CircuitBreaker(BreakerRecord(BreakerState.REJECTING, since=NOW))
        found = run([own_lane(1)], lambda *_: response, 120.0, Random(seed), breaker)
        counts.append(len(found.requests[1]))
    assert max(counts) <= 12, counts


def test_every_poisonous_lane_has_its_own_pace() -> None:
    for seed in range(50):
        lanes = [own_lane(n) for n in range(1, 5)]
        found = run(lanes, lambda *_: RAISED, 120.0, Random(seed))
        assert max(map(len, found.requests.values())) <= 12


@pytest.mark.parametrize("response", [DOWN, REFUSED_CONNECTION], ids=["503", "no connection"])
def test_an_outage_is_probed_as_before(response: AttemptResult) -> None:
    """It says nothing about the delivery, and its end is to be found soon."""
    for seed in range(50):
        found = run([own_lane(1)], lambda *_: response, 600.0, Random(seed), failing_breaker())
        times = found.requests[1]
        assert sum(at < 10 for at in times) >= 10
        gaps = [(b, b - a) for a, b in pairwise(times)]
        assert all(gap <= max(1.0, at * 0.1) + 0.1 for at, gap in gaps)


def test_an_outage_that_responds_500_ends_for_all_lanes_when_one_succeeds() -> None:
    """With many lanes, one of them is probed about every second."""
    for seed in range(20):
        lanes = [own_lane(n) for n in range(1, 65)]
        found = run(
            lanes, lambda _, at: RAISED if at < 30 else OK, 120.0, Random(seed), failing_breaker()
        )
        last = [times[-1] for times in found.requests.values()]
        assert len(last) == 64
        # The next probe is within a tenth of the outage; here the lanes take turns after it.
        assert max(last) < 30 + 3 + 65 * TAKES_S + 0.1


def test_a_poisonous_lane_does_not_hold_the_probe_of_another_one() -> None:
    for seed in range(50):
        lanes = [own_lane(1), own_lane(2)]
        found = run(
            lanes,
            lambda lane, at: RAISED if lane == 1 or at < 20 else OK,
            120.0,
            Random(seed),
            failing_breaker(),
        )
        assert lanes[1].acked_seq == 1
        assert found.breaker.state is not BreakerState.FAILING or len(found.requests[2]) <= 12


@pytest.mark.parametrize("poisonous", [2, 5, 8])
def test_poisonous_lanes_beside_a_good_one_are_not_hammered_and_do_not_slow_it(
    poisonous: int,
) -> None:
    """Each success of the good one ends the failure of the endpoint, until they fail again."""
    for seed in range(5):
        good = own_lane(0, deliveries=2000)
        bad = [own_lane(n) for n in range(1, poisonous + 1)]
        found = run([good, *bad], lambda lane, _: RAISED if lane else OK, 120.0, Random(seed))
        assert max(len(found.requests[lane.id]) for lane in bad) <= 12
        assert good.acked_seq == 2000


def test_a_resume_without_probes_is_an_attempt_at_once() -> None:
    lane = own_lane(1, probes=False)
    lane.confirm_recorded(attempt(lane, RAISED)[1])
    assert isinstance(lane.next(NOW, Gate.PROBE), Wait)
    lane.retry_now(NOW)
    send, record = attempt(lane, OK, gate=Gate.PROBE)
    assert send.attempt == 2
    assert record.attempt is not None


def test_without_probes_only_its_own_attempts_are_sent() -> None:
    for seed in range(50):
        for response in (RAISED, DOWN):
            found = run(
                [own_lane(1, probes=False)],
                lambda *_, response=response: response,
                3600.0,
                Random(seed),
                failing_breaker(),
            )
            assert {row.outcome for row in found.rows} == {"retry"}
            assert len(found.rows) <= STANDARD.attempts_max


def test_probes_differ_from_attempts_in_the_log() -> None:
    lane = own_lane(1)
    found = run([lane], lambda *_: RAISED, 600.0, Random(1), failing_breaker())
    outcomes = Counter(row.outcome for row in found.rows)
    assert set(outcomes) == {"retry", "probe"}
    assert outcomes["retry"] == lane.checkpoint().spent
    assert outcomes["probe"] == lane.checkpoint().attempts - lane.checkpoint().spent


def test_the_clock_cannot_put_off_the_next_probe() -> None:
    lane = lane_with(delivery(1))
    lane.confirm_recorded(attempt(lane, RAISED)[1])
    for at in (NOW, NOW - 1e6):
        lane.clamp_times(STANDARD, at)
    command = lane.next(NOW - 1e6, Gate.PROBE)
    assert isinstance(command, Wait)
    assert command.until <= NOW - 1e6 + 60

"""Every copy needs a cause, and only a fault is one."""

from __future__ import annotations

import pytest

from outbox.devtools.chaos.explanations import STALL
from outbox.devtools.chaos.ledger import Outcome
from tests.devtools.chaos.small_run import SmallRun, wrong


@pytest.fixture
def run() -> SmallRun:
    run = SmallRun()
    run.commit(1)
    return run


def test_a_copy_of_what_was_answered_well_needs_a_cause(run: SmallRun) -> None:
    run.send(1)
    run.later(5.0)
    run.send(1)
    judgement = run.judge()
    assert wrong(judgement) == {"unexplained": 1}
    assert judgement.copies == {"unexplained": 1}
    assert 'answered "ok"' in judgement.findings["unexplained"].examples[0]


@pytest.mark.parametrize("outcome", [Outcome.BAD, Outcome.UNSURE])
def test_a_bad_answer_explains_the_next_attempt(run: SmallRun, outcome: Outcome) -> None:
    run.send(1, outcome, "garbage")
    run.send(1)
    judgement = run.judge()
    assert wrong(judgement) == {}
    assert judgement.copies == {"answer: garbage": 1}


def test_a_bad_answer_explains_only_the_next_attempt(run: SmallRun) -> None:
    run.send(1, Outcome.BAD, "garbage")
    run.send(1)
    run.later(5.0)
    run.send(1)
    assert wrong(run.judge()) == {"unexplained": 1}


def test_the_fault_that_hit_the_owner_explains_what_its_successor_repeats(run: SmallRun) -> None:
    run.send(1)
    run.fault("kill", relay=0)
    run.later(2.0)
    run.take_over()
    run.send(1)
    judgement = run.judge()
    assert judgement.copies == {"take-over: kill": 1}
    assert (judgement.take_overs, judgement.hand_overs) == (1, 0)


def test_a_fault_of_another_relay_is_not_the_cause(run: SmallRun) -> None:
    run.send(1)
    run.fault("kill", relay=1)
    run.take_over()
    run.send(1)
    assert run.judge().copies == {"take-over: lease ran out": 1}


def test_a_relay_that_was_told_to_leave_did_not_lose_its_lease_by_that(run: SmallRun) -> None:
    run.send(1)
    run.fault("stop", relay=0)
    run.take_over()
    run.send(1)
    assert run.judge().copies == {"take-over: lease ran out": 1}


@pytest.mark.parametrize("why", ["clean stop", "moved to another replica, or ended"])
def test_a_hand_over_explains_nothing(run: SmallRun, why: str) -> None:
    run.send(1)
    run.fault("stop", relay=0)
    run.take_over(why)
    run.send(1)
    judgement = run.judge()
    assert wrong(judgement) == {"unexplained": 1}
    assert (judgement.take_overs, judgement.hand_overs) == (0, 1)


def test_a_take_over_long_before_explains_nothing(run: SmallRun) -> None:
    run.fault("kill", relay=0)
    run.take_over()
    run.later(5.0)
    run.send(1)
    run.later(5.0)
    run.send(1)
    assert wrong(run.judge()) == {"unexplained": 1}


def test_answers_that_were_late_because_the_run_had_no_time_explain_copies(run: SmallRun) -> None:
    run.fault(STALL)
    run.send(1)
    run.later(5.0)
    run.send(1)
    assert run.judge().copies == {"the run itself was held up": 1}


def test_an_answer_that_may_have_been_lost_on_its_way_explains_a_copy(run: SmallRun) -> None:
    request, _ = run.send(1)
    run.books.doubt(request, "refuse")
    run.later(5.0)
    run.send(1)
    assert run.judge().copies == {"answer: refuse": 1}

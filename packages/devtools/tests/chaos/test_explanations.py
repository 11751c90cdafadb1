"""Every duplicate needs a cause, and only a fault is one."""

from __future__ import annotations

import pytest

from outbox_devtools.chaos.facts import STALL, Incident
from outbox_devtools.chaos.ledger import ResponseOutcome
from packages.devtools.tests.chaos.small_run import SmallRun, wrong


@pytest.fixture
def run() -> SmallRun:
    run = SmallRun()
    run.commit(1)
    return run


def test_a_copy_after_a_2xx_needs_a_cause(run: SmallRun) -> None:
    run.send(1)
    run.later(5.0)
    run.send(1)
    checked = run.check()
    assert wrong(checked) == {"unexplained": 1}
    assert checked.copies == {"unexplained": 1}
    assert 'responded "ok"' in checked.findings["unexplained"].examples[0]


@pytest.mark.parametrize("outcome", [ResponseOutcome.BAD, ResponseOutcome.UNSURE])
def test_a_failed_response_explains_the_next_attempt(
    run: SmallRun, outcome: ResponseOutcome
) -> None:
    run.send(1, outcome, "garbage")
    run.send(1)
    checked = run.check()
    assert wrong(checked) == {}
    assert checked.copies == {"response: garbage": 1}


def test_a_failed_response_explains_only_the_next_attempt(run: SmallRun) -> None:
    run.send(1, ResponseOutcome.BAD, "garbage")
    run.send(1)
    run.later(5.0)
    run.send(1)
    assert wrong(run.check()) == {"unexplained": 1}


def test_the_fault_that_hit_the_owner_explains_what_its_successor_repeats(run: SmallRun) -> None:
    run.send(1)
    run.fault("kill", relay=0)
    run.later(2.0)
    run.take_over()
    run.send(1)
    checked = run.check()
    assert checked.copies == {"take-over: kill": 1}
    assert (checked.take_overs, checked.hand_overs) == (1, 0)


def test_a_fault_of_another_relay_is_not_the_cause(run: SmallRun) -> None:
    run.send(1)
    run.fault("kill", relay=1)
    run.take_over()
    run.send(1)
    assert run.check().copies == {"take-over: lease expired": 1}


def test_a_clean_stop_does_not_explain_a_lost_lease(run: SmallRun) -> None:
    run.send(1)
    run.fault("stop", relay=0)
    run.take_over()
    run.send(1)
    assert run.check().copies == {"take-over: lease expired": 1}


@pytest.mark.parametrize("reason", ["clean stop", "moved to another replica, or ended"])
def test_a_hand_over_explains_nothing(run: SmallRun, reason: str) -> None:
    run.send(1)
    run.fault("stop", relay=0)
    run.take_over(reason)
    run.send(1)
    checked = run.check()
    assert wrong(checked) == {"unexplained": 1}
    assert (checked.take_overs, checked.hand_overs) == (0, 1)


def test_a_take_over_long_before_explains_nothing(run: SmallRun) -> None:
    run.fault("kill", relay=0)
    run.take_over()
    run.later(5.0)
    run.send(1)
    run.later(5.0)
    run.send(1)
    assert wrong(run.check()) == {"unexplained": 1}


def test_late_responses_during_a_stall_explain_copies(run: SmallRun) -> None:
    run.fault(STALL)
    run.send(1)
    run.later(5.0)
    run.send(1)
    assert run.check().copies == {"the chaos run stalled": 1}


def test_a_response_possibly_lost_in_transit_explains_a_copy(run: SmallRun) -> None:
    request, _ = run.send(1)
    run.ledger.mark_unsure(request, "refuse")
    run.later(5.0)
    run.send(1)
    assert run.check().copies == {"response: refuse": 1}


@pytest.mark.parametrize(
    ("resumed_s", "wanted"), [(0.1, {"sent late: freeze-long": 1}), (3.0, {"unexplained": 1})]
)
def test_a_relay_that_was_frozen_sends_what_it_had_decided_to_send(
    run: SmallRun, resumed_s: float, wanted: dict[str, int]
) -> None:
    frozen_at = run.tick()
    run.later(3.0)
    run.take_over()
    run.later(1.0)
    run.send(1)
    run.later(3.0)
    run.facts["incidents"] = (Incident("freeze-long", frozen_at, run.tick(), frozenset({0})),)
    run.later(resumed_s)
    run.send(1)
    assert run.check().copies == wanted


def test_a_relay_that_was_not_taken_over_while_it_was_frozen_sends_nothing_late(
    run: SmallRun,
) -> None:
    run.take_over()
    run.later(3.0)
    frozen_at = run.tick()
    run.send(1)
    run.later(2.0)
    run.facts["incidents"] = (Incident("freeze", frozen_at, run.tick(), frozenset({0})),)
    run.send(1)
    assert wrong(run.check()) == {"unexplained": 1}

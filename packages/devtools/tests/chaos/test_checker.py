"""The checker finds every kind of violation, and reports nothing in a correct run."""

from __future__ import annotations

import pytest

from outbox_devtools.chaos.facts import (
    DeadRange,
    Incident,
    LaneCount,
    OwnershipEvent,
    SnapshotStart,
)
from outbox_devtools.chaos.ledger import ResponseOutcome
from outbox_devtools.chaos.plan import CHECKS
from packages.devtools.tests.chaos.small_run import LANE, SmallRun, event, wrong


@pytest.fixture
def run() -> SmallRun:
    return SmallRun()


def test_a_run_without_faults_is_good(run: SmallRun) -> None:
    run.deliver(1, 2, 3)
    checked = run.check()
    assert checked.good
    assert set(checked.findings) == set(CHECKS)
    assert (checked.committed, checked.deliveries, checked.copies) == (3, 3, {})


def test_a_committed_event_without_delivery_is_lost(run: SmallRun) -> None:
    run.deliver(1)
    run.commit(2)
    assert wrong(run.check()) == {"lost": 1}


def test_an_event_without_a_successful_response_is_lost(run: SmallRun) -> None:
    run.deliver(1)
    run.commit(2)
    run.send(2, ResponseOutcome.BAD, "error")
    checked = run.check()
    assert wrong(checked) == {"lost": 1, "holes": 1}
    assert "version 2" in checked.findings["lost"].examples[0]


def test_a_dead_letter_is_not_lost(run: SmallRun) -> None:
    run.deliver(1)
    run.commit(2)
    run.send(2, ResponseOutcome.BAD, "reject")
    run.dead(2)
    run.commit(3)
    run.send(3, previous_seq=1)
    checked = run.check()
    assert wrong(checked) == {}
    assert (checked.deliveries, checked.dead) == (2, 1)


def test_an_event_that_was_rolled_back_is_a_phantom(run: SmallRun) -> None:
    run.deliver(1)
    run.send(2)
    assert wrong(run.check()) == {"phantoms": 1}


def test_an_event_of_another_endpoint_is_a_phantom(run: SmallRun) -> None:
    run.deliver(1)
    run.commit(2, type_=7)
    run.send(2)
    assert wrong(run.check()) == {"phantoms": 1}


def test_an_endpoint_that_was_added_later_gets_its_source_s_events_and_may_have_missed_some(
    run: SmallRun,
) -> None:
    run.deliver(1, 2)
    run.send(1, lane="lane-1", endpoint=7, event_id=event(2), version=2, delivery_id="other")
    late = frozenset({7})
    for type_, found in ((0, {}), (1, {"phantoms": 1})):
        subscriptions = {0: frozenset({0}), 7: frozenset({type_})}
        assert wrong(run.check(subscriptions=subscriptions, late=late)) == found


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        ({1, 2}, {}),
        # The position is of an earlier snapshot, of a later one, or of another database.
        ({1, 2, 3}, {"snapshots": 1}),
        ({1}, {"snapshots": 1}),
        ({3, 4}, {"snapshots": 4}),
    ],
)
def test_an_endpoint_at_the_position_of_a_snapshot_gets_exactly_what_it_did_not_see(
    run: SmallRun, seen: set[int], found: dict[str, int]
) -> None:
    run.deliver(1, 2, 3, 4)
    for seq, n in ((1, 3), (2, 4)):
        run.send(
            seq, lane="lane-1", endpoint=7, event_id=event(n), version=n, delivery_id=f"other{n}"
        )
    of_both = {0: frozenset({0}), 7: frozenset({0})}
    snapshots = {7: SnapshotStart(frozenset(map(event, seen)), run.now)}
    lanes = (LaneCount(LANE, 0, 4), LaneCount("lane-1", 7, 2))
    facts = {"subscriptions": of_both, "late": frozenset({7}), "snapshots": snapshots}
    assert wrong(run.check(**facts, lanes=lanes)) == found
    # The command that would have added it failed.
    assert wrong(run.check(**facts, lanes=lanes[:1])).keys() <= {"holes"}


def test_an_event_is_delivered_to_every_endpoint_that_subscribes_to_its_type(
    run: SmallRun,
) -> None:
    run.deliver(1)
    both = {0: frozenset({0}), 7: frozenset({0})}
    missing = run.check(subscriptions=both)
    assert wrong(missing) == {"lost": 1}
    run.send(1, lane="lane-1", endpoint=7, delivery_id="other")
    checked = run.check(subscriptions=both)
    assert wrong(checked) == {}
    assert checked.expected == checked.deliveries == 2


def test_only_a_copy_of_a_processed_delivery_is_a_duplicate(run: SmallRun) -> None:
    run.commit(1)
    for outcome in (ResponseOutcome.BAD, ResponseOutcome.UNSURE, ResponseOutcome.BAD):
        run.send(1, outcome, "failure")
    run.send(1)
    checked = run.check()
    assert wrong(checked) == {}
    assert (checked.duplicates, sum(checked.copies.values())) == (2, 3)


def test_only_the_chosen_checks_count(run: SmallRun) -> None:
    run.commit(1)
    checked = run.check(unsettled="1 delivery")
    assert wrong(checked) == {"lost": 1, "unsettled": 1}
    chosen = run.check(checks=("verify", "unsettled"), unsettled="1 delivery")
    assert wrong(chosen) == {"unsettled": 1}
    assert run.check(checks=("verify",)).good


def test_an_older_version_after_a_newer_one_is_an_inversion(run: SmallRun) -> None:
    for n in (1, 2):
        run.commit(n)
    run.send(1, event_id=event(2), version=2)
    run.send(2, event_id=event(1), version=1)
    assert wrong(run.check()) == {"inverted": 1}


def test_a_lower_sequence_after_a_higher_one_is_an_inversion(run: SmallRun) -> None:
    for n in (1, 2, 3):
        run.commit(n)
    run.send(1)
    run.send(3)
    run.send(2)
    found = wrong(run.check())
    assert found["inverted"] == 2
    assert found["overtaken"] == 1


def test_a_replay_may_arrive_after_newer_versions(run: SmallRun) -> None:
    run.deliver(1)
    run.commit(2)
    run.send(2, ResponseOutcome.BAD, "reject")
    run.dead(2)
    run.commit(3)
    run.send(3, previous_seq=1)
    run.send(4, event_id=event(2), version=2, delivery_id="d2", replay=True)
    assert wrong(run.check()) == {}


def test_an_assigned_sequence_without_delivery_is_a_hole(run: SmallRun) -> None:
    run.deliver(1)
    assert wrong(run.check(lanes=(LaneCount(LANE, 0, 2),))) == {"holes": 1}


def test_a_lane_without_deliveries_has_holes(run: SmallRun) -> None:
    run.deliver(1)
    lanes = (LaneCount(LANE, 0, 1), LaneCount("lane-1", 0, 2))
    assert wrong(run.check(lanes=lanes)) == {"holes": 2}


def test_a_lane_or_sequence_unknown_to_the_database_is_reported(run: SmallRun) -> None:
    run.deliver(1)
    assert wrong(run.check(lanes=(LaneCount(LANE, 0, 0),))) == {"holes": 1}
    assert wrong(run.check(lanes=())) == {"holes": 1}


@pytest.mark.parametrize(
    "difference", [{"delivery_id": "another"}, {"event_id": event(9)}, {"version": 9}]
)
def test_a_changed_copy_is_reported(run: SmallRun, difference: dict[str, object]) -> None:
    run.commit(1)
    run.send(1, ResponseOutcome.BAD, "error")
    run.send(1, **difference)
    assert wrong(run.check()) == {"changed": 1}


def test_an_event_with_two_sequences_is_reported(run: SmallRun) -> None:
    run.deliver(1)
    run.send(2, event_id=event(1), version=2, delivery_id="d1")
    assert wrong(run.check()) == {"changed": 1}


def test_a_wrong_previous_sequence_is_reported(run: SmallRun) -> None:
    run.deliver(1, 2)
    run.commit(3)
    run.send(3, previous_seq=1)
    assert wrong(run.check()) == {"previous": 1}


def test_a_dead_lettered_previous_sequence_is_reported(run: SmallRun) -> None:
    run.deliver(1)
    run.commit(2)
    run.send(2, ResponseOutcome.BAD, "reject")
    run.dead(2)
    run.commit(3)
    run.send(3, previous_seq=2)
    assert wrong(run.check()) == {"previous": 1}


def test_an_acknowledgement_lost_in_a_crash_may_leave_two_previous_numbers(run: SmallRun) -> None:
    run.deliver(1, 2)
    run.commit(3)
    run.send(3, ResponseOutcome.BAD, "hang")
    run.fault("kill", relay=0)
    run.take_over()
    run.send(2, ResponseOutcome.BAD, "reject")
    run.dead(2)
    run.send(3, previous_seq=1)
    assert wrong(run.check()) == {}


def test_a_delivery_sent_before_its_predecessor_ended_is_reported(run: SmallRun) -> None:
    for n in (1, 2):
        run.commit(n)
    first, _ = run.send(1, ResponseOutcome.BAD, "error")
    run.send(2)
    run.ledger.record_response(first, ResponseOutcome.GOOD, "ok", run.tick())
    assert wrong(run.check()) == {"overtaken": 1}


def test_a_second_open_request_is_reported_unless_a_fault_hit_the_owner(
    run: SmallRun,
) -> None:
    for n in (1, 2):
        run.commit(n)
    first, _ = run.send(1, None)
    run.later(1.0)
    second, others = run.send(1, None)
    assert list(others) == [first]
    run.ledger.record_overlap(first, second)
    for each in (first, second):
        run.ledger.record_response(each, ResponseOutcome.GOOD, "ok", run.tick())
    run.send(2)
    assert wrong(run.check()) == {"doubled": 1, "unexplained": 1}
    between = (first.at + second.at) / 2
    events = (OwnershipEvent(0, between, 10, claimed=False, reason="lease expired"),)
    faults = (Incident("freeze", first.at, between, frozenset({0})),)
    assert wrong(run.check(ownership_events=events, incidents=faults)) == {}


def test_a_request_with_a_disconnected_sender_is_not_open(run: SmallRun) -> None:
    run.commit(1)
    first, _ = run.send(1, ResponseOutcome.BAD, "hang")
    assert not first.open
    hanging, _ = run.send(1, None)
    run.ledger.record_response(hanging, ResponseOutcome.BAD, "hang", run.tick(), ends=False)
    assert hanging.open
    run.ledger.record_disconnect(hanging, run.tick())
    _, others = run.send(1)
    assert list(others) == []


def test_verify_findings_exited_relays_and_pending_deliveries_are_violations(run: SmallRun) -> None:
    run.deliver(1)
    checked = run.check(
        audit=(("contiguous", 2, ("lane 7",)),),
        died=("relay 0",),
        proof_aborts=("relay 0: events from 3 on",),
        unsettled="1 delivery",
    )
    assert wrong(checked) == {"verify": 2, "died": 1, "proof_aborts": 1, "unsettled": 1}
    assert not checked.good


def test_an_invalid_request_is_a_violation(run: SmallRun) -> None:
    run.deliver(1)
    run.ledger.record_rejection("no signature matches")
    assert wrong(run.check()) == {"rejected": 1}


def test_the_longest_pause_counts_pending_deliveries_only(run: SmallRun) -> None:
    run.deliver(1)
    run.later(50.0)  # Nothing is pending.
    run.commit(2)
    run.later(3.0)
    run.send(2)
    assert run.check().recovery.longest_pause_s == pytest.approx(3.0, abs=0.2)


def test_checking_twice_gives_the_same_result(run: SmallRun) -> None:
    run.commit(1)
    run.send(1, ResponseOutcome.BAD, "error")
    run.send(1, delivery_id="another")
    assert run.check() == run.check()


def test_ranges_of_dead_letters_count_by_number(run: SmallRun) -> None:
    run.deliver(1)
    for n in (2, 3, 4):
        run.commit(n)
        run.send(n, ResponseOutcome.BAD, "reject", previous_seq=1)
    assert run.check(dead=(DeadRange(LANE, 2, 4),)).dead == 3
    assert wrong(run.check(dead=(DeadRange(LANE, 2, 4),))) == {}

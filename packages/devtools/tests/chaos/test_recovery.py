"""Every fault has a bound, and what is pending beyond all bounds is overdue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox_devtools.chaos.facts import STALL, Incident, OwnershipEvent, SnapshotStart
from packages.devtools.tests.chaos.small_run import SmallRun, wrong

if TYPE_CHECKING:
    from outbox_devtools.chaos.checker import CheckResult

LEASE_S = 2.0
BEGIN = 10.0
OWNER, OTHER = 10, 11
"""Replicas of the relays 0 and 1."""
OWNED = (OwnershipEvent(0, 0.0, OWNER, claimed=True),)


def pending_for(
    seconds: float,
    *incidents: Incident,
    ownership: tuple[OwnershipEvent, ...] = OWNED,
    **facts: Any,
) -> CheckResult:
    """Return the result of a run whose only delivery is pending from BEGIN on."""
    run = SmallRun()
    run.later(BEGIN)
    run.commit(1)
    run.later(seconds)
    run.send(1)
    return run.check(incidents=incidents, ownership_events=ownership, lease_s=LEASE_S, **facts)


def fault(
    kind: str,
    *,
    relay: int | None = None,
    leader: int = OTHER,
    at: float = BEGIN,
    lasts_s: float = 0,
) -> Incident:
    return Incident(kind, at, at + lasts_s, frozenset({relay}), leader=leader)


def test_without_a_fault_a_delivery_is_overdue_after_three_leases() -> None:
    assert wrong(pending_for(5.5)) == {}
    result = pending_for(6.5)
    assert wrong(result) == {"overdue": 1}
    assert "6.5 s of it undisturbed" in result.findings["overdue"].examples[0]
    assert result.recovery.undisturbed_s == pytest.approx(6.5, abs=0.15)


def test_an_endpoint_at_a_position_waits_for_earlier_events_from_its_addition_on() -> None:
    for added_at, found in ((BEGIN + 3.0, {}), (BEGIN + 0.1, {"overdue": 1})):
        start = SnapshotStart(frozenset(), added_at)
        assert wrong(pending_for(6.5, snapshots={0: start})) == found


def test_a_fault_of_its_owner_may_delay_an_endpoint_by_three_leases() -> None:
    frozen = fault("freeze-long", relay=0, lasts_s=8.0)
    result = pending_for(5.5, frozen)
    assert result.recovery.undisturbed_s == 0
    assert result.recovery.endpoints_s["freeze-long"][1] == pytest.approx(5.5, abs=0.15)
    assert wrong(pending_for(12.5, frozen)) == {"overdue": 1}


def test_a_fault_of_the_leader_may_delay_all_other_endpoints_by_two_leases() -> None:
    hit = fault("half-sent", relay=1, leader=OTHER)
    result = pending_for(3.5, hit)
    assert result.recovery.undisturbed_s == 0
    assert result.recovery.others_s["half-sent"][1] == pytest.approx(3.5, abs=0.15)
    assert result.recovery.endpoints_s == {}
    assert wrong(pending_for(10.5, hit)) == {"overdue": 1}


def test_a_fault_of_another_relay_delays_nothing() -> None:
    assert wrong(pending_for(6.5, fault("kill", relay=1, leader=OWNER))) == {"overdue": 1}


def test_a_fault_of_the_successor_begins_the_bound_again() -> None:
    first = fault("kill", relay=0)
    second = fault("kill", relay=1, leader=OWNER, at=BEGIN + 4.0)
    result = pending_for(9.5, first, second)
    assert result.recovery.undisturbed_s == 0
    # Counted from the last one.
    assert result.recovery.others_s["kill"][1] == pytest.approx(5.5, abs=0.15)
    assert wrong(pending_for(16.5, first, second)) == {"overdue": 1}


def test_an_interrupted_command_delays_only_its_own_endpoint() -> None:
    others = Incident("half-command", BEGIN, BEGIN + 3.0, endpoints=frozenset({7}))
    assert wrong(pending_for(6.5, others)) == {"overdue": 1}
    its_own = Incident("half-command", BEGIN, BEGIN + 3.0, endpoints=frozenset({0}))
    result = pending_for(5.0, its_own)
    assert result.recovery.undisturbed_s == 0
    assert result.recovery.endpoints_s["half-command"][1] == pytest.approx(2.0, abs=0.15)


def test_an_outage_delays_from_its_end() -> None:
    restart = fault("restart", relay=0, lasts_s=4.0)
    result = pending_for(9.5, restart)
    assert result.recovery.undisturbed_s == 0
    assert result.recovery.endpoints_s["restart"][1] == pytest.approx(5.5, abs=0.15)


def test_a_hand_over_takes_a_lease_at_most() -> None:
    released = OwnershipEvent(0, BEGIN + 1.0, OWNER, claimed=False, reason="clean stop")
    ownership = (*OWNED, released)
    assert pending_for(2.5, ownership=ownership).recovery.undisturbed_s == 0
    assert wrong(pending_for(9.5, ownership=ownership)) == {"overdue": 1}


def test_a_stall_of_the_run_itself_delays_everything() -> None:
    stall = Incident(STALL, BEGIN, BEGIN + 5.0)
    result = pending_for(5.5, stall)
    assert result.recovery.undisturbed_s == 0
    assert result.recovery.endpoints_s == {}

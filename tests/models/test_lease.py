"""The lease protocol keeps its invariants, and each of its rules is necessary.

`--model-size 2` (a minute) and 3 (several minutes) explore more states.
"""

from __future__ import annotations

import pytest

from tests.models.explorer import assert_caught, assert_good, explore
from tests.models.lease import Lease
from tests.models.lease_world import Rules

pytestmark = pytest.mark.full

BOTH = "both consider their leases valid"
LATE = "a replaced owner writes after the new one has read"
STALE = "continues from"

# Replicas, sequence numbers and lease ticks; with the minimal number of states.
LONG = (2, 1, 2)
MANY = (2, 2, 1)
SIZES = {
    1: {LONG: 15_000, MANY: 11_000, (3, 1, 1): 38_000},
    2: {(2, 2, 2): 130_000, (2, 3, 1): 75_000, (2, 1, 3): 50_000},
    3: {(3, 2, 1): 400_000},
}


def test_nothing_is_lost_or_sent_by_two_owners(model_size: int) -> None:
    for size in range(1, model_size + 1):
        for bounds, states_min in SIZES[size].items():
            assert_good(explore(Lease(*bounds)), states_min)


@pytest.mark.parametrize(
    ("bounds", "rules", "what"),
    [
        pytest.param(
            LONG, Rules(counts_from_response=True), BOTH, id="a lease counts from the response"
        ),
        pytest.param(
            LONG,
            # Comparing counters would compensate for it.
            Rules(lapsed_renews=True, expiry_compares_counter=False, uses_age_at_poll=True),
            BOTH,
            id="a lapsed lease may renew",
        ),
        pytest.param(
            LONG, Rules(expiry_compares_counter=False), BOTH, id="an expiry uses an old response"
        ),
        pytest.param(LONG, Rules(dead_after=1), BOTH, id="dead after less than a lease"),
        pytest.param(LONG, Rules(reads_expiry=True), BOTH, id="clocks are compared"),
        pytest.param(
            LONG, Rules(checks_lease=False), "a request begins", id="the lease is not checked"
        ),
        pytest.param(LONG, Rules(closes=False), "a request is open", id="requests stay open"),
        pytest.param(LONG, Rules(group_fenced=False), LATE, id="no fence in a group"),
        pytest.param(
            LONG, Rules(expiry_deletes_row=False), LATE, id="the row is locked, not written"
        ),
        pytest.param(
            LONG,
            Rules(checkpoint_fenced=False, checkpoint_epoch="join"),
            LATE,
            id="the epoch is read by joining another table",
        ),
        pytest.param(LONG, Rules(reads_before_claim=True), STALE, id="the state is read too early"),
        pytest.param(LONG, Rules(starts_from_sent=True), STALE, id="it starts from the last sent"),
        pytest.param(
            LONG,
            Rules(waits_for_response=False),
            "the log acknowledges what the receiver has not",
            id="the response is not awaited",
        ),
        pytest.param(
            MANY,
            Rules(dead_letter_first=False),
            "a number is sent before the one before it had its outcome",
            id="a dead letter waits for the next group",
        ),
        pytest.param(
            MANY,
            Rules(dead_letter_with_successes=False),
            "the checkpoint passes a number without an outcome",
            id="a dead letter without the lane's successes",
        ),
        pytest.param(
            LONG,
            Rules(one_trip=False),
            "a delivery is pending, and no process can progress",
            id="a group can be frozen while it holds the lock",
        ),
    ],
)
def test_an_incorrect_protocol_is_detected(
    bounds: tuple[int, int, int], rules: Rules, what: str
) -> None:
    exploration = explore(Lease(*bounds, rules))
    assert_caught(exploration, what)
    print(exploration.found)


@pytest.mark.parametrize(
    ("rules", "what"),
    [
        pytest.param(
            Rules(starts_from_sent=True),
            "a number is sent before the one before it had its outcome",
            id="starting from the last sent skips one",
        ),
        pytest.param(
            Rules(checkpoint_fenced=False, checkpoint_epoch="join", checkpoint_forward=False),
            "progress goes back",
            id="a checkpoint goes back",
        ),
    ],
)
def test_the_effects_of_stale_knowledge(rules: Rules, what: str) -> None:
    """Acting on stale state is a violation already; this ignores it and checks the consequences."""
    exploration = explore(Lease(*MANY, rules, frozenset({"stale"})))
    assert_caught(exploration, what)
    print(exploration.found)


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(
            Rules(expiry_compares_counter=False, uses_age_at_poll=True),
            id="uses the age at the poll, not the counter",
        ),
        pytest.param(Rules(lapsed_renews=True), id="compared counters, lapsed leases that renew"),
        pytest.param(Rules(checkpoint_fenced=False), id="a checkpoint with its epoch alone"),
        pytest.param(Rules(checkpoint_epoch=""), id="a checkpoint with its fence alone"),
        pytest.param(Rules(checkpoint_forward=False), id="a checkpoint of any number"),
    ],
)
@pytest.mark.parametrize("bounds", [LONG, MANY])
def test_either_protection_is_sufficient(bounds: tuple[int, int, int], rules: Rules) -> None:
    """The product has two protections here; each alone suffices, so the rules above are the last
    ones.
    """
    assert_good(explore(Lease(*bounds, rules)), states_min=11_000)

"""The lease protocol keeps its promises, and each of its rules is needed.

`--model-size 2` (a minute) and 3 (several) explore more of it.
"""

from __future__ import annotations

import pytest

from tests.models.explorer import assert_caught, assert_good, explore
from tests.models.lease import Lease
from tests.models.lease_world import Rules

BOTH = "both believe in their leases"
LATE = "a replaced owner writes after the new one has read"
STALE = "goes on from"

# Replicas, numbers, ticks of a lease; and how many states that has at least.
LONG = (2, 1, 2)
MANY = (2, 2, 1)
SIZES = {
    1: {LONG: 15_000, MANY: 11_000, (3, 1, 1): 38_000},
    2: {(2, 2, 2): 130_000, (2, 3, 1): 75_000, (2, 1, 3): 50_000},
    3: {(3, 2, 1): 400_000},
}


def test_nothing_is_lost_or_sent_by_two(model_size: int) -> None:
    for size in range(1, model_size + 1):
        for bounds, states_min in SIZES[size].items():
            assert_good(explore(Lease(*bounds)), states_min)


@pytest.mark.parametrize(
    ("bounds", "rules", "what"),
    [
        pytest.param(
            LONG, Rules(counts_from_the_end=True), BOTH, id="a lease counts from the answer"
        ),
        pytest.param(
            LONG,
            # What compares counters would make up for it.
            Rules(lapsed_renews=True, burial_compares=False, ages_to_the_question=True),
            BOTH,
            id="a lapsed lease may renew",
        ),
        pytest.param(
            LONG, Rules(burial_compares=False), BOTH, id="a burial believes an old answer"
        ),
        pytest.param(LONG, Rules(dead_after=1), BOTH, id="dead after less than a lease"),
        pytest.param(LONG, Rules(reads_expiry=True), BOTH, id="clocks are compared"),
        pytest.param(
            LONG, Rules(looks_at_lease=False), "a request begins", id="nobody looks at the lease"
        ),
        pytest.param(LONG, Rules(closes=False), "a request is open", id="requests stay open"),
        pytest.param(LONG, Rules(group_fenced=False), LATE, id="no fence in a group"),
        pytest.param(LONG, Rules(burial_deletes=False), LATE, id="the row is locked, not written"),
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
            Rules(waits_for_answer=False),
            "the log acknowledges what the receiver has not",
            id="the answer is not awaited",
        ),
        pytest.param(
            MANY,
            Rules(give_up_first=False),
            "a number is sent before the one before it had its outcome",
            id="a give-up waits for the next group",
        ),
        pytest.param(
            MANY,
            Rules(give_up_with_successes=False),
            "the checkpoint passes a number without an outcome",
            id="a give-up without the lane's successes",
        ),
        pytest.param(
            LONG,
            Rules(one_trip=False),
            "a delivery is owed, and everybody waits",
            id="a group can be frozen while it holds the lock",
        ),
    ],
)
def test_a_wrong_protocol_is_caught(bounds: tuple[int, int, int], rules: Rules, what: str) -> None:
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
def test_what_stale_knowledge_leads_to(rules: Rules, what: str) -> None:
    """That somebody goes on from it is wrong already; here one looks at what follows."""
    exploration = explore(Lease(*MANY, rules, frozenset({"stale"})))
    assert_caught(exploration, what)
    print(exploration.found)


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(
            Rules(burial_compares=False, ages_to_the_question=True),
            id="judged by the time of the question, not by the counter",
        ),
        pytest.param(Rules(lapsed_renews=True), id="compared counters, lapsed leases that renew"),
        pytest.param(Rules(checkpoint_fenced=False), id="a checkpoint with its epoch alone"),
        pytest.param(Rules(checkpoint_epoch=""), id="a checkpoint with its fence alone"),
        pytest.param(Rules(checkpoint_forward=False), id="a checkpoint of any number"),
    ],
)
@pytest.mark.parametrize("bounds", [LONG, MANY])
def test_one_of_two_belts_is_enough(bounds: tuple[int, int, int], rules: Rules) -> None:
    """Where the product has two, so that the ones above are known to be the last."""
    assert_good(explore(Lease(*bounds, rules)), states_min=11_000)

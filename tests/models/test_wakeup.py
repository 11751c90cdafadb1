"""The wake-up protocol loses no event, and each of its rules is necessary.

`--model-size 2` (a minute) and 3 (several minutes) explore more states.
"""

from __future__ import annotations

import pytest

from tests.models.explorer import Exploration, assert_caught, assert_good, explore
from tests.models.wakeup import WakeUp
from tests.models.wakeup_world import Rules

pytestmark = pytest.mark.full

LOST = "a committed event is not sequenced"
TWICE = "an event is sequenced twice"

# Producers, replicas and faults; with the minimal number of states.
ONE = (2, 1, 1)
TWO = (1, 2, 1)
BOTH = (2, 2, 0)
SIZES = {
    1: {ONE: 40_000, TWO: 45_000, BOTH: 25_000},
    2: {(3, 1, 1): 350_000, (1, 2, 2): 500_000},
    3: {(2, 2, 1): 1_500_000},
}


def test_no_wake_up_is_lost(model_size: int) -> None:
    for size in range(1, model_size + 1):
        for bounds, states_min in SIZES[size].items():
            assert_good(explore(WakeUp(*bounds)), states_min)


def fall(*steps: str) -> Rules:
    return Rules(fall=steps)


@pytest.mark.parametrize(
    ("bounds", "rules", "what"),
    [
        pytest.param(ONE, Rules(flag_is_a_row=True), LOST, id="the flag is a row"),
        pytest.param(
            ONE,
            Rules(reads_flag_before_allocating=True),
            LOST,
            id="the trigger reads the flag too early",
        ),
        pytest.param(ONE, fall("clear", "lock", "holders", "read", "end"), LOST, id="no flag"),
        pytest.param(ONE, fall("clear", "lock", "flag", "holders", "end"), LOST, id="no last read"),
        pytest.param(ONE, fall("clear", "lock", "flag", "read", "end"), LOST, id="no holders"),
        pytest.param(
            ONE,
            fall("clear", "lock", "holders", "flag", "read", "end"),
            LOST,
            id="the holders come before the flag",
        ),
        pytest.param(
            ONE,
            fall("clear", "lock", "flag", "read", "holders", "end"),
            LOST,
            id="the read comes before the holders",
        ),
        pytest.param(
            ONE,
            fall("clear", "lock", "read", "flag", "holders", "end"),
            LOST,
            id="the read comes before the flag",
        ),
        pytest.param(
            ONE,
            fall("clear", "lock", "holders", "read", "flag", "end"),
            LOST,
            id="the flag comes last",
        ),
        pytest.param(
            ONE,
            fall("lock", "flag", "holders", "read", "clear", "end"),
            LOST,
            id="the wake event is cleared after the read",
        ),
        pytest.param(ONE, Rules(forgets_watched=True), LOST, id="a wake event ends the watch"),
        pytest.param(ONE, Rules(watches_one=True), LOST, id="the first end ends the watch"),
        pytest.param(ONE, Rules(listens=("listen",)), LOST, id="no read after LISTEN"),
        pytest.param(ONE, Rules(listens=("ring", "listen")), LOST, id="the read before LISTEN"),
        pytest.param(
            ONE, Rules(respects_flag=False), LOST, id="it sleeps although the flag is awake"
        ),
        pytest.param(
            ONE, Rules(locked_row_sleeps=True), LOST, id="it sleeps when the row is locked"
        ),
        pytest.param(TWO, Rules(any_replica_sets_awake=True), LOST, id="any replica sets awake"),
        pytest.param(TWO, Rules(unfenced=True), TWICE, id="any replica writes a batch"),
    ],
)
def test_an_incorrect_protocol_is_detected(
    bounds: tuple[int, int, int], rules: Rules, what: str
) -> None:
    _catch(explore(WakeUp(*bounds, rules)), what)


def test_a_rejected_batch_that_sets_awake_is_detected() -> None:
    """The violation needs two producers and a change of leaders, so all other faults
    are disabled.
    """
    rules = Rules(rejected_batch_sets_awake=True)
    _catch(explore(WakeUp(2, 2, 1, rules, frozenset({"overthrown"}), calm=True)), LOST)


@pytest.mark.parametrize(
    ("bounds", "rules"),
    [
        pytest.param(
            ONE,
            fall("lock", "flag", "holders", "clear", "read", "end"),
            id="the wake event is cleared at any time before the read",
        ),
        pytest.param(
            TWO,
            fall("clear", "flag", "holders", "read", "end"),
            id='"asleep" is set without the row lock',
        ),
    ],
)
def test_equivalent_protocols_pass(bounds: tuple[int, int, int], rules: Rules) -> None:
    """The orders that do not matter, so that the ones above are known to."""
    assert_good(explore(WakeUp(*bounds, rules)), states_min=30_000)


def _catch(exploration: Exploration, what: str) -> None:
    assert_caught(exploration, what)
    print(exploration.found)

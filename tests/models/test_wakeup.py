"""The wake-up protocol loses nothing, and each of its rules is needed.

`--model-size 2` (a minute) and 3 (several) explore more of it.
"""

from __future__ import annotations

import pytest

from tests.models.explorer import Exploration, assert_caught, assert_good, explore
from tests.models.wakeup import WakeUp
from tests.models.wakeup_world import Rules

LOST = "a committed event is not sequenced"
TWICE = "an event is sequenced twice"

# Producers, replicas, mishaps; and how many states that has at least.
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
            ONE, Rules(looks_before_it_allocates=True), LOST, id="the trigger looks too early"
        ),
        pytest.param(ONE, fall("clear", "lock", "holders", "read", "end"), LOST, id="no flag"),
        pytest.param(ONE, fall("clear", "lock", "flag", "holders", "end"), LOST, id="no last read"),
        pytest.param(ONE, fall("clear", "lock", "flag", "read", "end"), LOST, id="no look"),
        pytest.param(
            ONE,
            fall("clear", "lock", "holders", "flag", "read", "end"),
            LOST,
            id="the look comes before the flag",
        ),
        pytest.param(
            ONE,
            fall("clear", "lock", "flag", "read", "holders", "end"),
            LOST,
            id="the read comes before the look",
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
            id="the bell is cleared after the read",
        ),
        pytest.param(ONE, Rules(forgets_watched=True), LOST, id="woken, it watches nobody"),
        pytest.param(ONE, Rules(watches_one=True), LOST, id="it watches to the first end"),
        pytest.param(ONE, Rules(listens=("listen",)), LOST, id="no read after LISTEN"),
        pytest.param(ONE, Rules(listens=("ring", "listen")), LOST, id="the read before LISTEN"),
        pytest.param(ONE, Rules(heeds_flag=False), LOST, id="it sleeps although the flag says no"),
        pytest.param(ONE, Rules(taken_sleeps=True), LOST, id="it sleeps when the row is taken"),
        pytest.param(TWO, Rules(anybody_says_awake=True), LOST, id="anybody says awake"),
        pytest.param(TWO, Rules(unfenced=True), TWICE, id="anybody writes a batch"),
    ],
)
def test_a_wrong_protocol_is_caught(bounds: tuple[int, int, int], rules: Rules, what: str) -> None:
    _catch(explore(WakeUp(*bounds, rules)), what)


def test_a_refused_batch_that_says_awake_is_caught() -> None:
    """It takes two producers and a change of leaders; so nothing else may happen."""
    rules = Rules(late_batch_says_awake=True)
    _catch(explore(WakeUp(2, 2, 1, rules, frozenset({"overthrown"}), calm=True)), LOST)


@pytest.mark.parametrize(
    ("bounds", "rules"),
    [
        pytest.param(
            ONE,
            fall("lock", "flag", "holders", "clear", "read", "end"),
            id="the bell is cleared at any time before the read",
        ),
        pytest.param(
            TWO,
            fall("clear", "flag", "holders", "read", "end"),
            id='"asleep" is said without the row',
        ),
    ],
)
def test_what_would_do_as_well(bounds: tuple[int, int, int], rules: Rules) -> None:
    """Which orders do not matter, so that the ones above are known to."""
    assert_good(explore(WakeUp(*bounds, rules)), states_min=30_000)


def _catch(exploration: Exploration, what: str) -> None:
    assert_caught(exploration, what)
    print(exploration.found)

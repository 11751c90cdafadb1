from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outbox.core.cluster.database_clock import DatabaseClock

took_s = st.floats(0, 10)
# (waited before it, the way there, the way back) of each question.
questions = st.lists(st.tuples(took_s, took_s, took_s), min_size=1, max_size=20)
EPOCH_S = 1_800_000_000.0
CLOSE_S = 1e-5
"""What is left of a second's fraction in such large floats."""


class Database:
    """A clock that has nothing to do with ours."""

    def __init__(self) -> None:
        self.ahead_s = EPOCH_S
        self.steady = 100.0

    def asked(self, there_s: float, back_s: float) -> tuple[float, float, float]:
        asked_at = self.steady
        self.steady += there_s + back_s
        return asked_at + there_s + self.ahead_s, asked_at, self.steady


@given(questions)
def test_it_is_off_by_no_more_than_half_of_the_quickest_answer_took(
    asked: list[tuple[float, float, float]],
) -> None:
    database = Database()
    first, *rest = asked
    clock = DatabaseClock(*database.asked(*first[1:]))
    for waited_s, there_s, back_s in rest:
        database.steady += waited_s
        clock.heard(*database.asked(there_s, back_s))
    off_s = abs(clock.now(database.steady) - database.steady - database.ahead_s)
    assert off_s <= (first[1] + first[2]) / 2 + CLOSE_S
    assert off_s <= min(there_s + back_s for _, there_s, back_s in asked) + CLOSE_S


@given(questions, st.floats(-86400, 86400), took_s)
def test_it_follows_a_database_that_was_set_and_says_by_how_much(
    asked: list[tuple[float, float, float]], jump_s: float, waited_s: float
) -> None:
    database = Database()
    clock = DatabaseClock(*database.asked(0.001, 0.001))
    for before_s, there_s, back_s in asked:
        database.steady += before_s
        assert abs(clock.heard(*database.asked(there_s, back_s))) <= 0.002 + CLOSE_S
    database.steady += waited_s
    database.ahead_s += jump_s
    moved_s = clock.heard(*database.asked(0.001, 0.001))
    assert abs(moved_s - jump_s) <= 0.004 + CLOSE_S
    off_s = abs(clock.now(database.steady) - database.steady - database.ahead_s)
    assert off_s <= 0.002 + CLOSE_S


def test_an_answer_that_took_long_moves_nothing() -> None:
    database = Database()
    clock = DatabaseClock(*database.asked(0.001, 0.001))
    assert clock.heard(*database.asked(0.001, 3600)) == 0
    assert clock.heard(*database.asked(3600, 0.001)) == 0

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outbox.core.cluster.database_clock import DatabaseClock

took_s = st.floats(0, 10)
# For each request: seconds before it, time to the database, time back.
questions = st.lists(st.tuples(took_s, took_s, took_s), min_size=1, max_size=20)
EPOCH_S = 1_800_000_000.0
CLOSE_S = 1e-5
"""The precision of such large floats in seconds."""


class Database:
    """A clock that is independent of the local one."""

    def __init__(self) -> None:
        self.ahead_s = EPOCH_S
        self.steady = 100.0

    def requested(self, there_s: float, back_s: float) -> tuple[float, float, float]:
        requested_at = self.steady
        self.steady += there_s + back_s
        return requested_at + there_s + self.ahead_s, requested_at, self.steady


@given(questions)
def test_the_error_is_at_most_half_of_the_fastest_round_trip(
    requested: list[tuple[float, float, float]],
) -> None:
    database = Database()
    first, *rest = requested
    clock = DatabaseClock(*database.requested(*first[1:]))
    for waited_s, there_s, back_s in rest:
        database.steady += waited_s
        clock.adjust(*database.requested(there_s, back_s))
    off_s = abs(clock.now(database.steady) - database.steady - database.ahead_s)
    assert off_s <= (first[1] + first[2]) / 2 + CLOSE_S
    assert off_s <= min(there_s + back_s for _, there_s, back_s in requested) + CLOSE_S


@given(questions, st.floats(-86400, 86400), took_s)
def test_a_clock_step_of_the_database_is_followed_and_reported(
    requested: list[tuple[float, float, float]], jump_s: float, waited_s: float
) -> None:
    database = Database()
    clock = DatabaseClock(*database.requested(0.001, 0.001))
    for before_s, there_s, back_s in requested:
        database.steady += before_s
        assert abs(clock.adjust(*database.requested(there_s, back_s))) <= 0.002 + CLOSE_S
    database.steady += waited_s
    database.ahead_s += jump_s
    moved_s = clock.adjust(*database.requested(0.001, 0.001))
    assert abs(moved_s - jump_s) <= 0.004 + CLOSE_S
    off_s = abs(clock.now(database.steady) - database.steady - database.ahead_s)
    assert off_s <= 0.002 + CLOSE_S


def test_a_slow_response_does_not_change_the_offset() -> None:
    database = Database()
    clock = DatabaseClock(*database.requested(0.001, 0.001))
    assert clock.adjust(*database.requested(0.001, 3600)) == 0
    assert clock.adjust(*database.requested(3600, 0.001)) == 0

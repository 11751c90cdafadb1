"""When a period ends, and which one may go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outbox.core.sequencing.partition_window import (
    LENGTH_MAX_S,
    LENGTH_MIN_S,
    PER_RETENTION,
    WIDTH,
    Period,
    due,
    length_s,
    waiting,
)

DAY_S = 86400.0


def period(
    number: int, began: float, ended: float | None = None, last: int | None = None
) -> Period:
    return Period("events", number, began, ended, last)


def test_lengths_follow_from_what_is_kept() -> None:
    assert length_s(30 * DAY_S) == 2 * DAY_S
    assert length_s(3600.0) == LENGTH_MIN_S
    assert length_s(3650 * DAY_S) == length_s(None) == LENGTH_MAX_S


def test_the_written_period_ends_when_it_has_lasted() -> None:
    written = period(1, 2 * DAY_S)
    assert due("events", [period(0, 9, 3), written], None, 2 * DAY_S).ends == written
    assert due("events", [written], None, 2 * DAY_S + 1).ends is None


def test_only_what_is_old_and_settled_may_go() -> None:
    old, young = period(0, 99, 31.0, 7), period(1, 31, 1.0)
    assert due("events", [young, old], 30.0, 9).oldest == old
    assert due("events", [young, old], 31.5, 9).oldest is None
    assert due("events", [young, old], None, 9).oldest is None
    unsettled = period(0, 99, 31.0)
    found = due("events", [young, unsettled], 30.0, 9)
    assert (found.oldest, found.unsettled) == (None, (unsettled,))


def test_the_written_period_never_goes() -> None:
    assert due("events", [period(0, 99, 99.0, 7)], 0.0, 9).oldest is None


def test_a_log_needs_no_settling() -> None:
    log = [Period("log", 0, 99, 31.0, None), Period("log", 1, 31, None, None)]
    found = due("log", log, 30.0, 999)
    assert (found.oldest, found.unsettled) == (log[0], ())


@given(
    keep_s=st.floats(LENGTH_MIN_S * PER_RETENTION, LENGTH_MAX_S * PER_RETENTION),
    steps=st.lists(st.floats(60.0, DAY_S), min_size=1, max_size=300),
)
def test_nothing_is_kept_much_longer_and_nothing_goes_early(
    keep_s: float, steps: list[float]
) -> None:
    now, began, kept = 0.0, {0: 0.0}, [0]
    for step in steps:
        now += step
        more = True
        # Each look drops one, and what is left over goes in the looks that follow it.
        while more:
            periods = [
                period(n, now - began[n], now - began[n + 1] if n + 1 in began else None, 1)
                for n in kept
            ]
            found = due("events", periods, keep_s, length_s(keep_s))
            if found.ends is not None:
                began[found.ends.number + 1] = now
                kept.append(found.ends.number + 1)
            more = found.oldest is not None
            if found.oldest is not None:
                # The newest thing in it is as old as its end.
                assert now - began[found.oldest.number + 1] >= keep_s
                kept.remove(found.oldest.number)
        # One look may end a period late, and another drop it late.
        assert now - began[kept[0]] <= keep_s + length_s(keep_s) + 2 * DAY_S
        assert len(kept) <= PER_RETENTION + 4


def test_ids_that_wait_are_those_of_the_written_period() -> None:
    assert waiting(5, 9) == 4
    assert waiting(9, 9) == waiting(12, 9) == 0
    assert waiting(5, WIDTH + 3) == 4
    assert waiting(WIDTH + 1, WIDTH + 3) == 2
    # A period has just begun, and nobody has written in it.
    assert waiting(5, WIDTH - 1) == 0

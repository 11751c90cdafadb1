"""When a partition period ends, and which period may be dropped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outbox.core.sequencing.partition_window import (
    LENGTH_MAX_S,
    LENGTH_MIN_S,
    PER_RETENTION,
    WIDTH,
    PartitionWindow,
    due_windows,
    unsequenced_ids,
    window_length_s,
)

DAY_S = 86400.0


def period(
    number: int, began: float, ended: float | None = None, last: int | None = None
) -> PartitionWindow:
    return PartitionWindow("events", number, began, ended, last)


def test_period_lengths_follow_from_the_retention() -> None:
    assert window_length_s(30 * DAY_S) == 2 * DAY_S
    assert window_length_s(3600.0) == LENGTH_MIN_S
    assert window_length_s(3650 * DAY_S) == window_length_s(None) == LENGTH_MAX_S


def test_the_current_period_ends_after_its_length() -> None:
    written = period(1, 2 * DAY_S)
    assert due_windows("events", [period(0, 9, 3), written], None, 2 * DAY_S).ends == written
    assert due_windows("events", [written], None, 2 * DAY_S + 1).ends is None


def test_only_old_and_settled_periods_are_dropped() -> None:
    old, young = period(0, 99, 31.0, 7), period(1, 31, 1.0)
    assert due_windows("events", [young, old], 30.0, 9).oldest == old
    assert due_windows("events", [young, old], 31.5, 9).oldest is None
    assert due_windows("events", [young, old], None, 9).oldest is None
    unsettled = period(0, 99, 31.0)
    found = due_windows("events", [young, unsettled], 30.0, 9)
    assert (found.oldest, found.unsettled) == (None, (unsettled,))


def test_the_current_period_is_never_dropped() -> None:
    assert due_windows("events", [period(0, 99, 99.0, 7)], 0.0, 9).oldest is None


def test_a_log_is_dropped_without_settling() -> None:
    log = [PartitionWindow("log", 0, 99, 31.0, None), PartitionWindow("log", 1, 31, None, None)]
    found = due_windows("log", log, 30.0, 999)
    assert (found.oldest, found.unsettled) == (log[0], ())


@given(
    keep_s=st.floats(LENGTH_MIN_S * PER_RETENTION, LENGTH_MAX_S * PER_RETENTION),
    steps=st.lists(st.floats(60.0, DAY_S), min_size=1, max_size=300),
)
def test_rows_are_kept_for_the_retention_and_not_much_longer(
    keep_s: float, steps: list[float]
) -> None:
    now, began, kept = 0.0, {0: 0.0}, [0]
    for step in steps:
        now += step
        more = True
        # Each run drops one period; the remaining ones are dropped in the next runs.
        while more:
            periods = [
                period(n, now - began[n], now - began[n + 1] if n + 1 in began else None, 1)
                for n in kept
            ]
            found = due_windows("events", periods, keep_s, window_length_s(keep_s))
            if found.ends is not None:
                began[found.ends.number + 1] = now
                kept.append(found.ends.number + 1)
            more = found.oldest is not None
            if found.oldest is not None:
                # Its newest row is as old as its end.
                assert now - began[found.oldest.number + 1] >= keep_s
                kept.remove(found.oldest.number)
        # One run may end a period late, and another one drop it late.
        assert now - began[kept[0]] <= keep_s + window_length_s(keep_s) + 2 * DAY_S
        assert len(kept) <= PER_RETENTION + 4


def test_waiting_ids_belong_to_the_current_period() -> None:
    assert unsequenced_ids(5, 9) == 4
    assert unsequenced_ids(9, 9) == unsequenced_ids(12, 9) == 0
    assert unsequenced_ids(5, WIDTH + 3) == 4
    assert unsequenced_ids(WIDTH + 1, WIDTH + 3) == 2
    # A period has just begun, and has no rows yet.
    assert unsequenced_ids(5, WIDTH - 1) == 0

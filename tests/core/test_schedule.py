"""Which ticks are published, by policy and at any poll times."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.schedules.cron import Cron
from outbox.core.schedules.schedule import (
    OVERLAP_POLL_MAX_S,
    OVERLAP_POLL_MIN_S,
    SCHEDULE_HEADERS_BYTES_MAX,
    DueTicks,
    ScheduleSettings,
    due_ticks,
    overlap_poll_s,
)
from outbox.errors import UsageError

HOURLY = Cron("0 * * * *", "UTC")
START = datetime(2027, 3, 27, 10, tzinfo=UTC)
HOUR = timedelta(hours=1)


def decide(next_at: datetime, now: datetime, **options: Any) -> DueTicks:
    wanted = {"misfire": "all", "grace_s": 60.0, "ticks_max": 100, **options}
    return due_ticks(HOURLY, next_at, now, **wanted)


def test_nothing_is_published_before_its_time() -> None:
    assert decide(START, START - timedelta.resolution) == DueTicks((), START)


@pytest.mark.parametrize("misfire", ["all", "once", "skip"])
def test_an_on_time_poll_publishes_one_tick_under_every_policy(misfire: str) -> None:
    now = START + timedelta(seconds=1)
    assert decide(START, now, misfire=misfire) == DueTicks((START,), START + HOUR)


def test_missed_ticks_are_published_by_policy() -> None:
    now = START + 5 * HOUR + timedelta(minutes=20)
    due_then = tuple(START + n * HOUR for n in range(6))
    following = START + 6 * HOUR
    assert decide(START, now) == DueTicks(due_then, following)
    assert decide(START, now, ticks_max=2) == DueTicks(due_then[:2], due_then[2])
    newest = due_then[-1]
    assert decide(START, now, misfire="once") == DueTicks((newest,), following, (START, newest))
    assert decide(START, now, misfire="skip") == DueTicks((), following, (START, following))
    lately = decide(START, now, misfire="skip", grace_s=2 * 3600.0)
    assert lately == DueTicks(due_then[-2:], following, (START, due_then[-2]))
    long_ago = decide(START, now, misfire="skip", grace_s=86400.0)
    assert long_ago == DueTicks(due_then, following)


def test_a_tick_exactly_as_old_as_the_grace_is_published() -> None:
    now = START + timedelta(seconds=60)
    assert decide(START, now, misfire="skip").ticks == (START,)
    assert decide(START, now + timedelta.resolution, misfire="skip").ticks == ()


CRONS = [
    Cron("*/20 * * * *", "Europe/Berlin"),
    Cron("30 2 * * *", "Europe/Berlin"),
    Cron("*/30 1-3 * * *", "Australia/Lord_Howe"),
    Cron("0 0 29 2 *", "UTC"),
    HOURLY,
]
# Days with clock changes, and a leap day.
STARTS = [
    datetime(2027, 3, 27, 20, tzinfo=UTC),
    datetime(2027, 10, 30, 20, tzinfo=UTC),
    datetime(2026, 10, 3, 10, tzinfo=UTC),
    datetime(2028, 2, 28, 20, tzinfo=UTC),
]


@given(
    st.sampled_from(CRONS),
    st.sampled_from(STARTS),
    st.lists(st.integers(1, 30 * 3600), min_size=1, max_size=20),
    st.sampled_from(["all", "once", "skip"]),
    st.integers(1, 5),
)
def test_each_tick_is_decided_once_at_any_polling_times(
    cron: Cron, start: datetime, steps_s: list[int], misfire: Any, ticks_max: int
) -> None:
    """Under `all` the ticks are those of a single poll; other policies skip some."""
    now, next_at = start, cron.next(start)
    published: list[datetime] = []
    missed: list[tuple[datetime, datetime]] = []
    for step_s in steps_s:
        now += timedelta(seconds=step_s)
        while next_at <= now:
            found = due_ticks(cron, next_at, now, misfire=misfire, grace_s=600, ticks_max=ticks_max)
            assert found.next_at > next_at
            next_at = found.next_at
            published += found.ticks
            if found.missed is not None:
                missed.append(found.missed)
    every = list(cron.between(start, now))
    skipped = [at for at in every if any(first <= at < before for first, before in missed)]
    assert sorted(published + skipped) == every
    assert published == sorted(published)
    if misfire == "all":
        assert published == every
    if misfire == "once" and every:
        assert every[-1] in published


def test_polls_of_a_run_become_rarer() -> None:
    assert overlap_poll_s(0) == overlap_poll_s(1) == OVERLAP_POLL_MIN_S
    assert overlap_poll_s(100) == 10
    assert overlap_poll_s(86400) == OVERLAP_POLL_MAX_S


SETTINGS = {"name": "nightly", "cron": "@daily", "type": "a.b"}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"name": ""}, "name: '' is not 1 to 100 letters"),
        ({"name": ".."}, "name: '..' is not 1 to 100 letters"),
        ({"name": "a b"}, "name: 'a b' is not"),
        ({"name": "é"}, "name: 'é' is not"),
        ({"name": "x" * 101}, "is not 1 to 100 letters"),
        ({"cron": "@often"}, 'cron: "@often" is not a nickname'),
        ({"timezone": "Nowhere"}, 'timezone: there is no "Nowhere"'),
        ({"type": "outbox.x"}, 'type: "outbox." is reserved'),
        ({"key": ""}, "key: 0 bytes"),
        ({"tenant": "x" * 256}, "tenant: 256 bytes"),
        ({"payload": b"{"}, "payload: not JSON"),
        ({"headers": {"x-schedule-TIME": "1"}}, "is reserved for the schedule itself"),
        ({"headers": {"X-Sequence": "1"}}, "is set by the relay"),
        ({"headers": {"X": "x" * SCHEDULE_HEADERS_BYTES_MAX}}, "bytes as JSON, the limit is 7680"),
        ({"misfire": "never"}, "misfire: must be one of skip, once, all"),
        ({"overlap": "never"}, "overlap: must be one of allow, wait"),
        ({"grace_s": -1}, "grace: -1 s is not between"),
    ],
)
def test_an_invalid_schedule_is_rejected_with_the_reason(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        ScheduleSettings(**SETTINGS | wrong)
    assert says in str(caught.value)

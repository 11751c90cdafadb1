"""Cron expressions around clock changes, leap days and odd time zones."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from itertools import islice, pairwise

import pytest
from cronsim import CronSim
from hypothesis import assume, given
from hypothesis import strategies as st

from outbox.core.schedules import cron
from outbox.core.schedules.cron import NICKNAMES, Cron
from outbox.errors import UsageError

BERLIN, LORD_HOWE = "Europe/Berlin", "Australia/Lord_Howe"


def runs(expression: str, zone: str, after: str, count: int) -> str:
    """Return the next runs on the zone's clock: day, time and offset of each."""
    cron = Cron(expression, zone)
    start = datetime.fromisoformat(after).replace(tzinfo=UTC)
    runs_found = (at.astimezone(cron.zone) for at in islice(cron.after(start), count))
    return " ".join(at.isoformat(timespec="minutes")[8:] for at in runs_found)


@pytest.mark.parametrize(
    ("expression", "zone", "after", "expected"),
    [
        # The clock goes from 02:00 to 03:00.
        ("30 2 * * *", BERLIN, "2027-03-27", "27T02:30+01:00 28T03:00+02:00 29T02:30+02:00"),
        ("0,30 2,3 * * *", BERLIN, "2027-03-28", "28T03:00+02:00 28T03:30+02:00 29T02:00+02:00"),
        (
            "*/30 * * * *",
            BERLIN,
            "2027-03-28T00:10",
            "28T01:30+01:00 28T03:00+02:00",
        ),
        ("*/30 2 * * *", BERLIN, "2027-03-27T12:00", "29T02:00+02:00 29T02:30+02:00"),
        # The clock goes from 03:00 to 02:00.
        ("30 2 * * *", BERLIN, "2027-10-30", "30T02:30+02:00 31T02:30+02:00 01T02:30+01:00"),
        ("30 2 * * *", BERLIN, "2027-10-31T01:10", "01T02:30+01:00"),
        ("30 2 * * *", BERLIN, "2027-10-31T00:40", "01T02:30+01:00"),
        ("0 * * * *", BERLIN, "2027-10-30T23:30", "31T02:00+02:00 31T02:00+01:00 31T03:00+01:00"),
        # A change by half an hour: from 02:00 to 02:30, and from 02:00 to 01:30.
        (
            "15 2 * * *",
            LORD_HOWE,
            "2026-10-02T12:00",
            "03T02:15+10:30 04T02:30+11:00 05T02:15+11:00",
        ),
        ("45 1 * * *", LORD_HOWE, "2027-04-03T12:00", "04T01:45+11:00 05T01:45+10:30"),
        (
            "*/15 2 * * *",
            LORD_HOWE,
            "2027-04-03T14:00",
            "04T02:00+10:30 04T02:15+10:30 04T02:30+10:30",
        ),
        (
            "0 * * * *",
            LORD_HOWE,
            "2027-04-03T13:30",
            "04T01:00+11:00 04T02:00+10:30 04T03:00+10:30",
        ),
        # A change at midnight.
        ("0 0 * * *", "Asia/Beirut", "2026-03-28", "29T01:00+03:00 30T00:00+03:00"),
        # Leap days, and months of all lengths.
        ("0 0 29 2 *", "UTC", "2027-01-01", "29T00:00+00:00 29T00:00+00:00"),
        ("0 12 31 * *", "UTC", "2027-01-31T12:00", "31T12:00+00:00 31T12:00+00:00"),
        ("0 12 L * *", BERLIN, "2028-02-01", "29T12:00+01:00 31T12:00+02:00 30T12:00+02:00"),
        ("0 9 * * MON#1", "UTC", "2027-01-01", "04T09:00+00:00 01T09:00+00:00 01T09:00+00:00"),
        ("0 0 13 * FRI", "UTC", "2027-01-01T12:00", "08T00:00+00:00 13T00:00+00:00 15T00:00+00:00"),
    ],
)
def test_runs_around_clock_changes_and_leap_days(
    expression: str, zone: str, after: str, expected: str
) -> None:
    assert runs(expression, zone, after, len(expected.split())) == expected


def test_a_skipped_day_has_no_runs() -> None:
    """Samoa skipped the 30th and went from the 29th to the 31st."""
    expected = "29T12:00-10:00 31T00:00+14:00 31T12:00+14:00"
    assert runs("0 12 * * *", "Pacific/Apia", "2011-12-29T00:00", 3) == expected


@pytest.mark.parametrize("nickname", NICKNAMES)
def test_nicknames_stand_for_expressions(nickname: str) -> None:
    after = datetime(2027, 5, 5, 5, 5, tzinfo=UTC)
    assert Cron(nickname.upper(), BERLIN).next(after) == Cron(NICKNAMES[nickname], BERLIN).next(
        after
    )


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("0 0 30 2 *", 'cron: "0 0 30 2 *": bad day-of-month'),
        ("0 0 31 4,6 *", 'cron: "0 0 31 4,6 *": bad day-of-month'),
        ("60 * * * *", 'cron: "60 * * * *": bad minute; allowed: 0-59'),
        ("* * * *", 'cron: "* * * *" has 4 fields, not 5: minute, hour, day of month, month, '),
        ("* * * * * *", "has 6 fields, not 5"),
        ("", 'cron: "" has 0 fields'),
        ("@reboot", 'cron: "@reboot" is not a nickname; use one of: @yearly, '),
        ("0 0 * * MON#1/2", "bad day-of-week"),
    ],
)
def test_an_invalid_expression_is_rejected_with_the_reason(expression: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        Cron(expression, "UTC")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("zone", "says"),
    [
        ("Europe/Berln", 'timezone: there is no "Europe/Berln"; did you mean "Europe/Berlin"?'),
        ("localtime", 'there is no "localtime"; write one such as Europe/Berlin or UTC'),
        ("../../etc/passwd", "there is no"),
        ("", "there is no"),
        ("Europe", "there is no"),
    ],
)
def test_unknown_time_zones_are_rejected(zone: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        Cron("* * * * *", zone)
    assert says in str(caught.value)


# ------------------------------------------------------------------ properties

ZONES = (
    "UTC", BERLIN, LORD_HOWE, "America/New_York", "America/St_Johns", "Asia/Kolkata",
    "Asia/Beirut", "Africa/Casablanca", "Antarctica/Troll", "Pacific/Chatham",
)  # fmt: skip


def field(low: int, high: int) -> st.SearchStrategy[str]:
    numbers = st.lists(st.integers(low, high), min_size=1, max_size=3, unique=True)
    return st.one_of(
        st.just("*"),
        st.sampled_from(("*/2", "*/7", "*/15")),
        numbers.map(lambda chosen: ",".join(map(str, chosen))),
    )


days = st.one_of(st.just("*"), field(1, 28))
expressions = st.builds(
    lambda *parts: " ".join(parts), field(0, 59), field(0, 23), days, st.just("*"), field(0, 6)
)
# Around the days on which some zone changes its clocks.
DAYS = [
    datetime(2027, month, day, tzinfo=UTC)
    for month, day in ((3, 14), (3, 28), (4, 4), (6, 15), (10, 3), (10, 31), (11, 7))
]
moments = st.builds(
    lambda day, minutes: day + timedelta(minutes=minutes),
    st.sampled_from(DAYS),
    st.integers(-2880, 2880),
)


@given(expressions, st.sampled_from(ZONES), moments, st.lists(st.integers(0, 5000), max_size=6))
def test_the_runs_do_not_depend_on_the_start_time(
    expression: str, zone: str, start: datetime, cuts: list[int]
) -> None:
    cron = Cron(expression, zone)
    end = start + timedelta(minutes=5000)
    whole = list(cron.between(start, end))
    assert whole == sorted(set(whole))
    pieces = []
    bounds = [start, *(start + timedelta(minutes=cut) for cut in sorted(cuts)), end]
    for first, last in pairwise(bounds):
        pieces += cron.between(first, last)
    assert pieces == whole
    if whole:
        assert cron.latest_before(whole[0], end) == whole[-1]


@given(expressions, st.sampled_from(ZONES), moments)
def test_a_run_is_at_the_local_time_of_the_expression(
    expression: str, zone: str, start: datetime
) -> None:
    """Or, for a time of day that is skipped, directly after the clock change."""
    cron = Cron(expression, zone)
    plain = CronSim(expression, datetime(2000, 1, 1, tzinfo=UTC))
    for at in islice(cron.after(start), 50):
        local = at.astimezone(cron.zone)
        shown = (local.minute in plain.minutes and local.hour in plain.hours
                 and plain.match_day(local.date()))  # fmt: skip
        before = (at - timedelta(minutes=1)).astimezone(cron.zone)
        just_set = before.utcoffset() != local.utcoffset()
        assert shown or (just_set and not expression.startswith("*"))


@given(expressions, st.sampled_from(("UTC", BERLIN, "America/New_York", "Asia/Kolkata")), moments)
def test_runs_agree_with_cronsim(expression: str, zone: str, start: datetime) -> None:
    cron = Cron(expression, zone)
    assume(start.astimezone(cron.zone).hour >= 4)
    peer = CronSim(expression, start.astimezone(cron.zone))
    for ours in islice(cron.after(start), 40):
        assert ours == next(peer).astimezone(UTC)


def test_the_search_skips_to_the_next_day_that_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    jumps: list[datetime] = []
    jump = cron._jump

    def counted(at: datetime, shown: datetime, zone: tzinfo) -> datetime:
        jumps.append(at)
        return jump(at, shown, zone)

    monkeypatch.setattr(cron, "_jump", counted)
    # The leap days that are Mondays.
    found = Cron("* 3 * 2 MON#5", "America/New_York").next(datetime(2026, 1, 1, tzinfo=UTC))
    assert found == datetime(2044, 2, 29, 8, tzinfo=UTC)
    assert len(jumps) < 50

"""Cron expressions in a time zone: the times at which they fire.

Five fields (minute, hour, day of month, month, day of week) as in crontab(5), with
names (JAN, MON), ranges, steps, `L` for the last day or weekday of a month and `#`
for the n-th one; or a nickname.  If both day fields are restricted, either may match.

Changes of the UTC offset follow Debian's cron:

    a time of day ("30 2 * * *")    if skipped, fires right after the change;
                                    if repeated, fires the first time only
    a star for minutes or hours     follows elapsed time: skipped times do not
    ("*/30 * * * *")                fire, repeated ones fire twice

The times do not depend on the start of the search, so an interval can be computed in
one step or in many.  (That is why cronsim only parses the expressions here: its
stepping goes back from within a repeated hour, and differs for changes by half an
hour.)
"""

from __future__ import annotations

import difflib
from bisect import bisect_right
from calendar import monthrange
from datetime import UTC, date, datetime, time, timedelta
from itertools import takewhile
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from outbox.core.model.text import truncate
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import tzinfo

NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
FIELDS = 5
ALLOWED = {
    "minute": "0-59",
    "hour": "0-23",
    "day-of-month": "1-31, if the month has it, or L",
    "month": "1-12 or JAN-DEC",
    "day-of-week": "0-7 or SUN-SAT (0 and 7: Sunday), 5L, 5#3",
}
"""Values of the fields, by cronsim's names; besides *, lists, ranges and steps."""
EXPRESSION_CHARS_MAX = 256
ZONE_CHARS_MAX = 64
"""Twice the longest name of the IANA database."""
HORIZON = timedelta(days=50 * 366)
"""An expression without a match in this time never fires: 29 February on a Monday recurs
within 40 years."""
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)

# Names for the machine's own zone, which differs between machines.
_MACHINE_ZONES = ("localtime", "posixrules")


class Cron:
    """A cron expression in a time zone.

    Args:
        expression: five fields, or a nickname.
        timezone: a name of the IANA database, such as Europe/Berlin.

    Raises:
        UsageError: an argument is invalid, or the expression never fires.
    """

    def __init__(self, expression: str, timezone: str) -> None:
        if len(expression) > EXPRESSION_CHARS_MAX:
            raise UsageError(f"cron: longer than {EXPRESSION_CHARS_MAX} characters")
        self.expression = expression
        self.zone = _zone(timezone)
        fields = NICKNAMES.get(expression.strip().lower(), expression)
        if fields.startswith("@"):
            known = ", ".join(NICKNAMES)
            raise UsageError(
                f'cron: "{truncate(expression)}" is not a nickname; use one of: {known}'
            )
        if len(parts := fields.split()) != FIELDS:
            raise UsageError(
                f'cron: "{truncate(expression)}" has {len(parts)} fields, not {FIELDS}: '
                "minute, hour, day of month, month, day of week"
            )
        try:
            self._fields = CronSim(fields, datetime(2000, 1, 1, tzinfo=UTC))
        except CronSimError as error:
            problem = str(error).lower()
            allowed = ALLOWED.get(problem.removeprefix("bad "))
            hint = f"; allowed: {allowed}" if allowed else ""
            raise UsageError(f'cron: "{truncate(expression)}": {problem}{hint}') from None
        except (AssertionError, TypeError, ValueError):  # "MON#2/2", say.
            raise UsageError(f'cron: "{truncate(expression)}" is not a cron expression') from None
        self._days: dict[tuple[int, int], list[int]] = {}
        self._by_time_of_day = not any(part.startswith("*") for part in parts[:2])
        if next(self.after(datetime(2000, 1, 1, tzinfo=UTC)), None) is None:
            raise UsageError(f'cron: "{truncate(expression)}" never fires: there is no such day')

    def after(self, moment: datetime) -> Iterator[datetime]:
        """The times after this one, in UTC; infinite."""
        last = moment.astimezone(UTC)
        while (tick := self._first_after(last)) is not None:
            yield tick
            last = tick

    def between(self, after: datetime, until: datetime) -> Iterator[datetime]:
        """The times after the first and up to the second."""
        return takewhile(lambda moment: moment <= until, self.after(after))

    def next(self, after: datetime) -> datetime:
        """The first time after this one.

        Raises:
            UsageError: it does not fire any more.
        """
        for moment in self.after(after):
            return moment
        raise UsageError(f'cron: "{self.expression}" does not fire any more')

    def latest_before(self, first: datetime, until: datetime) -> datetime:
        """The last time up to `until`.

        Args:
            first: a time at which the expression fires, the lower bound.
        """
        # Searched backwards: an expression for every minute fires half a million times a year.
        for back in (HOUR, DAY, 40 * DAY):
            if until - back <= first:
                break
            if ticks := list(self.between(until - back, until)):
                return ticks[-1]
        return [first, *self.between(first, until)][-1]

    # --------------------------------------------------------------- stepping

    def _first_after(self, moment: datetime) -> datetime | None:
        until = moment + HORIZON
        if not self._by_time_of_day:
            return self._walk(moment, until, self.zone)
        # In local time, then converted to the first moment with that local time, which is
        # monotonic in the local time.
        shown = moment.astimezone(self.zone).replace(tzinfo=UTC)
        while (tick := self._walk(shown, until, UTC)) is not None:
            at = _first_moment(tick.replace(tzinfo=None), self.zone)
            if at > moment:
                return at
            shown = tick
        return None

    def _walk(self, after: datetime, until: datetime, zone: tzinfo) -> datetime | None:
        """The first whole minute after this time, in UTC, at which all fields match."""
        fields = self._fields
        at = after.replace(second=0, microsecond=0) + MINUTE
        while at <= until:
            local = at.astimezone(zone)
            if not self._is_day(local.date()):
                day = self._day_after(local.date(), until.date())
                if day is None:
                    return None
                # UTC offsets are shorter than a day: this is before the day begins in any zone.
                near = datetime.combine(day, time(), UTC) - DAY
                tomorrow = (local + DAY).replace(hour=0, minute=0)
                at = near if near > at else _jump(at, tomorrow, zone)
            elif local.hour not in fields.hours:
                at = _jump(at, local.replace(minute=0) + HOUR, zone)
            elif local.minute not in fields.minutes:
                at += MINUTE
            else:
                return at
        return None

    def _is_day(self, day: date) -> bool:
        return day.month in self._fields.months and self._fields.match_day(day)

    def _day_after(self, day: date, until: date) -> date | None:
        """The first day after this one on which it fires, up to the year of `until`."""
        for year in range(day.year, until.year + 1):
            for month in sorted(self._fields.months):
                if (year, month) < (day.year, day.month):
                    continue
                days = self._days_of(year, month)
                is_current = (year, month) == (day.year, day.month)
                first = bisect_right(days, day.day) if is_current else 0
                if first < len(days):
                    return date(year, month, days[first])
        return None

    def _days_of(self, year: int, month: int) -> list[int]:
        """The days of a month on which it fires; the same in months with the same calendar."""
        kind = monthrange(year, month)
        if kind not in self._days:
            every = range(1, kind[1] + 1)
            self._days[kind] = [n for n in every if self._fields.match_day(date(year, month, n))]
        return self._days[kind]


def _jump(at: datetime, shown: datetime, zone: tzinfo) -> datetime:
    """Jump from a UTC time to a local time, stopping before a change of the UTC offset."""
    target = at + (shown.replace(tzinfo=None) - at.astimezone(zone).replace(tzinfo=None))
    set_between = target.astimezone(zone).utcoffset() != at.astimezone(zone).utcoffset()
    if not set_between:
        return target
    # Half of the distance, at least a minute: converges to the change.
    closer = at + (target - at) // (2 * MINUTE) * MINUTE
    if closer.astimezone(zone).utcoffset() == at.astimezone(zone).utcoffset():
        return max(closer, at + MINUTE)
    return at + MINUTE


def _first_moment(shown: datetime, zone: tzinfo) -> datetime:
    """The first moment with this local time; if it is skipped, the moment of the change."""
    first = shown.replace(tzinfo=zone).astimezone(UTC)
    if first.astimezone(zone).replace(tzinfo=None) == shown:
        return first
    # Skipped: with the former offset, the moment is as far after the change as the local
    # time is after the start of the gap.
    before, after = (shown.replace(tzinfo=zone, fold=fold).utcoffset() for fold in (0, 1))
    assert before is not None
    assert after is not None
    low, high = first - (after - before), first
    while high - low > MINUTE:
        middle = low + (high - low) // (2 * MINUTE) * MINUTE
        if middle.astimezone(zone).utcoffset() == before:
            low = middle
        else:
            high = middle
    return high


def _zone(name: str) -> tzinfo:
    """The time zone of this name.

    Raises:
        UsageError: the name is unknown.
    """
    if name == "UTC":
        return UTC
    if len(name) > ZONE_CHARS_MAX:
        raise UsageError(f"timezone: longer than {ZONE_CHARS_MAX} characters")
    try:
        if name.startswith(_MACHINE_ZONES):
            raise ValueError(name)
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError):
        places = available_timezones() - {*_MACHINE_ZONES}
        near = difflib.get_close_matches(name, places, 1)
        hint = f'did you mean "{near[0]}"?' if near else "write one such as Europe/Berlin or UTC"
        raise UsageError(f'timezone: there is no "{name}"; {hint}') from None

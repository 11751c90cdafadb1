"""Cron expressions in a time zone: the moments at which they fire.

Five fields (minute, hour, day of month, month, day of week) as in crontab(5), with
names (JAN, MON), ranges, steps, `L` for the last day or weekday of a month and `#`
for the n-th one; or a nickname.  Where both days are restricted, either will do.

When clocks are set, Debian's cron is followed:

    a time of day ("30 2 * * *")    skipped by the clocks: fires when they have been
                                    set; come twice: fires the first time
    a star for minutes or hours     by the time that passes: what was skipped never
    ("*/30 * * * *")                was, what comes twice fires twice

Moments do not depend on where one begins to look, so those of a time can be told in
one piece or in many.  (That is why cronsim reads the expressions here, but does not
step through them: from within a repeated hour it goes back, and it takes a way of
its own where clocks are set by half an hour.)
"""

from __future__ import annotations

import difflib
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from outbox.core.model.text import cut
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
EXPRESSION_CHARS_MAX = 256
ZONE_CHARS_MAX = 64
"""Twice the longest one of the IANA database."""
HORIZON = timedelta(days=50 * 366)
"""What does not fire for so long never does: 29 February on a Monday takes 40 years."""
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)

# A machine's own zone is another one on the next machine.
_NOT_A_PLACE = ("localtime", "posixrules")


class Cron:
    """When something fires.

    Args:
        expression: five fields, or a nickname.
        timezone: a name of the IANA database, such as Europe/Berlin.

    Raises:
        UsageError: one of them is wrong, or it never fires.
    """

    def __init__(self, expression: str, timezone: str) -> None:
        if len(expression) > EXPRESSION_CHARS_MAX:
            raise UsageError(f"cron: longer than {EXPRESSION_CHARS_MAX} characters")
        self.expression = expression
        self.zone = _zone(timezone)
        fields = NICKNAMES.get(expression.strip().lower(), expression)
        if fields.startswith("@"):
            known = ", ".join(NICKNAMES)
            raise UsageError(f'cron: "{cut(expression)}" is no nickname; there are: {known}')
        if len(parts := fields.split()) != FIELDS:
            raise UsageError(
                f'cron: "{cut(expression)}" has {len(parts)} fields, not {FIELDS}: '
                "minute, hour, day of month, month, day of week"
            )
        try:
            self._fields = CronSim(fields, datetime(2000, 1, 1, tzinfo=UTC))
        except CronSimError as error:
            raise UsageError(f'cron: "{cut(expression)}": {str(error).lower()}') from None
        except (AssertionError, TypeError, ValueError):  # "MON#2/2", say.
            raise UsageError(f'cron: "{cut(expression)}" is not understood') from None
        self._by_time_of_day = not any(part.startswith("*") for part in parts[:2])
        if next(self.after(datetime(2000, 1, 1, tzinfo=UTC)), None) is None:
            raise UsageError(f'cron: "{cut(expression)}" never fires: there is no such day')

    def after(self, moment: datetime) -> Iterator[datetime]:
        """The moments after this one, in UTC, without end."""
        last = moment.astimezone(UTC)
        while (found := self._first_after(last)) is not None:
            yield found
            last = found

    def between(self, after: datetime, until: datetime) -> Iterator[datetime]:
        """The moments after the first and up to the second."""
        return takewhile(lambda moment: moment <= until, self.after(after))

    def next(self, after: datetime) -> datetime:
        """The first moment after this one.

        Raises:
            UsageError: there is none.
        """
        for moment in self.after(after):
            return moment
        raise UsageError(f'cron: "{self.expression}" does not fire any more')

    def latest(self, first: datetime, until: datetime) -> datetime:
        """The last moment up to a time.

        Args:
            first: one of them.
        """
        # Not from the first on: a minute's ticks of a year are half a million.
        for back in (HOUR, DAY, 40 * DAY):
            if until - back <= first:
                break
            if found := list(self.between(until - back, until)):
                return found[-1]
        return [first, *self.between(first, until)][-1]

    # --------------------------------------------------------------- stepping

    def _first_after(self, moment: datetime) -> datetime | None:
        until = moment + HORIZON
        if not self._by_time_of_day:
            return self._walk(moment, until, self.zone)
        # On the clock's face, and from there to the moments when it shows that first:
        # what it shows later it shows first at a later moment, or at the same one.
        shown = moment.astimezone(self.zone).replace(tzinfo=UTC)
        while (found := self._walk(shown, until, UTC)) is not None:
            at = _moment(found.replace(tzinfo=None), self.zone)
            if at > moment:
                return at
            shown = found
        return None

    def _walk(self, after: datetime, until: datetime, zone: tzinfo) -> datetime | None:
        """The first whole minute after this time, in UTC, at which all fields are met."""
        fields = self._fields
        at = after.replace(second=0, microsecond=0) + MINUTE
        while at <= until:
            local = at.astimezone(zone)
            if local.month not in fields.months:
                next_month = (local.replace(day=1) + 32 * DAY).replace(day=1)
                at = _jump(at, next_month.replace(hour=0, minute=0), zone)
            elif not fields.match_day(local.date()):
                at = _jump(at, (local + DAY).replace(hour=0, minute=0), zone)
            elif local.hour not in fields.hours:
                at = _jump(at, local.replace(minute=0) + HOUR, zone)
            elif local.minute not in fields.minutes:
                at += MINUTE
            else:
                return at
        return None


def _jump(at: datetime, shown: datetime, zone: tzinfo) -> datetime:
    """From a moment in UTC to when the clock shows that, unless it is set in between."""
    target = at + (shown.replace(tzinfo=None) - at.astimezone(zone).replace(tzinfo=None))
    set_between = target.astimezone(zone).utcoffset() != at.astimezone(zone).utcoffset()
    if not set_between:
        return target
    # Half of the way, or a minute: the closer to the change, the shorter.
    closer = at + (target - at) // (2 * MINUTE) * MINUTE
    if closer.astimezone(zone).utcoffset() == at.astimezone(zone).utcoffset():
        return max(closer, at + MINUTE)
    return at + MINUTE


def _moment(shown: datetime, zone: tzinfo) -> datetime:
    """When a clock shows that first; if it never does, when it has been set."""
    first = shown.replace(tzinfo=zone).astimezone(UTC)
    if first.astimezone(zone).replace(tzinfo=None) == shown:
        return first
    # Skipped: by the time before, the moment lies as far behind the change as what was
    # shown lies behind the beginning of the gap.
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
    """A time zone; UTC as itself.

    Raises:
        UsageError: there is none of that name.
    """
    if name == "UTC":
        return UTC
    if len(name) > ZONE_CHARS_MAX:
        raise UsageError(f"timezone: longer than {ZONE_CHARS_MAX} characters")
    try:
        if name.startswith(_NOT_A_PLACE):
            raise ValueError(name)
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError):
        places = available_timezones() - {*_NOT_A_PLACE}
        near = difflib.get_close_matches(name, places, 1)
        hint = f'did you mean "{near[0]}"?' if near else "write one such as Europe/Berlin or UTC"
        raise UsageError(f'timezone: there is no "{name}"; {hint}') from None

"""Schedules: which ticks are published, and which are skipped.

A schedule publishes an event periodically.  Its ticks are the times at which its cron
expression fires; each is decided once, in order, and `next_at` is the first undecided
one.  When a relay finds due ticks:

    misfire   published ticks
    skip      those that are at most `grace_s` old
    once      the newest one, in place of all
    all       each of them

    overlap
    allow     runs may overlap
    wait      one run at a time: until the last run is delivered or dead-lettered in every
              lane, no tick is decided, and due ticks become late

A relay that polls in time finds one tick, which is published.

A clock that was ahead for a moment has decided future ticks.  Once it is right, a schedule whose
last decided tick is far ahead goes on with the next tick from now (`restart_at`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

from outbox.core.model.event import (
    KEY_BYTES_MAX,
    NOT_ADDRESSABLE,
    check_tenant,
    check_text,
    check_type,
    encode_headers,
    encode_payload,
)
from outbox.core.model.text import truncate
from outbox.core.schedules.cron import Cron
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

Misfire = Literal["skip", "once", "all"]
Overlap = Literal["allow", "wait"]

NAME_HEADER, TIME_HEADER, RUN_HEADER = "X-Schedule", "X-Schedule-Time", "X-Schedule-Run"
"""Headers of a schedule's events: its name, the tick (RFC 3339, UTC), and `by-hand` for a
run that an operator started."""
BY_HAND = "by-hand"

NAME_CHARS_MAX = 100
MISFIRE_GRACE_S = 60.0
"""The default of `grace_s`: longer than a failover or a restart of the database."""
GRACE_S_MAX = 366 * 86400.0
SCHEDULE_HEADERS_BYTES_MAX = 7680
"""An event's limit, minus the size of the schedule's own headers."""
AHEAD_MAX = timedelta(hours=1)
"""How far ahead of the clock the last decided tick may be.  Small steps back of a clock must not
publish ticks again; after larger ones a schedule must not be silent until that tick."""
OVERLAP_POLL_MIN_S, OVERLAP_POLL_MAX_S, POLL_SHARE = 1.0, 30.0, 0.1
"""Interval of the polls that check whether the last run is delivered: a share of its duration
so far, within bounds."""

# It is sent as a header.
SCHEDULE_NAME = re.compile(rf"(?!\.{{1,2}}$)[A-Za-z0-9._-]{{1,{NAME_CHARS_MAX}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """The settings of a schedule.

    Raises:
        UsageError: a setting is invalid; the message begins with its name.
    """

    name: str
    cron: str
    """Five fields, or a nickname such as @daily."""
    timezone: str = "UTC"
    """A name of the IANA database."""
    type: str
    payload: Any = field(default_factory=dict)
    """The payload of each event; bytes are JSON text."""
    key: str | None = None
    tenant: str | None = None
    headers: Mapping[str, str] | None = None
    misfire: Misfire = "once"
    grace_s: float = MISFIRE_GRACE_S
    """How late a tick may be published with `skip`, in seconds."""
    overlap: Overlap = "allow"

    def __post_init__(self) -> None:
        if not SCHEDULE_NAME.fullmatch(self.name):
            raise UsageError(
                f"name: {self.name[:120]!r} is not 1 to {NAME_CHARS_MAX} letters, digits, "
                f"dots, dashes or underscores; {NOT_ADDRESSABLE}"
            )
        Cron(self.cron, self.timezone)
        check_type(self.type)
        check_text("key", self.key, KEY_BYTES_MAX)
        check_tenant(self.tenant)
        _ = self.payload_json, self.headers_json
        if self.misfire not in get_args(Misfire):
            raise UsageError(f"misfire: must be one of {', '.join(get_args(Misfire))}")
        if self.overlap not in get_args(Overlap):
            raise UsageError(f"overlap: must be one of {', '.join(get_args(Overlap))}")
        if not 0 <= self.grace_s <= GRACE_S_MAX:
            raise UsageError(f"grace: {self.grace_s:g} s is not between 0 and a year")

    @property
    def payload_json(self) -> str:
        """The payload as JSON text."""
        return encode_payload(self.payload).decode()

    @property
    def headers_json(self) -> str | None:
        """The headers as JSON text; None when there are none."""
        ours = {NAME_HEADER.lower(), TIME_HEADER.lower(), RUN_HEADER.lower()}
        for name in self.headers or ():
            if name.lower() in ours:
                raise UsageError(f'headers: "{truncate(name)}" is reserved for the schedule itself')
        text = encode_headers(self.headers)
        if text is not None and len(text) > SCHEDULE_HEADERS_BYTES_MAX:
            raise UsageError(
                f"headers: {len(text)} bytes as JSON, the limit is {SCHEDULE_HEADERS_BYTES_MAX}"
            )
        return text


@dataclass(frozen=True, slots=True)
class DueTicks:
    """The decision on due ticks."""

    ticks: tuple[datetime, ...]
    """The ticks to publish, in order."""
    next_at: datetime
    """The first undecided tick; it may be due already."""
    missed: tuple[datetime, datetime] | None = None
    """Skipped ticks: from the first one to before the second."""


def due_ticks(
    cron: Cron,
    next_at: datetime,
    now: datetime,
    *,
    misfire: Misfire,
    grace_s: float,
    ticks_max: int,
) -> DueTicks:
    """Decide on ticks that are due.

    Args:
        next_at: the first undecided tick.
        ticks_max: publish at most this many; `next_at` of the result continues after them.
    """
    if next_at > now:
        return DueTicks((), next_at)
    start = next_at
    if misfire == "once":
        start = cron.latest_before(next_at, now)
    elif misfire == "skip":
        oldest = now - timedelta(seconds=grace_s)
        if oldest > next_at:
            start = cron.next(oldest - timedelta.resolution)
    # The first is one of them; those behind it follow.
    ticks = (start, *islice(cron.between(start, now), ticks_max - 1)) if start <= now else ()
    missed = (next_at, start) if start > next_at else None
    return DueTicks(ticks, cron.next(ticks[-1]) if ticks else start, missed)


def restart_at(cron: Cron, next_at: datetime, now: datetime) -> datetime | None:
    """The tick from which a schedule goes on, if a wrong clock has decided future ticks.

    Args:
        next_at: the first undecided tick.

    Returns:
        None: the last decided tick is at most `AHEAD_MAX` ahead.
    """
    first = cron.next(now)
    if next_at <= first:
        return None
    decided = cron.latest_before(first, next_at - timedelta.resolution)
    return first if decided > now + AHEAD_MAX else None


def ticks_from(last_at: datetime | None, now: datetime) -> datetime:
    """The time after which the ticks of a changed schedule count: now, or its last published tick.

    A later one was published before the clock was set back a little; one that is far ahead, by a
    wrong clock.
    """
    return max(now, last_at) if last_at is not None and last_at <= now + AHEAD_MAX else now


def overlap_poll_s(going_s: float) -> float:
    """Seconds until the next poll of a run that another one waits for.

    Args:
        going_s: seconds since it was published.
    """
    return min(max(going_s * POLL_SHARE, OVERLAP_POLL_MIN_S), OVERLAP_POLL_MAX_S)

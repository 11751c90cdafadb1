"""Schedules: when each must fire, and whether it fired exactly once.

The times do not come from the relay's code.  Most are a grid; those of special times (a
change of daylight saving time, a leap day) are listed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tests.sim import moments
from tests.sim.books import Violation

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from tests.sim.checks import Checker
    from tests.sim.database.engine import Row, Transaction

LATE_S = 3.0
"""Limit for publishing a tick while no fault is active, besides two polls."""
WAIT_S = 30.0
"""Maximum delay before a run that the next run waits for is checked again."""


@dataclass(frozen=True)
class Kind:
    """A cron expression, and its times."""

    cron: str
    timezone: str
    every_s: int = 0
    offset_s: int = 0
    at: tuple[float, ...] = ()

    def between(self, first: float, last: float) -> list[float]:
        """The ticks from one time to another, both included, in epoch seconds."""
        if not self.every_s:
            return [tick for tick in self.at if first <= tick <= last]
        start = -(-(first - self.offset_s) // self.every_s) * self.every_s + self.offset_s
        return [start + n * self.every_s for n in range(int((last - start) // self.every_s) + 1)]


def _utc(*times: str) -> tuple[float, ...]:
    return tuple(datetime.fromisoformat(f"{text}:00+00:00").timestamp() for text in times)


GRIDS = (
    Kind("*/4 * * * *", "UTC", every_s=240),
    Kind("*/10 * * * *", "America/New_York", every_s=600),
    Kind("0,20,40 * * * *", "Asia/Kolkata", every_s=1200, offset_s=600),
)

BERLIN, LORD_HOWE = "Europe/Berlin", "Australia/Lord_Howe"
# Ticks at special times, and those before and after.
OCCASIONS = (
    # Clocks go from 02:00 to 03:00 at 01:00 UTC.
    Kind("30 2 * * *", BERLIN, at=_utc("2027-03-27T01:30", "2027-03-28T01:00", "2027-03-29T00:30")),
    # And from 03:00 to 02:00: a time of day comes twice, and counts once.
    Kind("45 2 * * *", BERLIN, at=_utc("2027-10-30T00:45", "2027-10-31T00:45", "2027-11-01T01:45")),
    # Half an hour is left out at 15:30 UTC.
    Kind(
        "15 2 * * *", LORD_HOWE, at=_utc("2026-10-02T15:45", "2026-10-03T15:30", "2026-10-04T15:15")
    ),
    Kind("0 0 29 2 *", "UTC", at=_utc("2024-02-29T00:00", "2028-02-29T00:00", "2032-02-29T00:00")),
)

KINDS = {(kind.cron, kind.timezone): kind for kind in (*GRIDS, *OCCASIONS)}


@dataclass
class Book:
    """Records of one schedule."""

    kind: Kind
    due_from: float
    """The first tick since it was added, changed, paused or resumed."""
    published: set[float] = field(default_factory=set)
    skipped: list[tuple[float, float]] = field(default_factory=list)
    """Skipped ticks by the journal: the first one, and the first one after them."""

    def restart(self, at: float) -> None:
        """Forget what was decided for this time and later."""
        self.published = {tick for tick in self.published if tick < at}
        self.skipped = [(first, min(before, at)) for first, before in self.skipped if first < at]

    def missing(self, until: float) -> list[float]:
        """Ticks before a time that are neither published nor journalled as skipped."""
        return [
            tick
            for tick in self.kind.between(self.due_from, until)
            if tick < until
            and tick not in self.published
            and not any(first <= tick < before for first, before in self.skipped)
        ]


class Timetable:
    """Checks schedules and delayed events at each commit.

    Args:
        late_s: limit for publishing a tick while no fault is active.
    """

    UNDONE = ("_books", "_waiting", "_read")
    """The records that a restore of the database undoes."""

    def __init__(self, checker: Checker, late_s: float) -> None:
        self._checker = checker
        self._db = checker.database
        self._late_s = late_s + LATE_S
        self._books: dict[int, Book] = {}
        self._waiting: set[int] = set()
        self._read = 0
        # The latest time of a decision; the clock may have been set back since.
        self._decided_at = 0.0
        self._db.on_tick.append(self._ticking)

    def _ticking(self, session: str) -> None:
        self._decided_at = max(self._decided_at, self._db.wall())
        labels = {row["label"]: row["id"] for row in self._db.replica.rows.values()}
        # A replica that was expired may still read what is due; its runs are fenced off.
        if session in labels:
            self._checker.moments.come(moments.TICK, self._checker.name_of(labels[session]))

    def committed(self, tx: Transaction) -> None:
        """Check a committed transaction.

        Raises:
            Violation: a tick was published twice, or an earlier one was not published.
        """
        self._read_journal()
        for kind, what in tx.notes:
            if (handle := self._handlers().get(kind)) is not None:
                handle(*what)

    def _handlers(self) -> dict[str, Callable[..., None]]:
        return {
            "schedule": self._changed,
            "tick": self._ticked,
            "future": self._waiting.add,
            "moved": self._moved,
            "erased": self._waiting.difference_update,
        }

    def _read_journal(self) -> None:
        for _, kind, _, _, data in self._db.journal[self._read :]:
            if kind == "schedule_skipped":
                first, before = (data[each].timestamp() for each in ("from", "before"))
                row = next(r for r in self._db.schedule.rows.values() if r["name"] == data["name"])
                self._books[row["id"]].skipped.append((first, before))
            elif kind == "schedule_restarted":
                at = datetime.fromisoformat(data["next"]).timestamp()
                row = next(r for r in self._db.schedule.rows.values() if r["name"] == data["name"])
                self._books[row["id"]].restart(at)
        self._read = len(self._db.journal)

    def _changed(self, schedule_id: int, next_at: datetime) -> None:
        row = self._db.schedule.rows[schedule_id]
        kind = KINDS[row["cron"], row["timezone"]]
        known = self._books.get(schedule_id)
        published = set() if known is None or known.kind != kind else known.published
        self._books[schedule_id] = Book(kind, next_at.timestamp(), published)

    def _ticked(
        self,
        schedule_id: int,
        at: datetime,
        by_hand: bool,
        last_id: int | None,
        last_event_id: UUID | None,
    ) -> None:
        if by_hand:
            return
        db, book, tick = self._db, self._books[schedule_id], at.timestamp()
        row = db.schedule.rows[schedule_id]
        where = f"{row['name']} ({row['cron']}) at {at:%d %H:%M}"
        if tick in book.published:
            raise Violation("schedule", f"{where} is published twice")
        if not book.kind.between(tick, tick) or tick > self._decided_at:
            raise Violation("schedule", f"{where} is no tick, or is too early")
        if missing := book.missing(tick):
            raise Violation("schedule", f"{where} comes before {missing}")
        book.published.add(tick)
        if row["overlap"] == "wait":
            waiting = {r["event_id"] for r in db.future_event.rows.values()}
            if last_event_id in waiting:
                raise Violation("schedule", f"{where} does not wait for a run that is held")
            if last_id is not None and not self._has_ended(last_id):
                raise Violation("schedule", f"{where} does not wait for event {last_id}")
            return
        due_at = tick - self._checker.world.EPOCH_S - db.skew_s
        late_s = self._checker.world.now - due_at
        if due_at > self._checker.troubled_until and late_s > self._late_s:
            raise Violation("schedule", f"{where} is {late_s:.1f} s late")

    def _has_ended(self, outbox_id: int) -> bool:
        """Whether an event was sequenced, and every delivery of it has an outcome."""
        if self._db.batches[-1].high < outbox_id:
            return False
        for lane_id, given in self._db.deliveries.items():
            book = self._checker.book(lane_id)
            for each in given:
                ended = each.seq <= book.ended_through or each.seq in book.ended
                # What a replay or a feed sends is not waited for.
                first = not each.again and each.feed_id is None
                if each.outbox_id == outbox_id and first and not ended:
                    return False
        return True

    def _moved(self, future_id: int, outbox_id: int) -> None:
        if future_id not in self._waiting:
            raise Violation("future", f"future event {future_id} is published twice, or erased")
        self._waiting.discard(future_id)

    # --------------------------------------------------------------- at rest

    def behind(self) -> list[str]:
        """Schedules and delayed events that are overdue.

        If the clock was set back while a schedule waited for its last run, the schedule is
        checked again only when that time has come again; published ticks as well.
        """
        limit = self._db.wall() - self._late_s
        latest_decision = self._decided_at + WAIT_S + LATE_S
        rows = [r for r in self._db.schedule.rows.values() if r["state"] == "active"]
        late = [
            r["name"]
            for r in rows
            if r["next_at"].timestamp() <= limit
            and (r["due_at"].timestamp() <= limit or r["due_at"].timestamp() > latest_decision)
        ]
        future = self._db.future_event.rows.values()
        # Held ones do not wait for the clock.
        return late + [
            f"future {r['id']}"
            for r in future
            if r["is_held"] or r["deliver_at"].timestamp() <= limit
        ]

    def audit(self) -> None:
        """Check that nothing that was due is missing.

        Raises:
            Violation: something is.
        """
        for row in self._db.schedule.rows.values():
            if row["state"] == "active" and (missing := self._missing(row)):
                raise Violation("schedule", f"{row['name']} ({row['cron']}) never had {missing}")
        if lost := self._waiting - set(self._db.future_event.rows):
            raise Violation("future", f"future events {sorted(lost)} were lost")

    def _missing(self, row: Row) -> list[Any]:
        return self._books[row["id"]].missing(row["next_at"].timestamp())

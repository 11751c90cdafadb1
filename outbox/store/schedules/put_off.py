"""What a wrong clock of the database has left behind: runs and delayed events put off far too long.

Ticks are decided once, by the database's clock.  If that was days ahead for a moment, the next run
of a schedule is days away.  This is repaired when a replica begins to lead, and when the clock has
been set back: then a schedule goes on with the next tick from now, which the journal says.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from outbox.core.schedules.cron import Cron
from outbox.core.schedules.schedule import AHEAD_MAX, restart_at
from outbox.errors import UsageError
from outbox.store.routing_change import ADD_TO_JOURNAL
from outbox.store.schedules.schedule_runs import (
    ADVANCE_SCHEDULES,
    LOCK_SCHEDULES,
    RETRY_MAX,
    SCHEDULES_MAX,
)
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from asyncpg import Record

    from outbox.store.connection.store_connection import StoreConnection
    from outbox.store.sql.message import WriteCall

# Schedules whose next run, or next poll, may be further ahead than the clock can have decided.  The
# last run tells nothing of a schedule that was added or resumed by a wrong clock.
READ_PUT_OFF = """
SELECT id, name, cron, timezone, next_at, due_at, statement_timestamp() AS now,
       xmin::text AS revision
  FROM schedule
 WHERE state = 'active' AND id > $1
   AND (next_at > statement_timestamp() + make_interval(secs => $2)
        OR due_at > greatest(next_at, statement_timestamp() + make_interval(secs => $3)))
 ORDER BY id LIMIT $4
"""
RETRY_EVENTS = WriteStatement(
    "retry_put_off_events",
    """
UPDATE future_event SET retry_at = clock_timestamp()
 WHERE retry_at > clock_timestamp() + make_interval(secs => $1)
""",
)


@dataclass(frozen=True, slots=True)
class Restart:
    """A schedule that goes on."""

    schedule: Record
    next_at: datetime


class PutOffStore:
    """Finds schedules and delayed events that were put off, on the connection of their runs."""

    def __init__(self, connection: StoreConnection, replica_id: int) -> None:
        self._db = connection
        self._actor = f"replica {replica_id}"

    async def restart(self) -> tuple[list[str], bool]:
        """Let schedules and delayed events go on.

        Returns:
            The names of the schedules, and whether none is left: one that another session changes
            is found by the next search.
        """
        names: list[str] = []
        after, complete = 0, True
        while rows := await self._read(after):
            after = rows[-1]["id"]
            restarts = [each for row in rows if (each := decide_restart(row)) is not None]
            if restarts and await self._write(restarts):
                names += [each.schedule["name"] for each in restarts]
            elif restarts:
                complete = False
        await self._db.write(RETRY_EVENTS, RETRY_MAX.total_seconds())
        return names, complete

    async def _read(self, after: int) -> list[Record]:
        limits = AHEAD_MAX.total_seconds(), RETRY_MAX.total_seconds()
        rows: list[Record] = await self._db.fetch(READ_PUT_OFF, after, *limits, SCHEDULES_MAX)
        return rows

    async def _write(self, restarts: Sequence[Restart]) -> bool:
        """Write them in one message; returns False if a schedule was changed meanwhile."""
        ids, times = [r.schedule["id"] for r in restarts], [r.next_at for r in restarts]
        calls: list[WriteCall] = [
            (LOCK_SCHEDULES, ids, [r.schedule["revision"] for r in restarts]),
            (ADVANCE_SCHEDULES, ids, times, times),
        ]
        for each in restarts:
            data = orjson.dumps(journal_data(each)).decode()
            calls.append((ADD_TO_JOURNAL, "schedule_restarted", self._actor, None, data))
        return bool(await self._db.write_unless_aborted(*calls))


def journal_data(restart: Restart) -> dict[str, str]:
    """What the journal says: ticks between these two times may be published again."""
    row = restart.schedule
    was, now = row["next_at"].isoformat(), restart.next_at.isoformat()
    return {"name": row["name"], "was": was, "next": now}


def decide_restart(row: Record) -> Restart | None:
    """The tick from which a schedule goes on; None: it was not put off, or cannot be parsed.

    Args:
        row: the schedule, with the database's time as `now`.
    """
    now, next_at = row["now"], row["next_at"]
    with suppress(UsageError):
        if (at := restart_at(Cron(row["cron"], row["timezone"]), next_at, now)) is not None:
            return Restart(row, at)
    return Restart(row, next_at) if row["due_at"] > max(next_at, now + RETRY_MAX) else None

"""Schedules with ticks that are due on demand, independent of the time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.schedules.schedule import ScheduleSettings
from outbox.operations.schedules import changes as schedule_changes

if TYPE_CHECKING:
    from asyncpg import Connection

DAY = timedelta(days=1)
# Daily, half an hour ago: the next tick is far away, whenever the tests run.
HALF_AN_HOUR_AGO = datetime.now(UTC) - timedelta(minutes=30)
DAILY = f"{HALF_AN_HOUR_AGO:%M %H} * * *"


async def add_schedule(db: Connection[Any], name: str = "daily", **options: Any) -> None:
    """Add a schedule that publishes all of its ticks, unless the options differ."""
    wanted = {"cron": DAILY, "type": "a.b", "misfire": "all", **options}
    await schedule_changes.add_schedule(
        db, "relay", ScheduleSettings(name=name, **wanted), actor="test"
    )


async def let_be_due(db: Connection[Any], ticks: int, name: str = "daily") -> list[datetime]:
    """Make this many ticks of a schedule due; returns them."""
    newest = HALF_AN_HOUR_AGO.replace(second=0, microsecond=0)
    due = [newest - n * DAY for n in reversed(range(ticks))]
    await db.execute("UPDATE schedule SET next_at = $1, due_at = $1 WHERE name = $2", due[0], name)
    return due


async def published(db: Connection[Any], name: str = "daily") -> list[datetime]:
    """The ticks of the schedule's events, in outbox order."""
    rows = await db.fetch(
        "SELECT headers ->> 'X-Schedule-Time' AS at FROM outbox "
        "WHERE headers ->> 'X-Schedule' = $1 ORDER BY id",
        name,
    )
    return [datetime.fromisoformat(row["at"]) for row in rows]


async def journal(db: Connection[Any], kind: str) -> list[dict[str, Any]]:
    """The journal entries of this kind, oldest first."""
    rows = await db.fetch("SELECT data FROM journal WHERE kind = $1 ORDER BY id", kind)
    return [orjson.loads(row["data"]) for row in rows]

"""Schedules that a wrong clock has put off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.schedules.schedule import AHEAD_MAX, DueTicks
from outbox.store.schedules import put_off
from outbox.store.schedules.put_off import decide_restart, journal_data
from outbox.store.schedules.schedule_runs import RETRY_MAX, ScheduleDecision
from tests.sim.database.engine import perform
from tests.sim.stores.routing_change import add_to_journal
from tests.sim.stores.schedule_runs import active_schedules, advance_schedules, lock_unchanged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.store.schedules.put_off import Restart
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database


class PutOffStore(put_off.PutOffStore):
    """Stands in for the real `PutOffStore`, with the same decisions."""

    def __init__(self, connection: Any, replica_id: int) -> None:
        self._db: Connection = connection  # type: ignore[assignment]
        self._actor = f"replica {replica_id}"

    async def restart(self) -> tuple[list[str], bool]:
        rows = await self._db.call(read_put_off)
        restarts = [each for row in rows if (each := decide_restart(row)) is not None]
        if not restarts or await self._db.call(write_restarts, restarts, self._actor):
            return [each.schedule["name"] for each in restarts], True
        return [], False


def read_put_off(db: Database, tx: Transaction) -> list[Any]:
    now = db.clock_timestamp()
    return [
        {**row, "now": now, "revision": row}
        for row in active_schedules(db, tx)
        if row["next_at"] > now + AHEAD_MAX or row["due_at"] > max(row["next_at"], now + RETRY_MAX)
    ]


def write_restarts(
    db: Database, tx: Transaction, restarts: Sequence[Restart], actor: str
) -> Steps[bool]:
    """The statements of one message, which is aborted if a schedule has changed."""
    rows: list[Row] = [each.schedule["revision"] for each in restarts]
    if not lock_unchanged(db, tx, rows):
        return False
    decided = [
        ScheduleDecision(each.schedule, DueTicks((), each.next_at), each.next_at)
        for each in restarts
    ]
    yield from perform(advance_schedules(db, tx, decided))
    for each in restarts:
        add_to_journal(db, tx, "schedule_restarted", actor, None, journal_data(each))
    return True

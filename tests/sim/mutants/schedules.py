"""Mistakes with ticks and future events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.schedules import schedule
from outbox.relay.sequencing import schedule_runner
from outbox.store import schedule_runs
from tests.sim.mutants.catalogue import mutant, swap

if TYPE_CHECKING:
    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.simulation import Simulation


@mutant
def the_next_tick_set_in_a_transaction_of_its_own(sim: Simulation) -> None:
    """The event is committed; then the schedule moves on."""

    tick = schedule_runs.TickStore.tick

    async def patched(self: Any) -> schedule_runs.Ticked:
        later: list[Any] = []
        inside, self._db = self._db, Postponing(self._db, schedule_runs.ADVANCE, later)
        try:
            ticked = await tick(self)
        finally:
            self._db = inside
        for arguments in later:
            await self._db.execute(schedule_runs.ADVANCE, *arguments)
        return ticked

    swap(schedule_runs.TickStore, "tick", patched)


class Postponing:
    """A connection that puts off one statement."""

    def __init__(self, connection: Any, sql: str, later: list[Any]) -> None:
        self._connection = connection
        self._sql = sql
        self._later = later

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def execute(self, sql: str, *arguments: Any) -> Any:
        if sql == self._sql:
            self._later.append(arguments)
            return None
        return await self._connection.execute(sql, *arguments)


@mutant
def schedules_that_every_replica_looks_at_without_a_lock(sim: Simulation) -> None:
    """What is due is read, and then published."""

    def lock_due(db: Database, tx: Transaction, limit: int) -> list[Row]:
        now = db.clock_timestamp()
        active = [row for row in tx.rows(db.schedule) if row["state"] == "active"]
        return [{**row, "now": now} for row in active if row["look_at"] <= now][:limit]

    sim.database.changed[schedule_runs.LOCK_DUE] = lock_due
    lead = schedule_runner.Ticker.lead
    swap(schedule_runner.Ticker, "lead", lambda self, leads: lead(self, True))


@mutant
def a_next_run_that_waits_for_the_sequencer_alone(sim: Simulation) -> None:
    """What is sequenced is as good as delivered."""

    def read_ended(db: Database, tx: Transaction, outbox_ids: Any) -> list[Row]:
        return [{"outbox_id": i} for i in outbox_ids if i <= db.batches[-1].high]

    sim.database.changed[schedule_runs.READ_ENDED] = read_ended


@mutant
def missed_ticks_that_go_without_a_word(sim: Simulation) -> None:
    """After a fail-over it begins with the next tick from now."""
    due = schedule.due

    def patched(cron: Any, next_at: Any, now: Any, **rest: Any) -> schedule.Due:
        if (now - next_at).total_seconds() > sim.settings.lease_s:
            return schedule.Due((), cron.next(now))
        return due(cron, next_at, now, **rest)

    swap(schedule_runs, "due", patched)

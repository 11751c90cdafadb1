"""Mistakes with runs of schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.schedules import schedule
from outbox.relay.sequencing import schedule_runner
from outbox.store import schedule_runs as decisions
from tests.sim.mutants.catalogue import mutant, swap
from tests.sim.stores import schedule_runs

if TYPE_CHECKING:
    from outbox.store.schedule_runs import ScheduleRunResult
    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.simulation import Simulation


@mutant
def next_run_set_in_second_transaction(sim: Simulation) -> None:
    """The event is committed before the next tick is set."""

    original = schedule_runs.ScheduleRunStore.run_due_schedules

    async def patched(self: Any) -> ScheduleRunResult:
        later: list[Any] = []
        inside, self._db = self._db, Postponing(self._db, schedule_runs.advance_schedules, later)
        try:
            result = await original(self)
        finally:
            self._db = inside
        for arguments in later:
            await self._db.call(schedule_runs.advance_schedules, *arguments)
        return result

    swap(schedule_runs.ScheduleRunStore, "run_due_schedules", patched)


class Postponing:
    """A connection that postpones one step."""

    def __init__(self, connection: Any, step: Any, later: list[Any]) -> None:
        self._connection = connection
        self._step = step
        self._later = later

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def call(self, step: Any, *arguments: Any, **rest: Any) -> Any:
        if step is self._step:
            self._later.append(arguments)
            return None
        return await self._connection.call(step, *arguments, **rest)


@mutant
def due_schedules_not_locked(sim: Simulation) -> None:
    """Due schedules are read without a lock, and then published."""

    def lock_due(db: Database, tx: Transaction) -> list[Row]:
        now, active = db.clock_timestamp(), schedule_runs.active_schedules(db, tx)
        return [{**row, "now": now} for row in active if row["due_at"] <= now]

    swap(schedule_runs, "lock_due", lock_due)
    set_leader = schedule_runner.ScheduleRunner.set_leader
    swap(schedule_runner.ScheduleRunner, "set_leader", lambda self, leads: set_leader(self, True))


@mutant
def sequenced_run_counts_as_delivered(sim: Simulation) -> None:
    """An event that is sequenced counts as delivered."""

    def read_ended(db: Database, tx: Transaction, outbox_ids: Any) -> set[int]:
        return {i for i in outbox_ids if i <= db.batches[-1].high}

    swap(schedule_runs, "read_ended", read_ended)


@mutant
def missed_ticks_not_reported(sim: Simulation) -> None:
    """After a fail-over the missed ticks are neither published nor reported."""
    due_ticks = schedule.due_ticks

    def patched(cron: Any, next_at: Any, now: Any, **rest: Any) -> schedule.DueTicks:
        if (now - next_at).total_seconds() > sim.settings.lease_s:
            return schedule.DueTicks((), cron.next(now))
        return due_ticks(cron, next_at, now, **rest)

    swap(decisions, "due_ticks", patched)

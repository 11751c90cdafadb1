"""Mistakes with runs of schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.schedules import schedule
from outbox.relay.sequencing import schedule_runner
from outbox.store.schedules import schedule_runs as decisions
from tests.sim.mutants.catalogue import mutant, swap
from tests.sim.stores import schedule_runs

if TYPE_CHECKING:
    from outbox.store.schedules.schedule_runs import ScheduleRunResult
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database
    from tests.sim.simulation import Simulation


@mutant
def next_run_set_in_second_transaction(sim: Simulation) -> None:
    """The event is committed before the next tick is set."""

    later: dict[int, Any] = {}
    run_due = schedule_runs.ScheduleRunStore.run_due_schedules
    advance = schedule_runs.advance_schedules

    def postpone(db: Database, tx: Transaction, decided: Any) -> None:
        later[db.session_of(tx).pid] = decided

    async def patched(self: Any) -> ScheduleRunResult:
        result = await run_due(self)
        decided = later.pop(self._db.get_server_pid(), None)
        if decided is not None:
            await self._db.call(advance, decided)
        return result

    swap(schedule_runs, "advance_schedules", postpone)
    swap(schedule_runs.ScheduleRunStore, "run_due_schedules", patched)


@mutant
def due_schedules_not_locked(sim: Simulation) -> None:
    """Due schedules are published by all replicas, without a check that they are unchanged."""
    swap(schedule_runs, "lock_unchanged", lambda db, tx, rows: True)
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
    """After a failover the missed ticks are neither published nor reported."""
    due_ticks = schedule.due_ticks

    def patched(cron: Any, next_at: Any, now: Any, **rest: Any) -> schedule.DueTicks:
        if (now - next_at).total_seconds() > sim.settings.lease_s:
            return schedule.DueTicks((), cron.next(now))
        return due_ticks(cron, next_at, now, **rest)

    swap(decisions, "due_ticks", patched)

"""Mistakes with ticks and future events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core import ticks
from outbox.relay import ticker
from outbox.store import ticking
from tests.sim.mutants.catalogue import mutant, swap

if TYPE_CHECKING:
    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.simulation import Simulation


@mutant
def the_next_tick_set_in_a_transaction_of_its_own(sim: Simulation) -> None:
    """The event is committed; then the schedule moves on."""

    tick = ticking.TickStore.tick

    async def patched(self: Any) -> ticking.Ticked:
        later: list[Any] = []
        inside, self._db = self._db, Postponing(self._db, ticking.ADVANCE, later)
        try:
            ticked = await tick(self)
        finally:
            self._db = inside
        for arguments in later:
            await self._db.execute(ticking.ADVANCE, *arguments)
        return ticked

    swap(ticking.TickStore, "tick", patched)


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

    sim.database.changed[ticking.LOCK_DUE] = lock_due
    lead = ticker.Ticker.lead
    swap(ticker.Ticker, "lead", lambda self, leads: lead(self, True))


@mutant
def a_next_run_that_waits_for_the_sequencer_alone(sim: Simulation) -> None:
    """What is sequenced is as good as delivered."""

    def read_ended(db: Database, tx: Transaction, outbox_ids: Any) -> list[Row]:
        return [{"outbox_id": i} for i in outbox_ids if i <= db.batches[-1].high]

    sim.database.changed[ticking.READ_ENDED] = read_ended


@mutant
def missed_ticks_that_go_without_a_word(sim: Simulation) -> None:
    """After a fail-over it begins with the next tick from now."""
    due = ticks.due

    def patched(cron: Any, next_at: Any, now: Any, **rest: Any) -> ticks.Due:
        if (now - next_at).total_seconds() > sim.settings.lease_s:
            return ticks.Due((), cron.next(now))
        return due(cron, next_at, now, **rest)

    swap(ticking, "due", patched)

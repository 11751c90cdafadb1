"""Mistakes with changes by operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.store.schema import lock_attempts
from tests.sim.database.engine import perform
from tests.sim.mutants.catalogue import mutant, swap
from tests.sim.stores import change, routing_change

if TYPE_CHECKING:
    from uuid import UUID

    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.simulation import Simulation


@mutant
def a_change_ignores_the_version(sim: Simulation) -> None:
    """The message of a change does not compare the routing version with that of its plan."""

    def begin_change_of(db: Database, tx: Transaction, version: int) -> Steps[None]:
        yield from perform(routing_change.lock_cursor(db, tx))
        yield from perform(routing_change.raise_version(db, tx))

    swap(routing_change, "begin_change_of", begin_change_of)


@mutant
def an_operator_holds_the_cursor(sim: Simulation) -> None:
    """A change locks the cursor row in a message of its own, before it is planned."""
    read, write = change.Session.fetchrow, change.Session.write_together
    transactions: dict[Any, Any] = {}

    async def fetchrow(self: Any, statement: str, request: UUID) -> dict[str, int | bool]:
        if self.connection not in transactions:
            transactions[self.connection] = self.connection.transaction()
            await transactions[self.connection].start()
            await self.connection.call(routing_change.lock_cursor)
        return await read(self, statement, request)

    async def write_together(self: Any, *calls: Any, **rest: Any) -> None:
        await write(self, *calls, **rest)
        await transactions.pop(self.connection).commit()

    swap(change.Session, "fetchrow", fetchrow)
    swap(change.Session, "write_together", write_together)


@mutant
def migration_waits_without_limit(sim: Simulation) -> None:
    """A migration waits for its lock as long as it takes, and all producers wait behind it."""
    swap(lock_attempts, "MESSAGE_LOCK_TIMEOUT_S", 0.0)

"""Dead letters that an operator discards."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from outbox.operations.dead_letter_filter import DeadLetterFilter
from outbox.operations.discard import BATCH_SIZE
from outbox.operations.replays import ReplayOutcome
from outbox.store.connection.connect import map_errors
from tests.sim.database.engine import EXCLUSIVE, Wait
from tests.sim.stores.replays import is_blocking, lock_named, set_dead_letter_state
from tests.sim.stores.routing_change import routing_transaction, write_journal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from outbox.operations.dead_letter_filter import DeadLetterSelection
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database


async def discard(
    connection: Connection,
    schema: str,
    selection: DeadLetterSelection,
    *,
    actor: str,
    comment: str | None = None,
) -> ReplayOutcome:
    if selection.ids:
        async with routing_transaction(connection, schema):
            rows = await lock_named(connection, selection.ids, again=False)
            ids = [row["id"] for row in rows]
            await set_dead_letter_state(connection, ids, "discarded")
            await write_journal(connection, "dead_discarded", actor, None, {"dead": ids})
        return ReplayOutcome(len(ids), {})
    if selection.filter != DeadLetterFilter():
        raise NotImplementedError("a sweep of the simulation is of all dead letters")
    after = done = 0
    while True:
        with map_errors(schema, "operator"):
            found = await connection.call(find_dead, after)
        if not found:
            return ReplayOutcome(done, {})
        after = max(found)
        async with _discard_transaction(connection, schema, unblocks=any(found.values())):
            ids = await connection.call(lock_still_dead, list(found))
            await set_dead_letter_state(connection, ids, "discarded")
            if ids:
                data = {"letters": len(ids), "from": ids[0], "to": ids[-1]}
                await write_journal(connection, "dead_discarded", actor, None, data)
        done += len(ids)


@asynccontextmanager
async def _discard_transaction(
    connection: Connection, schema: str, *, unblocks: bool
) -> AsyncIterator[None]:
    """Open a transaction, with the cursor row locked if a lane is to be unblocked."""
    if unblocks:
        async with routing_transaction(connection, schema):
            yield
    else:
        with map_errors(schema, "operator"):
            async with connection.transaction():
                yield


def find_dead(db: Database, tx: Transaction, after: int) -> dict[int, bool]:
    """The next ids, each with whether a lane is blocked by it."""
    found: dict[int, bool] = {}
    for d in sorted(tx.rows(db.dead_letter), key=lambda d: int(d["id"])):
        if d["id"] > after and d["state"] == "dead" and len(found) < BATCH_SIZE:
            found[d["id"]] = is_blocking(db, tx, d)
    return found


def lock_still_dead(db: Database, tx: Transaction, ids: Sequence[int]) -> Steps[list[int]]:
    found = []
    for dead_id in sorted(ids):
        yield Wait(db.dead_letter, dead_id, EXCLUSIVE)
        row = tx.get(db.dead_letter, dead_id)
        if row is not None and row["state"] == "dead":
            found.append(dead_id)
    return found

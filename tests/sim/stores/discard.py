"""Dead letters that an operator discards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.operations.dead_letters.discard import BATCH_SIZE, DiscardReport
from tests.sim.stores.change import make_change
from tests.sim.stores.replays import find_candidates, is_blocking, write_dead_letter_state

if TYPE_CHECKING:
    from outbox.operations.criteria import DeadLetterSelection
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database
    from tests.sim.stores.change import Change


async def discard_dead_letters(
    connection: Connection,
    schema: str,
    selection: DeadLetterSelection,
    *,
    actor: str,
    comment: str | None = None,
    counted: int | None = None,
    dry_run: bool = False,
) -> DiscardReport:
    assert not dry_run
    assert counted is None

    async def plan_named(change: Change) -> int:
        await find_candidates(change.db, selection, to_replay=False)
        ids = sorted(set(selection.ids))
        write_dead_letter_state(change, ids, "discarded")
        change.journal("dead_discarded", None, {"dead": ids})
        return len(ids)

    if selection.ids:
        return DiscardReport(False, await make_change(connection, schema, actor, plan_named))
    if selection.criteria:
        raise NotImplementedError("a sweep of the simulation is of all dead letters")
    after = done = 0

    async def plan_batch(change: Change) -> list[int]:
        found = await change.db.call(find_dead, after)
        ids = list(found)
        change.routing = any(found.values())
        if ids:
            write_dead_letter_state(change, ids, "discarded")
            data = {"dead_letters": len(ids), "from": ids[0], "to": ids[-1]}
            change.journal("dead_discarded", None, data)
        return ids

    while ids := await make_change(connection, schema, actor, plan_batch):
        after, done = ids[-1], done + len(ids)
    return DiscardReport(False, done)


def find_dead(db: Database, tx: Transaction, after: int) -> dict[int, bool]:
    """The next ids, each with whether a lane is blocked by it."""
    found: dict[int, bool] = {}
    for d in sorted(tx.rows(db.dead_letter), key=lambda d: int(d["id"])):
        if d["id"] > after and d["state"] == "dead" and len(found) < BATCH_SIZE:
            found[d["id"]] = is_blocking(db, tx, d)
    return found

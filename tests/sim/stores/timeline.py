"""The history of the database.  The simulated server reports its identity, and no timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from outbox.store.cluster.timeline import History
from tests.sim.database.endpoints import add_lane
from tests.sim.database.engine import EXCLUSIVE, UPDATE, Wait, perform
from tests.sim.stores import channels
from tests.sim.stores.routing_change import add_to_journal

if TYPE_CHECKING:
    from outbox.store.cluster.timeline import CursorRow
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database


async def read_server_fence(connection: Connection) -> int | None:
    return await connection.call(report_timeline)


def report_timeline(db: Database, tx: Transaction) -> int | None:
    return None


def history_of_server(db: Database) -> History:
    return History(None, db.identity)


def history_of_cursor(db: Database, tx: Transaction) -> History:
    """The history of the last batch."""
    row = tx.get(db.cursor, 1)
    assert row is not None
    return History(None, row["identity"])


def incarnation_holds(db: Database, tx: Transaction) -> bool:
    """Whether the state was written here."""
    return incarnation_of(db, tx) is not None


def incarnation_of(db: Database, tx: Transaction) -> UUID | None:
    """The id of the state, in a column of the cursor row; None: it was restored."""
    row = tx.get(db.cursor, 1)
    assert row is not None
    found: UUID | None = row["incarnation"]
    return found


def new_incarnation(db: Database) -> UUID:
    """The id of a restored state from now on."""
    return UUID(int=db.rng.getrandbits(128))


def history_changed(db: Database, tx: Transaction) -> bool:
    """Whether the database was restored since the last batch."""
    return not (
        incarnation_holds(db, tx) and history_of_cursor(db, tx).continues_as(history_of_server(db))
    )


def first_generation(db: Database, generation: int) -> int:
    """The first generation of an endpoint's lanes in a new history."""
    return max(generation + 1, int(db.wall() * 1000))


def next_generation(db: Database, tx: Transaction, generation: int) -> int:
    return first_generation(db, generation) if history_changed(db, tx) else generation + 1


def set_first_history(db: Database, tx: Transaction, me: int, read: CursorRow) -> Steps[None]:
    yield Wait(db.cursor, 1, EXCLUSIVE)
    row = tx.get(db.cursor, 1)
    assert row is not None
    if (row["writer"], row["version"]) == (me, read.version) and row["identity"] is None:
        tx.change(db.cursor, 1, identity=read.server.identity)


def begin_odometer(db: Database, tx: Transaction) -> Steps[None]:
    """Let retention count from now on."""
    yield Wait(db.odometer, 1, UPDATE)
    meter = tx.get(db.odometer, 1)
    assert meter is not None
    tx.change(db.odometer, 1, began_s=meter["seconds"])


def change_history(
    db: Database, tx: Transaction, me: int, read: CursorRow, actor: str
) -> Steps[None]:
    """Begin new lanes, unless the cursor row has changed since it was read; one message."""
    new = read.history.updated_from(read.server)
    yield Wait(db.cursor, 1, EXCLUSIVE)
    row = tx.get(db.cursor, 1)
    assert row is not None
    if (row["writer"], row["version"]) != (me, read.version) or not history_changed(db, tx):
        return
    if not new.continues_as(history_of_server(db)):
        return
    incarnation, version = new_incarnation(db), row["version"] + 1
    changed = {"identity": new.identity, "incarnation": incarnation, "version": version}
    tx.change(db.cursor, 1, **changed)
    for endpoint_id in sorted(each["endpoint_id"] for each in tx.rows(db.ownership)):
        yield Wait(db.ownership, endpoint_id, UPDATE)
    yield from perform(begin_odometer(db, tx))
    yield db.pause_s()
    from_batch, begun = read.batch + 1, 0
    for e in sorted(tx.rows(db.endpoint), key=lambda e: str(e["id"])):
        if e["state"] in ("removing", "removed"):
            continue
        yield Wait(db.endpoint, e["id"], UPDATE)
        generation = first_generation(db, e["generation"])
        tx.change(db.endpoint, e["id"], generation=generation)
        owned = tx.get(db.ownership, e["id"])
        assert owned is not None
        for slot in range(e["lanes"]):
            add_lane(db, tx.put, e["id"], generation, slot, from_batch, owned["epoch"])
        data = {"generation": generation, "lanes": e["lanes"], "from_batch": from_batch}
        add_to_journal(db, tx, "endpoint_lanes_renewed", actor, e["id"], data)
        begun += 1
    data = {"from_batch": from_batch, "endpoints": begun, "restored": True}
    add_to_journal(db, tx, "timeline_changed", actor, None, data)
    channels.notify_all(db, tx)

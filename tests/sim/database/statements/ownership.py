"""What replicas ask about leases and about who owns what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.store import channels, replicas
from outbox.store.connection import migrate
from outbox.store.connection import worker as backends
from tests.sim.database.engine import EXCLUSIVE, SHARE, UPDATE, Wait
from tests.sim.database.statements.registry import answers, answers_prefix
from tests.sim.database.tables import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from uuid import UUID

    from tests.sim.database.backend import Backend
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database


def fence(db: Database, tx: Transaction, me: int) -> Steps:
    """Whether the replica's lease runs; its row is locked then, as by FENCE.

    Whoever waited for the lock looks again only if the row was changed meanwhile.
    """
    row = tx.get(db.replica, me)
    if row is None or row["expires_at"] <= db.wall():
        return False
    if db.rng.random() < 0.5:
        yield db.pause_s()
    yield Wait(db.replica, me, SHARE)
    new = tx.get(db.replica, me)
    if new is row:
        return True
    return new is not None and new["expires_at"] > db.wall()


def journal(
    db: Database, tx: Transaction, kind: str, actor: str, endpoint_id: UUID | None, data: Any
) -> None:
    """What happened, kept with the transaction in which it did."""
    at = db.wall()
    tx.append(lambda: db.journal.append((at, kind, actor, endpoint_id, data)))


@answers(migrate.FIND_HISTORY)
def find_history(db: Database, tx: Transaction, schema: str) -> list[Row]:
    return [{"exists": schema == SCHEMA}]


@answers(
    migrate.READ_HISTORY.format(schema=f'"{SCHEMA}"'), migrate.READ_HISTORY.format(schema=SCHEMA)
)
def read_history(db: Database, tx: Transaction) -> list[Row]:
    return [
        {"version": m.version, "checksum": m.checksum, "works_from": m.works_from}
        for m in migrate.migrations()
    ]


@answers(channels.WAKE_ALL)
def wake_all(db: Database, tx: Transaction) -> str:
    tx.notify(SCHEMA, channels.RECONFIGURED)
    tx.notify(SCHEMA + channels.OWNERS_SUFFIX, channels.RECONFIGURED)
    return "SELECT 1"


@answers(channels.WAKE_OWNERS)
def wake_owners(db: Database, tx: Transaction, text: str) -> str:
    tx.notify(SCHEMA + channels.OWNERS_SUFFIX, text)
    return "SELECT 1"


@answers("SELECT 1")
def heartbeat(db: Database, tx: Transaction) -> list[Row]:
    return [{"one": 1}]


@answers(replicas.RESERVE)
def reserve(db: Database, tx: Transaction) -> list[Row]:
    return [{"nextval": db.serial(db.replica)}]


@answers(replicas.CALL_SESSION)
def call_session(db: Database, tx: Transaction, name: str) -> str:
    db.session_of(tx).name = name
    return "SELECT 1"


@answers(replicas.REGISTER)
def register(
    db: Database,
    tx: Transaction,
    new: int,
    name: str,
    version: str,
    pids: Sequence[int],
    lease_s: float,
    keys: Sequence[str],
) -> list[Row]:
    row = {"id": new, "name": name, "pids": list(pids), "renewals": 0, "lease_s": lease_s}
    tx.put(db.replica, new, {**row, "expires_at": db.wall() + lease_s})
    return [{"now": db.wall()}]


@answers(replicas.RENEW)
def renew(db: Database, tx: Transaction, me: int) -> Steps:
    row = tx.get(db.replica, me)
    if row is None or row["expires_at"] <= db.wall():
        return []
    yield Wait(db.replica, me, UPDATE)
    row = tx.get(db.replica, me)
    if row is None or row["expires_at"] <= db.wall():
        return []
    expires_at = db.wall() + row["lease_s"]
    tx.change(db.replica, me, renewals=row["renewals"] + 1, expires_at=expires_at)
    return [{"now": db.wall()}]


@answers_prefix("SET LOCAL lock_timeout = ")
def set_lock_timeout(db: Database, tx: Transaction, milliseconds: str) -> str:
    tx.lock_timeout_s = int(milliseconds) / 1000
    return "SET"


@answers(replicas.LOCK_REPLICA)
def lock_replica(
    db: Database, tx: Transaction, replica_id: int, renewals: int | None, called: str | None
) -> Steps:
    def meant() -> bool:
        row = tx.get(db.replica, replica_id)
        return (
            row is not None
            and renewals in (None, row["renewals"])
            and called in (None, row["name"])
        )

    if not meant():
        return []
    yield Wait(db.replica, replica_id, EXCLUSIVE)
    if not meant():
        return []
    if _owned(db, tx, replica_id):
        for watcher in db.on_burial:
            watcher(db.session_of(tx))
    return [{"name": "a replica"}]


@answers(backends.READ_WORKING)
def read_working(db: Database, tx: Transaction, pids: Sequence[int]) -> list[Row]:
    return [{"pid": pid} for pid in pids if pid in db.backends and db.backends[pid].at_work]


@answers(replicas.BACKENDS)
def end_backends(
    db: Database, tx: Transaction, replica_id: int, name: str, renewals: int | None
) -> list[Row]:
    row = tx.get(db.replica, replica_id)
    if row is None or not db.signals or renewals not in (None, row["renewals"]):
        return [{"count": 0}]
    ended = _called(db, row["pids"], name)
    _end(db, ended)
    return [{"count": len(ended)}]


@answers(replicas.END_SESSIONS)
def end_sessions(db: Database, tx: Transaction, pids: Sequence[int], name: str) -> str:
    others = [b for b in _called(db, pids, name) if b is not db.session_of(tx)]
    busy = [b for b in others if b.at_work or b.transaction is not None]
    if db.signals:
        _end(db, busy)
    return f"SELECT {len(busy)}"


def _called(db: Database, pids: Sequence[int], name: str) -> list[Backend]:
    return [b for pid in pids if (b := db.backends.get(pid)) is not None and b.name == name]


def _end(db: Database, backends: Iterable[Backend]) -> None:
    for backend in backends:
        db.world.after(db.pause_s(), None, backend.terminate)


def _free(
    db: Database, tx: Transaction, me: int, owned: Iterable[UUID], actor: str, why: str
) -> Steps:
    freed = 0
    for endpoint_id in owned:
        yield Wait(db.ownership, endpoint_id, UPDATE)
        row = tx.get(db.ownership, endpoint_id)
        if row is None or row["replica_id"] != me:
            continue
        new = tx.change(db.ownership, endpoint_id, replica_id=None, epoch=row["epoch"] + 1)
        told = {"epoch": new["epoch"], "replica": me, "why": why}
        journal(db, tx, "endpoint_freed", actor, endpoint_id, told)
        freed += 1
    return f"INSERT 0 {freed}"


def _owned(db: Database, tx: Transaction, me: int) -> list[UUID]:
    return sorted(r["endpoint_id"] for r in tx.rows(db.ownership) if r["replica_id"] == me)


@answers(replicas.FREE_ALL)
def free_all(db: Database, tx: Transaction, me: int, actor: str, why: str) -> Steps:
    return (yield from _free(db, tx, me, _owned(db, tx, me), actor, why))


@answers(replicas.REMOVE_REPLICA)
def remove_replica(db: Database, tx: Transaction, replica_id: int) -> Steps:
    yield Wait(db.replica, replica_id, EXCLUSIVE)
    tx.put(db.replica, replica_id, None)
    return "DELETE 1"


@answers(replicas.FREE_SOME)
def free_some(
    db: Database, tx: Transaction, me: int, ids: Sequence[UUID], actor: str, why: str
) -> Steps:
    if not (yield from fence(db, tx, me)):
        return "INSERT 0 0"
    wanted = set(ids)
    mine = [each for each in _owned(db, tx, me) if each in wanted]
    return (yield from _free(db, tx, me, mine, actor, why))


@answers(replicas.LOOK)
def look(db: Database, tx: Transaction) -> list[Row]:
    free = []
    for row in tx.rows(db.ownership):
        e = tx.get(db.endpoint, row["endpoint_id"])
        assert e is not None
        if row["replica_id"] is None and e["state"] not in ("removed", "disabled"):
            free.append(row["endpoint_id"])
    all_ = list(tx.rows(db.replica))
    cursor = tx.get(db.cursor, 1)
    assert cursor is not None
    return [
        {
            "version": cursor["version"],
            "erasures": cursor["erasures"],
            "ids": [r["id"] for r in all_] or None,
            "renewals": [r["renewals"] for r in all_] or None,
            "leases_s": [r["lease_s"] for r in all_] or None,
            "cursor_pids": [r["pids"][0] if r["pids"] else None for r in all_] or None,
            "free": free,
        }
    ]


@answers(replicas.CLAIM)
def claim(db: Database, tx: Transaction, me: int, ids: Sequence[UUID], actor: str) -> Steps:
    if not (yield from fence(db, tx, me)):
        return []
    claimed: list[Row] = []
    for endpoint_id in sorted(ids):
        row = tx.get(db.ownership, endpoint_id)
        if row is None or row["replica_id"] is not None:
            continue
        yield Wait(db.ownership, endpoint_id, UPDATE)
        row = tx.get(db.ownership, endpoint_id)
        if row is None or row["replica_id"] is not None:
            continue
        epoch = row["epoch"] + 1
        tx.change(db.ownership, endpoint_id, replica_id=me, epoch=epoch)
        journal(db, tx, "endpoint_claimed", actor, endpoint_id, {"epoch": epoch, "replica": me})
        claimed.append({"endpoint_id": endpoint_id, "epoch": epoch})
    return claimed


@answers(replicas.STAMP)
def stamp(db: Database, tx: Transaction, ids: Sequence[UUID], epochs: Sequence[int]) -> Steps:
    new = dict(zip(ids, epochs, strict=True))
    for endpoint_id, epoch in new.items():
        yield Wait(db.endpoint_health, endpoint_id, UPDATE)
        tx.change(db.endpoint_health, endpoint_id, epoch=epoch)
    for row in list(tx.rows(db.lane_progress)):
        if row["endpoint_id"] in new:
            yield Wait(db.lane_progress, row["lane_id"], UPDATE)
            tx.change(db.lane_progress, row["lane_id"], epoch=new[row["endpoint_id"]])
    return f"UPDATE {len(ids)}"

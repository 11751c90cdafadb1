"""Sessions of replicas, found by their label, and the end of those that hang."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from outbox.store.cluster.sessions import (
    LISTENER_SUFFIX,
    SESSION_END_MAX_S,
    SESSION_NAME,
    StuckSession,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.sim.database.backend import Backend
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database

Expirable: TypeAlias = "tuple[int | None, int | None, str | None]"
"""Id, renewals and label of a replica that is expired."""


def expirable_row(
    db: Database, tx: Transaction, replica_id: int | None, renewals: int | None, label: str | None
) -> Row | None:
    """The row of a replica that may be expired."""
    for row in tx.rows(db.replica):
        if (row["id"] == replica_id or row["label"] == label) and renewals in (
            None,
            row["renewals"],
        ):
            return row
    return None


def terminate_sessions(
    db: Database, tx: Transaction, replica_id: int | None, renewals: int | None, label: str | None
) -> int:
    found = _find_sessions(db, tx, replica_id, renewals, label)
    _terminate(db, found)
    return len(found)


def await_sessions(
    db: Database, tx: Transaction, replica_id: int | None, renewals: int | None, label: str | None
) -> Steps[None]:
    until = db.world.now + SESSION_END_MAX_S
    while db.world.now < until and _find_sessions(db, tx, replica_id, renewals, label):
        yield 0.1


def count_sessions(
    db: Database, tx: Transaction, replica_id: int | None, renewals: int | None, label: str | None
) -> int:
    return len(_find_sessions(db, tx, replica_id, renewals, label))


def terminate_stuck_sessions(
    db: Database, tx: Transaction, lease_s: float, found: Sequence[tuple[int, float]]
) -> list[tuple[StuckSession, float, bool]]:
    """The sessions that hang, since when, and whether they are terminated now."""
    rows = []
    mine, now = db.session_of(tx), db.world.now
    for backend in list(db.backends.values()):
        since = backend.silent_since
        if backend is mine or since is None or not backend.name.startswith(SESSION_NAME):
            continue
        if db.signals and now - since > lease_s:
            again = (backend.pid, since) in found
            state = "active" if backend.half_sent else "idle in transaction"
            stuck = StuckSession(backend.pid, backend.name, state, now - since)
            rows.append((stuck, since, again))
            if again:
                _terminate(db, [backend])
    return rows


def _find_sessions(
    db: Database, tx: Transaction, replica_id: int | None, renewals: int | None, label: str | None
) -> list[Backend]:
    row = expirable_row(db, tx, replica_id, renewals, label)
    if row is None or not db.signals:
        return []
    return find_backends(db, tx, row["label"], row["label"] + LISTENER_SUFFIX)


def terminate_busy_sessions(
    db: Database, tx: Transaction, labels: Sequence[str], wait_s: float
) -> Steps[None]:
    def busy() -> list[Backend]:
        found = find_backends(db, tx, *labels)
        return [b for b in found if b.at_work or b.transaction is not None]

    if db.signals:
        _terminate(db, busy())
        until = db.world.now + wait_s
        while db.world.now < until and busy():
            yield 0.01


def find_backends(db: Database, tx: Transaction, *names: str) -> list[Backend]:
    """The sessions with one of these names, except that of the transaction."""
    mine = db.session_of(tx)
    return [b for b in db.backends.values() if b.name in names and b is not mine]


def _terminate(db: Database, backends: Iterable[Backend]) -> None:
    for backend in backends:
        db.world.after(db.pause_s(), None, backend.terminate)

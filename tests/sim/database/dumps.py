"""Dumps of the simulated database, and restored databases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tests.sim.database.engine import Table

if TYPE_CHECKING:
    from tests.sim.database.engine import Row
    from tests.sim.database.tables import Database

APPENDED = (
    "outbox",
    "outbox_ids",
    "batches",
    "deliveries",
    "attempts",
    "journal",
    "first_id",
    "old_successes",
    "old_given",
)
SEQUENCES = ("last_id", "wakeup", "serials")
READ_LATER_MAX = 3
"""Maximum number of ids that are assigned between the snapshot of a dump and its read of the
sequence, which no snapshot covers."""


class Dump(NamedTuple):
    """Everything that was committed at one moment, the application's tables included."""

    tables: dict[str, dict[Any, Row]]
    rest: dict[str, Any]


def dump(db: Database) -> Dump:
    """Dump the database: open and prepared transactions are not part of it."""
    tables = {name: dict(table.rows) for name, table in _tables(db).items()}
    rest = {name: _copy(getattr(db, name)) for name in (*APPENDED, *SEQUENCES)}
    return Dump(tables, rest)


def restore(db: Database, dumped: Dump, identity: str) -> None:
    """Replace the database, which is down, by a dump.

    Args:
        identity: of the database into which it is restored.
    """
    assert not db.up
    db.forget_prepared()
    for name, table in _tables(db).items():
        table.rows = dict(dumped.tables[name])
    for name, value in dumped.rest.items():
        setattr(db, name, _copy(value))
    db.last_id += db.rng.randrange(READ_LATER_MAX + 1)
    db.wakeup_on_disk = db.wakeup
    db.identity = identity
    db.restores += 1


def _tables(db: Database) -> dict[str, Table]:
    return {name: each for name, each in vars(db).items() if isinstance(each, Table)}


def _copy(value: Any) -> Any:
    """A copy with copies of the collections in it; rows are never changed in place."""
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return value.copy() if isinstance(value, list | set) else value

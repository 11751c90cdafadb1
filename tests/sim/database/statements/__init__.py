"""An answer to each statement of `outbox.store` that a relay or an operator makes.

The text of a statement is its name: a statement that nobody has written an answer
for fails loudly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.store import cursor, replicas
from outbox.store import endpoint_state as care_store
from outbox.store import operational_events as operational_store
from outbox.store import records as record_store
from tests.sim.database.statements import (
    care,
    lanes,
    operational,
    operators,
    ownership,
    records,
    replays,
    retention,
    sequencing,
    ticking,
)
from tests.sim.database.statements.registry import ANSWERS, PREFIXES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database

__all__ = [
    "ANSWERS",
    "answer",
    "care",
    "lanes",
    "operational",
    "operators",
    "ownership",
    "records",
    "replays",
    "retention",
    "sequencing",
    "ticking",
]


# They end with the timeline that their replica registered on.
FENCED = {
    record_store.WRITE_GROUP,
    record_store.WRITE_RECORDS,
    record_store.WRITE_CHECKPOINTS,
    record_store.FINISH,
    care_store.WRITE_HEALTH,
    care_store.LOCK_OWNERSHIP,
    replicas.RENEW,
    replicas.FREE_SOME,
    replicas.CLAIM,
    cursor.WRITE_BATCH,
    operational_store.TELL_LAGGING,
}


def answer(database: Database, sql: str, args: tuple[Any, ...]) -> Callable[[Transaction], Any]:
    """What the server does for a statement; it never says its timeline."""
    if sql in FENCED:
        args, (timeline,) = args[:-1], args[-1:]
        assert timeline is None
    handler = database.changed.get(sql) or ANSWERS.get(sql)
    if handler is not None:
        return lambda tx: handler(database, tx, *args)
    for prefix, handle in PREFIXES:
        if sql.startswith(prefix):
            rest = sql[len(prefix) :]
            return lambda tx: handle(database, tx, rest, *args)
    raise NotImplementedError(f"the simulated server has no answer to: {sql}")

"""An answer to each statement of `outbox.store` that a relay or an operator makes.

The text of a statement is its name: a statement that nobody has written an answer
for fails loudly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.database.statements import care, lanes, operators, ownership, records, sequencing
from tests.sim.database.statements.registry import ANSWERS, PREFIXES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database

__all__ = ["ANSWERS", "answer", "care", "lanes", "operators", "ownership", "records", "sequencing"]


def answer(
    database: Database, sql: str, args: tuple[Any, ...]
) -> Callable[[Transaction], Any]:
    """What the server does for a statement."""
    handler = database.changed.get(sql) or ANSWERS.get(sql)
    if handler is not None:
        return lambda tx: handler(database, tx, *args)
    for prefix, handle in PREFIXES:
        if sql.startswith(prefix):
            rest = sql[len(prefix) :]
            return lambda tx: handle(database, tx, rest, *args)
    raise NotImplementedError(f"the simulated server has no answer to: {sql}")

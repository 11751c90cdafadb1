"""Filters: which payloads meet a condition, evaluated by PostgreSQL itself.

A filter is an endpoint's, so it must not hold up anybody else: each has a time
budget, and what cannot be evaluated counts as met.  Too much is delivered then,
rather than too little, and the journal says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.store.changes import write_journal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncpg import Connection

BUDGET_MS, BUDGET_MS_EACH = 250, 2
"""For one filter in a batch, and on top for each event it is about: a full batch of
large payloads takes long with the best of filters (200 KB each: up to 1.9 ms)."""

# A savepoint, so that a filter that fails does not take the batch with it; going
# back to it also takes back the time-out.
BEGIN = "SAVEPOINT filters"
SET_BUDGET = "SET LOCAL statement_timeout = {}"
BEGIN_AGAIN = "ROLLBACK TO SAVEPOINT filters"
END = "ROLLBACK TO SAVEPOINT filters; RELEASE SAVEPOINT filters"

# `@?` takes a missing member, or one of another type, for a condition not met.
READ_MET = """
WITH condition AS MATERIALIZED (SELECT ('$ ? (' || $2::text || ')')::jsonpath AS path)
SELECT e.id
  FROM condition, unnest($1::bigint[]) AS e(id)
 CROSS JOIN LATERAL (SELECT payload FROM outbox WHERE id = e.id LIMIT 1) o
 WHERE o.payload @? condition.path
"""


class FilterStore:
    """Evaluates filters on the sequencer's connection, in a transaction.

    asyncpg's errors pass through, apart from those of a filter itself.
    """

    def __init__(self, connection: Connection[Any]) -> None:
        self._db = connection

    async def refused(
        self, questions: Mapping[str, Sequence[int]]
    ) -> tuple[dict[str, set[int]], dict[str, str]]:
        """By filter, the events that do not meet it; and which could not say, and why."""
        refused: dict[str, set[int]] = {}
        failed: dict[str, str] = {}
        await self._db.execute(BEGIN)
        for text, event_ids in questions.items():
            budget_ms = BUDGET_MS + BUDGET_MS_EACH * len(event_ids)
            await self._db.execute(SET_BUDGET.format(budget_ms))
            try:
                met = await self._db.fetch(READ_MET, event_ids, text)
            except asyncpg.PostgresError as error:
                # Whatever it is: conditions fail in more ways than there are
                # classes of errors.  Were it the server's trouble and not the
                # filter's, the next statement would meet it, too.
                failed[text] = str(error).partition("\n")[0]
                await self._db.execute(BEGIN_AGAIN)
            else:
                refused[text] = set(event_ids).difference(r["id"] for r in met)
        await self._db.execute(END)
        return refused, failed

    async def tell(self, failed: Mapping[str, str], batch: int, actor: str) -> None:
        """Keep which filters count as met from this batch on."""
        for text, why in failed.items():
            data = {"filter": text, "why": why, "from_batch": batch}
            await write_journal(self._db, "filter_given_up", actor, None, data)

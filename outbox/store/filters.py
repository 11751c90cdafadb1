"""Filters: which payloads meet a condition, evaluated by PostgreSQL itself.

A filter is an endpoint's, so it must not hold up anybody else.  What cannot be
evaluated counts as met: too much is delivered then, rather than too little, and
the journal says so (see `outbox.relay.sequencing.filter_evaluator`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.delivery.operational_events import FILTER_GIVEN_UP
from outbox.store.operational_events import WANTED
from outbox.store.routing_change import write_journal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncpg import Connection

    from outbox.core.sequencing.router import Asked

# A savepoint, so that a filter that fails does not take the batch with it; going
# back to it also takes back the time-out.
BEGIN = "SAVEPOINT filters"
SET_LIMIT = "SET LOCAL statement_timeout = {}"
BEGIN_AGAIN = "ROLLBACK TO SAVEPOINT filters"
END = "ROLLBACK TO SAVEPOINT filters; RELEASE SAVEPOINT filters"

# Each filter with its events, as an array's text.  `@?` takes a missing member, or one
# of another type, for a condition not met.
READ_MET = """
WITH asked AS MATERIALIZED (
    SELECT a.n, ('$ ? (' || a.filter || ')')::jsonpath AS path, a.ids::bigint[] AS ids
      FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS a(filter, ids, n))
SELECT asked.n, e.id
  FROM asked CROSS JOIN LATERAL unnest(asked.ids) AS e(id)
 CROSS JOIN LATERAL (SELECT payload FROM outbox WHERE id = e.id LIMIT 1) o
 WHERE o.payload @? asked.path
"""

ALWAYS_MET = "1 == 1"
"""What it costs to look at the payloads, and no more."""

# By the leader, while it holds the cursor row.  Kept with the subscription, which a
# change of the filter replaces; whoever leads next does not try it again at once.
STOP_FILTERS = """
UPDATE subscription SET filter_stopped_at = clock_timestamp(), filter_stopped_why = f.why
  FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS f(tenant, filter, why, reason)
 WHERE to_batch IS NULL AND subscription.filter = f.filter
   AND subscription.tenant IS NOT DISTINCT FROM f.tenant
   AND (filter_stopped_at IS NULL
        OR filter_stopped_at < clock_timestamp() - make_interval(secs => $5))
RETURNING endpoint_id, f.filter, f.why, f.reason
"""

TELL_GIVEN_UP = f"""
SELECT announce_all(array_agg('{FILTER_GIVEN_UP}'::text), array_agg(t.about),
                    array_agg(jsonb_build_object('filter', t.filter, 'reason', t.reason)))
  FROM unnest($1::uuid[], $2::text[], $3::text[]) AS t(about, filter, reason)
HAVING count(*) > 0 AND {WANTED}
"""  # noqa: S608 (constants only)


class Reason(StrEnum):
    """Why a filter is stopped."""

    SLOW = "slow"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Stopped:
    """A filter that counts as met from now on."""

    reason: Reason
    why: str
    """In one line."""


@dataclass(frozen=True, slots=True)
class NotSaid:
    """A statement about filters came to no end, or to a bad one."""

    why: str
    cut_off: bool
    """It took too long."""


class FilterStore:
    """Evaluates filters on the sequencer's connection, in a transaction.

    asyncpg's errors pass through, apart from those of a filter itself.
    """

    def __init__(self, connection: Connection[Any]) -> None:
        self._db = connection
        self._limit_ms = 0

    async def begin(self) -> None:
        """Before the first question in a transaction."""
        await self._db.execute(BEGIN)
        self._limit_ms = 0

    async def ask(
        self, questions: Sequence[tuple[str, Sequence[int]]], limit_s: float
    ) -> list[set[int]] | NotSaid:
        """For each filter, the events that meet it.

        Args:
            limit_s: all of it is cut off after so long.
        """
        limit_ms = max(math.ceil(limit_s * 1000), 1)
        if limit_ms != self._limit_ms:
            await self._db.execute(SET_LIMIT.format(limit_ms))
            self._limit_ms = limit_ms
        try:
            rows = await self._db.fetch(
                READ_MET,
                [text for text, _ in questions],
                ["{" + ",".join(map(str, ids)) + "}" for _, ids in questions],
            )
        except asyncpg.PostgresError as error:
            # Whatever it is: conditions fail in more ways than there are
            # classes of errors.  Were it the server's trouble and not the
            # filter's, the next statement would meet it, too.
            await self._db.execute(BEGIN_AGAIN)
            self._limit_ms = 0
            cut_off = isinstance(error, asyncpg.QueryCanceledError)
            return NotSaid(str(error).partition("\n")[0], cut_off)
        met: list[set[int]] = [set() for _ in questions]
        for row in rows:
            met[row["n"] - 1].add(row["id"])
        return met

    async def end(self) -> None:
        """After the last question."""
        await self._db.execute(END)

    async def stop(
        self, stopped: Mapping[Asked, Stopped], batch: int, actor: str, again_after_s: float
    ) -> None:
        """Keep which filters count as met from this batch on, and tell of it.

        Args:
            again_after_s: those that were stopped longer ago are told anew.
        """
        rows = await self._db.fetch(
            STOP_FILTERS,
            [tenant for tenant, _ in stopped],
            [text for _, text in stopped],
            [each.why for each in stopped.values()],
            [each.reason.value for each in stopped.values()],
            again_after_s,
        )
        for row in rows:
            data = {"filter": row["filter"], "why": row["why"], "from_batch": batch}
            await write_journal(self._db, "filter_given_up", actor, row["endpoint_id"], data)
        # The events' readers need not see the words of the database, which may quote a payload.
        await self._db.execute(
            TELL_GIVEN_UP,
            [row["endpoint_id"] for row in rows],
            [row["filter"] for row in rows],
            [row["reason"] for row in rows],
        )

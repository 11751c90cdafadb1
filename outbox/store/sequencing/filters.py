"""Payload filters, evaluated by PostgreSQL.

A filter belongs to one endpoint and must not delay the others.  A filter that cannot be
evaluated matches every event: over-delivery is preferred to loss.  The journal records it
(see `outbox.relay.sequencing.filter_evaluator`).
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.delivery.operational_events import FILTER_STOPPED
from outbox.core.sequencing.filter_budget import AGAIN_AFTER_S, FilterFailure, FilterStopReason
from outbox.store.operational_events import HAS_OPERATIONAL_SUBSCRIBER
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from asyncpg import Connection

    from outbox.core.sequencing.router import TenantFilter
    from outbox.store.sql.message import WriteCall

# A savepoint, so that a failing filter does not abort the transaction; rolling back to it also
# restores statement_timeout.
CREATE_SAVEPOINT = "SAVEPOINT filters"
SET_STATEMENT_TIMEOUT = "SET LOCAL statement_timeout = {}"
ROLLBACK_SAVEPOINT = "ROLLBACK TO SAVEPOINT filters"

# The events that match each filter; the ids of each filter come as an array literal.  `@?`
# treats a missing member, or one of another type, as no match.
#   requested: MATERIALIZED, so that each filter is parsed once.
#   is_there: an event that this read does not return counts as a match.  It was read before, so it
#     is gone or hidden, which is decided when it is to be sent.
READ_MATCHES = """
WITH requested AS MATERIALIZED (
    SELECT a.n, ('$ ? (' || a.filter || ')')::jsonpath AS path, a.ids::bigint[] AS ids
      FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS a(filter, ids, n))
SELECT requested.n, e.id
  FROM requested CROSS JOIN LATERAL unnest(requested.ids) AS e(id)
  LEFT JOIN LATERAL (
       SELECT true AS is_there, payload FROM outbox WHERE id = e.id LIMIT 1) o ON true
 WHERE o.is_there IS NULL OR o.payload @? requested.path
"""

MATCH_ALL = "1 == 1"
"""A filter that matches every event: it measures the cost of reading the payloads."""

# Stops filters from batch $7 on, in the message that writes the batch.  Stored with the
# subscription, which a change of the filter replaces; so the next leader does not evaluate it
# again at once.
#   stopped: filters that were stopped more than $5 seconds ago are reported again.
#   fed: a feed applies the same filter, before its endpoint subscribes.
#   journalled: journal entries of actor $6.
#   The final SELECT publishes outbox.filter.stopped for each endpoint, if one subscribes to
#     operational events.  These do not contain the database's message, which may quote a payload.
STOP_FILTERS = WriteStatement(
    "stop_filters",
    f"""
WITH stopped AS (
    UPDATE subscription SET filter_stopped_at = clock_timestamp(), filter_stopped_reason = f.detail
      FROM unnest($1::text[], $2::text[], $3::text[], $4::text[])
           AS f(tenant, filter, detail, reason)
     WHERE to_batch IS NULL AND subscription.filter = f.filter
       AND subscription.tenant IS NOT DISTINCT FROM f.tenant
       AND (filter_stopped_at IS NULL
            OR filter_stopped_at NOT BETWEEN clock_timestamp() - make_interval(secs => $5)
                                         AND clock_timestamp())
    RETURNING endpoint_id, f.filter, f.detail, f.reason),
fed AS (
    UPDATE feed SET filter_stopped_at = clock_timestamp(), filter_stopped_reason = f.detail
      FROM unnest($1::text[], $2::text[], $3::text[], $4::text[])
           AS f(tenant, filter, detail, reason)
     WHERE ended_at IS NULL AND feed.filter = f.filter
       AND feed.tenant IS NOT DISTINCT FROM f.tenant
       AND (filter_stopped_at IS NULL
            OR filter_stopped_at NOT BETWEEN clock_timestamp() - make_interval(secs => $5)
                                         AND clock_timestamp())
    RETURNING endpoint_id, f.filter, f.detail, f.reason),
every AS (
    SELECT * FROM stopped UNION SELECT * FROM fed),
journalled AS (
    INSERT INTO journal (kind, actor, endpoint_id, data)
    SELECT 'filter_stopped', $6, endpoint_id,
           jsonb_build_object('filter', filter, 'detail', detail, 'from_batch', $7::bigint)
      FROM every)
SELECT publish_operational_events(
           array_agg('{FILTER_STOPPED}'::text), array_agg(endpoint_id),
           array_agg(jsonb_build_object('filter', filter, 'reason', reason)))
  FROM every HAVING count(*) > 0 AND {HAS_OPERATIONAL_SUBSCRIBER}
""",  # noqa: S608 (constants only)
)


class FilterStore:
    """Evaluates filters on the sequencer's connection.

    asyncpg's errors propagate, apart from those of a filter itself.
    """

    def __init__(self, connection: Connection[Any]) -> None:
        self._db = connection
        self._limit_ms = 0

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """A transaction for evaluations; as it is read-only, it never holds anything."""
        async with self._db.transaction(isolation="read_committed", readonly=True):
            await self._db.execute(CREATE_SAVEPOINT)
            self._limit_ms = 0
            yield

    async def evaluate(
        self, requests: Sequence[tuple[str, Sequence[int]]], limit_s: float
    ) -> list[set[int]] | FilterFailure:
        """Evaluate filters, in a `transaction`; returns the matching events of each.

        Args:
            requests: filters, each with the ids of its events.
            limit_s: statement time-out in seconds, for all of them.
        """
        limit_ms = max(math.ceil(limit_s * 1000), 1)
        if limit_ms != self._limit_ms:
            await self._db.execute(SET_STATEMENT_TIMEOUT.format(limit_ms))
            self._limit_ms = limit_ms
        try:
            rows = await self._db.fetch(
                READ_MATCHES,
                [text for text, _ in requests],
                ["{" + ",".join(map(str, ids)) + "}" for _, ids in requests],
            )
        except asyncpg.PostgresError as error:
            # Every error: jsonpath fails with more error classes than could be listed.  If the
            # server were the cause, and not the filter, the next statement would fail, too.
            await self._db.execute(ROLLBACK_SAVEPOINT)
            self._limit_ms = 0
            if isinstance(error, asyncpg.QueryCanceledError):
                return FilterFailure(FilterStopReason.SLOW, "it took too long")
            return FilterFailure(FilterStopReason.FAILS, str(error).partition("\n")[0])
        matches: list[set[int]] = [set() for _ in requests]
        for row in rows:
            matches[row["n"] - 1].add(row["id"])
        return matches


def stop_filters(
    batch: int, stopped: Mapping[TenantFilter, FilterFailure], actor: str
) -> WriteCall:
    """The statement that stores which filters are stopped from a batch on, and reports it."""
    return (
        STOP_FILTERS,
        [tenant for tenant, _ in stopped],
        [text for _, text in stopped],
        [each.detail for each in stopped.values()],
        [each.reason.value for each in stopped.values()],
        AGAIN_AFTER_S,
        actor,
        batch,
    )

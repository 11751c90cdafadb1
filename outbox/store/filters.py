"""Payload filters, evaluated by PostgreSQL.

A filter belongs to one endpoint and must not delay the others.  A filter that cannot be
evaluated matches every event: over-delivery is preferred to loss.  The journal records it
(see `outbox.relay.sequencing.filter_evaluator`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.delivery.operational_events import FILTER_STOPPED
from outbox.store.operational_events import HAS_OPERATIONAL_SUBSCRIBER
from outbox.store.routing_change import write_journal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncpg import Connection

    from outbox.core.sequencing.router import TenantFilter

# A savepoint, so that a failing filter does not abort the batch's transaction; rolling back to it
# also restores statement_timeout.
CREATE_SAVEPOINT = "SAVEPOINT filters"
SET_STATEMENT_TIMEOUT = "SET LOCAL statement_timeout = {}"
ROLLBACK_SAVEPOINT = "ROLLBACK TO SAVEPOINT filters"
RELEASE_SAVEPOINT = "ROLLBACK TO SAVEPOINT filters; RELEASE SAVEPOINT filters"

# The events that match each filter; the ids of each filter come as an array literal.  `@?`
# treats a missing member, or one of another type, as no match.
#   requested: MATERIALIZED, so that each filter is parsed once.
READ_MATCHES = """
WITH requested AS MATERIALIZED (
    SELECT a.n, ('$ ? (' || a.filter || ')')::jsonpath AS path, a.ids::bigint[] AS ids
      FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS a(filter, ids, n))
SELECT requested.n, e.id
  FROM requested CROSS JOIN LATERAL unnest(requested.ids) AS e(id)
 CROSS JOIN LATERAL (SELECT payload FROM outbox WHERE id = e.id LIMIT 1) o
 WHERE o.payload @? requested.path
"""

MATCH_ALL = "1 == 1"
"""A filter that matches every event: it measures the cost of reading the payloads."""

# Stops filters; the leader does so while it holds the cursor row.  Stored with the subscription,
# which a change of the filter replaces; so the next leader does not evaluate it again at once.
STOP_FILTERS = """
UPDATE subscription SET filter_stopped_at = clock_timestamp(), filter_stopped_reason = f.why
  FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS f(tenant, filter, why, reason)
 WHERE to_batch IS NULL AND subscription.filter = f.filter
   AND subscription.tenant IS NOT DISTINCT FROM f.tenant
   AND (filter_stopped_at IS NULL
        OR filter_stopped_at < clock_timestamp() - make_interval(secs => $5))
RETURNING endpoint_id, f.filter, f.why, f.reason
"""

# Publishes outbox.filter.stopped for each endpoint, if one subscribes to operational events.
PUBLISH_FILTER_STOPPED = f"""
SELECT publish_operational_events(array_agg('{FILTER_STOPPED}'::text), array_agg(t.endpoint_id),
                    array_agg(jsonb_build_object('filter', t.filter, 'reason', t.reason)))
  FROM unnest($1::uuid[], $2::text[], $3::text[]) AS t(endpoint_id, filter, reason)
HAVING count(*) > 0 AND {HAS_OPERATIONAL_SUBSCRIBER}
"""  # noqa: S608 (constants only)


class FilterStopReason(StrEnum):
    """Reason for stopping a filter."""

    SLOW = "slow"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class StoppedFilter:
    """A filter that matches every event from now on."""

    reason: FilterStopReason
    why: str
    """One line."""


@dataclass(frozen=True, slots=True)
class FilterFailure:
    """The evaluation of filters failed or timed out."""

    why: str
    timed_out: bool
    """statement_timeout expired."""


class FilterStore:
    """Evaluates filters on the sequencer's connection, in a transaction.

    asyncpg's errors propagate, apart from those of a filter itself.
    """

    def __init__(self, connection: Connection[Any]) -> None:
        self._db = connection
        self._limit_ms = 0

    async def begin(self) -> None:
        """Create the savepoint; call it before the first evaluation in a transaction."""
        await self._db.execute(CREATE_SAVEPOINT)
        self._limit_ms = 0

    async def evaluate(
        self, requests: Sequence[tuple[str, Sequence[int]]], limit_s: float
    ) -> list[set[int]] | FilterFailure:
        """Evaluate filters; returns the matching events of each.

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
            timed_out = isinstance(error, asyncpg.QueryCanceledError)
            return FilterFailure(str(error).partition("\n")[0], timed_out)
        matches: list[set[int]] = [set() for _ in requests]
        for row in rows:
            matches[row["n"] - 1].add(row["id"])
        return matches

    async def end(self) -> None:
        """Release the savepoint; call it after the last evaluation."""
        await self._db.execute(RELEASE_SAVEPOINT)

    async def stop(
        self,
        stopped: Mapping[TenantFilter, StoppedFilter],
        batch: int,
        actor: str,
        again_after_s: float,
    ) -> None:
        """Store which filters are stopped from this batch on, and report it.

        Args:
            again_after_s: filters stopped longer ago are reported again.
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
            await write_journal(self._db, "filter_stopped", actor, row["endpoint_id"], data)
        # Operational events do not contain the database's message, which may quote a payload.
        await self._db.execute(
            PUBLISH_FILTER_STOPPED,
            [row["endpoint_id"] for row in rows],
            [row["filter"] for row in rows],
            [row["reason"] for row in rows],
        )

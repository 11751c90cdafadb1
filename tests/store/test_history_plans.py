"""Queries of the delivery history read the rows of the endpoints that they name, by index.

The table has a day of a thousand endpoints, in the order in which relays write it: by interval.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.delivery.delivery_history import ALL_ENDPOINTS, INTERVALS, DeliveryHistory
from outbox.operations.endpoints.history import (
    HISTORY_OF_EACH,
    HISTORY_TOGETHER,
    HOUR_S,
    KEPT_HOURS,
)
from outbox.relay.cluster.connections import SESSION_SETTINGS
from outbox.store.delivery.records import RecordStore
from outbox.store.retention.periods import DELETE_HISTORY
from tests.integration.test_relay_faults import SESSION, Replica
from tests.support.plans import explain
from tests.support.relay import add_endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from tests.support.postgres import Database

pytestmark = [pytest.mark.full, pytest.mark.one_major]

ENDPOINTS = 1_000
FILL = """
INSERT INTO delivery_history (endpoint_id, slot, began_at, successes, failures, latencies)
SELECT e.id, i % 288, to_timestamp(i * 300), 1000, 3, array_fill(77, ARRAY[13])
  FROM (SELECT floor(extract(epoch FROM now()) / 300)::bigint AS last) now,
       generate_series(last - 287, last) i,
       unnest($1::uuid[]) e(id)
 ORDER BY i
"""
ENDPOINT_IDS = "SELECT gen_random_uuid() AS id FROM generate_series(1, $1)"
PLANS = [(analyzed, generic) for analyzed in (False, True) for generic in (False, True)]


async def fill(database: Database, *ids: UUID) -> list[UUID]:
    """Write a day of these endpoints, of the sum and of others; returns the others."""
    async with database.connection(**SESSION) as connection:
        # The test decides when there are statistics.
        await connection.execute("ALTER TABLE delivery_history SET (autovacuum_enabled = off)")
        others = [row["id"] for row in await connection.fetch(ENDPOINT_IDS, ENDPOINTS)]
        await connection.execute(FILL, [ALL_ENDPOINTS, *ids, *others])
    return others


async def test_queries_read_the_endpoints_that_they_name(
    database: Database, subtests: pytest.Subtests
) -> None:
    removed = await add_endpoint(database)
    ids = await fill(database, removed.id)
    cases: list[tuple[str, str, Sequence[Any], int]] = [
        ("of one", HISTORY_TOGETHER, (ids[:1], HOUR_S, KEPT_HOURS), 1),
        ("of all", HISTORY_TOGETHER, ([ALL_ENDPOINTS], HOUR_S, KEPT_HOURS), 1),
        ("of a page", HISTORY_OF_EACH, (ids[:50], HOUR_S, KEPT_HOURS), 50),
        ("of none to delete", DELETE_HISTORY.sql, (), 0),
    ]
    settings = {"search_path": "relay", **SESSION_SETTINGS}
    async with database.connection(server_settings=settings) as connection:
        for analyzed, generic in PLANS:
            if analyzed and not generic:
                await connection.execute("ANALYZE delivery_history, endpoint")
            for name, sql, arguments, endpoints in cases:
                with subtests.test(f"{name}, analyzed={analyzed}, generic={generic}"):
                    plan = await explain(connection, sql, *arguments, generic=generic)
                    # Rows are counted by each scan: the index, the table, the unnested ids.
                    assert plan.rows <= endpoints * (2 * INTERVALS + 2) + 10, str(plan)
                    # At most one page of the table for each row, and a few of the index.
                    assert plan.pages <= endpoints * (INTERVALS + 20) + 40, str(plan)


async def test_counts_are_updated_in_place(database: Database) -> None:
    """By HOT updates: they touch no index, and their dead rows need no vacuum."""
    endpoint = await add_endpoint(database)
    ids = await fill(database, endpoint.id)
    replica = await Replica(database).start(endpoint.id)
    store = RecordStore(replica.connection, replica.id)
    history = DeliveryHistory()
    for _ in range(10):
        for endpoint_id in ids:
            history.add_successes(endpoint_id, [0.02])
        await store.checkpoint([], history.remove(len(ids)))
    await replica.connection.execute("SELECT pg_stat_force_next_flush()")
    row = await replica.connection.fetchrow(
        "SELECT n_tup_upd AS updates, n_tup_hot_upd AS hot FROM pg_stat_user_tables"
        " WHERE relname = 'delivery_history'"
    )
    # Also if the interval of the fill has ended: the first of them replace rows of the day before.
    assert row["updates"] == row["hot"] == 10 * (len(ids) + 1)

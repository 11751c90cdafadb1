"""Conditions on payloads: PostgreSQL decides, and none of them holds up the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from outbox.store import endpoint_changes
from outbox.store.filters import FilterStore
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = pytest.mark.costly

PAYLOADS = [
    {"total": 50},
    {"total": 150},
    {"total": "a lot"},
    {},
    [{"total": 200}],
    {"total": 101, "lines": [{"sku": "a"}]},
]


def got(network: Network, name: str) -> list[object]:
    """What an endpoint accepted, in order."""
    return [s.body["data"] for s in network.accepted if s.url.endswith(f"/{name}")]


async def test_an_endpoint_gets_what_meets_its_filter(database: Database) -> None:
    await add_endpoint(database, "large", filter="@.total > 100")
    await add_endpoint(database, "also", filter="@.total > 100", lanes=3)
    await add_endpoint(database, "sku", filter='@.lines[*].sku == "a"', types=("a.*",))
    await add_endpoint(database, "all")
    network = Network()
    async with running(database, network):
        await publish(database, *PAYLOADS)
        await publish(database, {"lines": [{"sku": "a"}]}, type="b")
        await all_ended(database)
    # lax: an array stands for its members.
    assert got(network, "large") == [PAYLOADS[1], PAYLOADS[4], PAYLOADS[5]]
    assert sorted(map(str, got(network, "also"))) == sorted(map(str, got(network, "large")))
    assert got(network, "sku") == [PAYLOADS[5]]
    assert len(got(network, "all")) == 7
    assert await exceptions(database) == {}


@pytest.mark.parametrize(
    "condition",
    [
        pytest.param("@.total >", id="no jsonpath any more"),
        pytest.param('@.x like_regex "[" ', id="no regular expression"),
        pytest.param(
            '"2026-01-01".datetime() < "2026-01-01 00:00:00 +00:00".datetime()', id="fails"
        ),
    ],
)
async def test_a_filter_that_cannot_be_evaluated_stops_nobody(
    database: Database, condition: str
) -> None:
    await add_endpoint(database, "broken", filter="@.total > 100")
    await add_endpoint(database, "fine", filter="@.total > 100")
    await fetchval(
        database,
        "UPDATE subscription SET filter = $1 "
        "WHERE endpoint_id = (SELECT id FROM endpoint WHERE name = 'broken')",
        condition,
    )
    network = Network()
    async with running(database, network):
        await publish(database, *PAYLOADS[:2])
        await publish(database, *PAYLOADS[:2])
        await all_ended(database)
    assert got(network, "fine") == [PAYLOADS[1]] * 2
    # Rather too much than too little; and not a word in verify, since the journal has one.
    assert got(network, "broken") == PAYLOADS[:2] * 2
    assert await exceptions(database) == {}


async def test_a_filter_that_takes_too_long_counts_as_met_and_the_journal_says_so(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "outbox.store.filters.READ_MET",
        """
        SELECT id FROM (
            SELECT 1 AS id, $1::bigint[] AS ids,
                   pg_sleep(CASE WHEN $2::text LIKE '%slow%' THEN 60 ELSE 0 END)::text AS slept
            OFFSET 0) AS event
         WHERE slept = 'never'
        """,
    )
    await add_endpoint(database, "slow", filter='@.name == "slow"')
    await add_endpoint(database, "none", filter="@.total > 100")
    network = Network()
    async with running(database, network):
        await publish(database, 1)
        await publish(database, 2)
        await all_ended(database)
    assert got(network, "slow") == [1, 2]
    assert got(network, "none") == []
    told = "SELECT count(*) FROM journal WHERE kind = 'filter_given_up'"
    assert await fetchval(database, told) == 1
    assert await exceptions(database) == {}


async def test_a_filter_that_is_changed_holds_from_the_next_batch(database: Database) -> None:
    await add_endpoint(database, "shop", filter="@ > 10")
    network = Network()
    async with running(database, network):
        await publish(database, 5, 15)
        await all_ended(database)
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            await endpoint_changes.update(
                connection, "relay", "shop", lambda old: replace(old, filter="@ < 10"), actor="t"
            )
        await publish(database, 6, 16)
        await all_ended(database)
    assert got(network, "shop") == [15, 6]
    assert await exceptions(database) == {}


async def test_a_time_budget_is_the_filters_alone_and_grows_with_what_it_is_asked(
    database: Database,
) -> None:
    await publish(database, *range(3))
    asked: list[str] = []
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        connection.add_query_logger(lambda query: asked.append(query.query))
        ids = [1, 2, 3]
        async with connection.transaction():
            refused, failed = await FilterStore(connection).refused(
                {"@ > 1": ids, "@ >": [1], "@ < 1": ids}
            )
            assert await connection.fetchval("SHOW statement_timeout") == "0"
    assert (refused, [*failed]) == ({"@ > 1": {1, 2}, "@ < 1": {2, 3}}, ["@ >"])
    budgets = [int(sql.split()[-1]) for sql in asked if sql.startswith("SET LOCAL")]
    assert budgets[0] == budgets[2] > budgets[1] > 0

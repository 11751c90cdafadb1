"""Payload filters: PostgreSQL evaluates them, and a slow filter does not delay the others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from outbox.core.sequencing.filter_budget import FilterFailure, FilterStopReason
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.store.sequencing.filters import READ_MATCHES, FilterStore
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = pytest.mark.costly

LARGE = {"total": 150, "n": [0] * 80_000}
SLOW = " || ".join(f"@.n[*] == -{n}" for n in range(1, 60))
LESS = " || ".join(f"@.n[*] == -{n}" for n in range(1, 16))
"""A little less than the cost that disables a single filter."""
PAYLOADS = [
    {"total": 50},
    {"total": 150},
    {"total": "a lot"},
    {},
    [{"total": 200}],
    {"total": 101, "lines": [{"sku": "a"}]},
]


def got(network: Network, name: str) -> list[object]:
    """The events that an endpoint accepted, in order."""
    return [s.body["data"] for s in network.accepted if s.url.endswith(f"/{name}")]


async def test_an_endpoint_gets_events_that_match_its_filter(database: Database) -> None:
    await add_endpoint(database, "large", filter="@.total > 100")
    await add_endpoint(database, "also", filter="@.total > 100", lanes=3)
    await add_endpoint(database, "sku", filter='@.lines[*].sku == "a"', types=("a.*",))
    await add_endpoint(database, "all")
    network = Network()
    async with running(database, network):
        await publish(database, *PAYLOADS)
        await publish(database, {"lines": [{"sku": "a"}]}, type="b")
        await all_ended(database)
    # lax mode: an array is unwrapped to its members.
    assert got(network, "large") == [PAYLOADS[1], PAYLOADS[4], PAYLOADS[5]]
    assert sorted(map(str, got(network, "also"))) == sorted(map(str, got(network, "large")))
    assert got(network, "sku") == [PAYLOADS[5]]
    assert len(got(network, "all")) == 7
    assert await exceptions(database) == {}


@pytest.mark.parametrize(
    "condition",
    sampled(
        [
            pytest.param("@.total >", id="no jsonpath any more"),
            pytest.param('@.x like_regex "[" ', id="no regular expression"),
            pytest.param(
                '"2026-01-01".datetime() < "2026-01-01 00:00:00 +00:00".datetime()', id="fails"
            ),
        ]
    ),
)
async def test_a_filter_that_fails_does_not_block_deliveries(
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
    # A failed filter matches (deliver too much rather than too little); verify is silent, because
    # the journal has an entry.
    assert got(network, "broken") == PAYLOADS[:2] * 2
    assert await exceptions(database) == {}


@pytest.mark.full
@pytest.mark.slow
async def test_a_filter_that_times_out_matches_and_is_reported(
    database: Database,
) -> None:
    await add_endpoint(database, "slow", filter=SLOW)
    await add_endpoint(database, "again", filter=SLOW)
    await add_endpoint(database, "good", filter="@.total > 100")
    await add_endpoint(database, "watcher", types=["outbox.filter.stopped"])
    network = Network()
    async with running(database, network):
        await publish(database, LARGE, {"total": 150}, {"total": 50})
        await all_ended(database)
    assert got(network, "slow") == [LARGE, {"total": 150}, {"total": 50}]
    assert got(network, "good") == [LARGE, {"total": 150}]
    async with database.at_hand() as connection:
        rows = await connection.fetch(
            """SELECT e.name, j.data ->> 'filter' AS filter, j.data ->> 'detail' AS detail
                 FROM journal j LEFT JOIN endpoint e ON e.id = j.endpoint_id
                WHERE j.kind = 'filter_stopped' ORDER BY e.name"""
        )
    assert [(r["name"], r["filter"]) for r in rows] == [("again", SLOW), ("slow", SLOW)]
    assert all("too long" in r["detail"] for r in rows)
    reports = [data for data in got(network, "watcher") if isinstance(data, dict)]
    assert sorted(data["endpoint"]["name"] for data in reports) == ["again", "slow"]
    assert {(data["filter"], data["reason"]) for data in reports} == {(SLOW, "slow")}
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_the_next_leader_skips_a_disabled_filter_until_it_changes(
    database: Database,
) -> None:
    await add_endpoint(database, "slow", filter=SLOW)
    network = Network()
    for _ in range(2):
        async with running(database, network):
            await publish(database, LARGE)
            await all_ended(database)
    journalled = "SELECT count(*) FROM journal WHERE kind = 'filter_stopped'"
    assert await fetchval(database, journalled) == 1
    async with running(database, network):
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            await endpoint_changes.update_endpoint(
                connection, "relay", "slow", lambda old: replace(old, filter="@.no == 1"), actor="t"
            )
        await publish(database, LARGE)
        await all_ended(database)
    assert len(got(network, "slow")) == 2
    stopped = "SELECT count(*) FROM subscription WHERE to_batch IS NULL AND filter_stopped_at > $1"
    assert await fetchval(database, stopped, datetime(2000, 1, 1, tzinfo=UTC)) == 0


async def test_a_slow_filter_is_disabled_for_its_tenant_only(
    database: Database,
) -> None:
    for tenant in ("a", "b"):
        await add_endpoint(database, tenant, filter=SLOW, tenant=tenant)
    network = Network()
    async with running(database, network):
        await publish(database, LARGE, tenant="a")
        await publish(database, {"n": [1]}, {"n": [2]}, tenant="b")
        await all_ended(database)
    assert got(network, "a") == [LARGE]
    assert got(network, "b") == []


@pytest.mark.full
async def test_a_slow_database_disables_no_filter(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "outbox.store.sequencing.filters.READ_MATCHES",
        READ_MATCHES.replace("SELECT requested.n", "SELECT pg_sleep(0.6) IS NULL, requested.n"),
    )
    await add_endpoint(database, "good", filter="@ > 10")
    network = Network()
    async with running(database, network):
        await publish(database, 15)
        await publish(database, 16)
        await all_ended(database)
    assert await fetchval(database, "SELECT count(*) FROM journal WHERE kind LIKE 'filter%'") == 0
    assert got(network, "good") == [15, 16]


@pytest.mark.full
async def test_many_filters_near_the_limit_do_not_delay_others(
    database: Database,
) -> None:
    """A single one of these filters would stay enabled; some have a tenant, others have none."""
    for n in range(30):
        tenant = "t" if n % 2 else None
        await add_endpoint(database, f"a{n}", filter=f"{LESS} || @.no == {n}", tenant=tenant)
    await add_endpoint(database, "good", filter="@.total > 100", types=["good"])
    network = Network()
    clock = asyncio.get_running_loop().time
    began_at = clock()
    async with running(database, network):
        # Each batch of these would take three seconds.
        for n in range(60):
            await publish(database, {"n": [0] * 8_000}, tenant="t" if n % 2 else None)
        await publish(database, {"total": 150}, type="good")
        await until(lambda: got(network, "good"), what="the good one")
        took_s = clock() - began_at
        began_at = clock()
        await publish(database, {"total": 160}, type="good")
        await until(lambda: len(got(network, "good")) == 2, what="the good one")
        after_s = clock() - began_at
        await all_ended(database)
    stopped = await fetchval(
        database, "SELECT count(*) FROM subscription WHERE filter_stopped_at IS NOT NULL"
    )
    print(took_s, after_s, stopped)
    assert stopped > 10
    assert not await fetchval(
        database,
        """SELECT count(*) FROM subscription s JOIN endpoint e ON e.id = s.endpoint_id
            WHERE e.name = 'good' AND s.filter_stopped_at IS NOT NULL""",
    )
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_changed_filter_applies_from_the_next_batch(database: Database) -> None:
    await add_endpoint(database, "shop", filter="@ > 10")
    network = Network()
    async with running(database, network):
        await publish(database, 5, 15)
        await all_ended(database)
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            await endpoint_changes.update_endpoint(
                connection, "relay", "shop", lambda old: replace(old, filter="@ < 10"), actor="t"
            )
        await publish(database, 6, 16)
        await all_ended(database)
    assert got(network, "shop") == [15, 6]
    assert await exceptions(database) == {}


async def test_a_filter_timeout_keeps_the_transaction(
    database: Database,
) -> None:
    await publish(database, *range(3))
    ids = [1, 2, 3]
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        filters = FilterStore(connection)
        async with filters.transaction():
            assert await filters.evaluate([("@ > 0", ids), ("@ < 1", ids)], 1.0) == [{2, 3}, {1}]
            failed = await filters.evaluate([("@ > 0", ids), ("@ >", [1])], 1.0)
            assert isinstance(failed, FilterFailure)
            assert failed.reason is FilterStopReason.FAILS
            assert await filters.evaluate([("@ > 1", ids)], 1.0) == [{3}]
            assert await connection.fetchval("SHOW statement_timeout") == "1s"
            # So it never has a transaction id.
            assert await connection.fetchval("SHOW transaction_read_only") == "on"
        assert await connection.fetchval("SHOW statement_timeout") == "0"

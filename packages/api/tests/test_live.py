"""/v1/live: the leader's samples, what a tenant sees, and how often the database is queried."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from outbox_api import live_status
from outbox_api.live_cache import (
    FRESH_S,
    LIVE_ENDPOINTS,
    LIVE_ENDPOINTS_MAX,
    STALE_S,
    LiveStatusCache,
)
from tests.support.api import make_token
from tests.support.relay import (
    BUSY,
    OK,
    Network,
    add_endpoint,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from outbox.core.model.response import AttemptResult
    from tests.support.api import Api
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major

SAMPLES = """
INSERT INTO installation_history (slot, n, at, seconds, events, deliveries, completed, pending,
                                  batch, sequenced, acked)
SELECT n, n, now() - (3 - n) * interval '10 s', seconds, 2 * seconds, 4 * seconds, 3 * seconds,
       7 + n, 0, 0, 0
  FROM unnest('{0,1,2}'::int[], '{NULL,10,10}'::float8[]) AS s(n, seconds)
"""
RETRY = {"base_s": 0.02, "factor": 1.0, "cap_s": 0.1, "attempts_max": 10_000}


async def test_pending_deliveries_are_shown_with_their_lanes(database: Database, api: Api) -> None:
    def script(sent: Sent) -> AttemptResult:
        return BUSY if sent.url.endswith("/sick") else OK

    await add_endpoint(database, "sick", lanes=2, retry=RETRY)
    await add_endpoint(database, "well")
    async with running(database, Network(script)):
        for n in range(10):
            await publish(database, n, key=f"key {n}")

        async def settled() -> bool:
            reported = (await api.get("/v1/live")).json["endpoints"]
            return [(each["name"], each["pending"]) for each in reported] == [
                ("sick", 10),
                ("well", 0),
            ]

        async def everything_is_blocked() -> bool:
            reported = (await api.get("/v1/live")).json
            words = {each["condition"] for each in reported["endpoints"]}
            return bool(words == {"blocked"} and reported["totals"]["states"] == {"blocked": 2})

        await until(settled, what="it to settle")
        reported = (await api.get("/v1/live")).json
    sick, well = reported["endpoints"]
    assert sum(lane["pending"] for lane in sick["lanes"]) == 10
    assert all(lane["failing"] for lane in sick["lanes"])
    assert sick["oldest_s"] > 0
    assert well["lanes"] == [{"pending": 0, "failing": False, "blocked": False}]
    assert reported["totals"]["pending"] == 10
    assert reported["totals"]["failing_lanes"] == 2
    assert reported["totals"]["states"] == {"failing": 1, "healthy": 1}
    assert [each["condition"] for each in reported["endpoints"]] == ["failing", "healthy"]
    await fetchval(database, "INSERT INTO lane_block (lane_id, seq) SELECT id, 1 FROM lane")
    await until(everything_is_blocked, what="the next look")


async def add_samples(database: Database) -> None:
    """Write three samples: ten seconds are known of each of the last two."""
    await fetchval(database, SAMPLES)


async def test_samples_are_returned_once_with_their_rates(database: Database, api: Api) -> None:
    await add_samples(database)
    first, second, third = (await api.get("/v1/live")).json["samples"]
    rates = {"events": 2.0, "deliveries": 4.0, "completed": 3.0}
    assert first == dict.fromkeys(("seconds", *rates)) | {"at": first["at"], "pending": 7}
    assert second == {"at": second["at"], "seconds": 10.0, **rates, "pending": 8}
    again = await api.get("/v1/live", since=second["at"])
    assert again.json["samples"] == [third]
    assert (await api.get("/v1/live", since="yesterday")).status == 422


@pytest.mark.parametrize("limits", [(0, 3, LIVE_ENDPOINTS), (LIVE_ENDPOINTS + 1, 199)])
async def test_requests_share_a_query(
    database: Database, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, ...]
) -> None:
    asked: list[int] = []
    read = live_status.read_live_status

    async def counting(*arguments: Any, limit: int, **options: Any) -> live_status.LiveStatus:
        asked.append(limit)
        return await read(*arguments, limit=limit, **options)

    monkeypatch.setattr("outbox_api.live_status.read_live_status", counting)
    for name in ("a", "b", "c"):
        await add_endpoint(database, name)
    now = 0.0
    cache = LiveStatusCache(lambda: now)
    largest = LIVE_ENDPOINTS if limits[-1] == LIVE_ENDPOINTS else LIVE_ENDPOINTS_MAX
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        for limit in limits:
            status = await cache.read(connection, "relay", None, limit)
            assert [each.name for each in status.endpoints] == ["a", "b", "c"][:limit]
        assert asked == [largest]
        now += FRESH_S
        await cache.read(connection, "relay", None, limits[0])
        assert asked == [largest] * 2
        reading = cache._cached[None, largest].reading
        async with reading:  # While a query runs, others get the latest status.
            now += FRESH_S
            late = await cache.read(connection, "relay", None, limits[0])
            assert late.totals.at > status.totals.at
        assert asked == [largest] * 2
        now += STALE_S
        await reading.acquire()
        waiting = asyncio.ensure_future(cache.read(connection, "relay", None, limits[0]))
        await asyncio.sleep(0)
        assert not waiting.done(), "but not what is old"
        reading.release()
        await waiting
        assert asked == [largest] * 3


@pytest.mark.full
async def test_a_tenant_sees_only_its_own_endpoints(database: Database, api: Api) -> None:
    await add_endpoint(database, "acme", tenant="acme", retry=RETRY)
    await add_endpoint(database, "other", tenant="other", retry=RETRY)
    await add_endpoint(database, "nobodys", retry=RETRY)
    await add_samples(database)
    tenants = api.with_token(await make_token(database, "t", ("read",), tenant="acme"))
    async with running(database, Network(lambda _: BUSY)):
        await publish(database, 1, tenant="acme")
        await publish(database, 1, 2, 3, tenant="other")

        async def seen() -> bool:
            return bool((await tenants.get("/v1/live")).json["totals"]["pending"])

        await until(seen, what="it to be pending")
        # What is cached of all is not returned to a tenant.
        assert (await api.get("/v1/live")).json["samples"]
        reported = (await tenants.get("/v1/live")).json
    assert [each["name"] for each in reported["endpoints"]] == ["acme"]
    assert reported["totals"]["pending"] == 1
    assert reported["totals"]["lanes"] == 1
    assert reported["totals"]["sequenced"] == 1
    assert sum(reported["totals"]["states"].values()) == 1
    assert reported["samples"] == []

"""/v1/live: rates between samples, their tenant, and how often the database is queried."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from outbox_api import live_status
from outbox_api.live_cache import FRESH_S, LIVE_ENDPOINTS, LIVE_ENDPOINTS_MAX, LiveStatusCache
from tests.support.api import make_token
from tests.support.relay import (
    BUSY,
    OK,
    Network,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.core.model.response import AttemptResult
    from tests.support.api import Api
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major

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

        await until(settled, 20, "it to settle")
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
    await until(everything_is_blocked, 20, "the next look")


async def test_rates_are_computed_between_two_samples(database: Database) -> None:
    now = 0.0
    book = LiveStatusCache(lambda: now)
    await add_endpoint(database, "shop")
    async with (
        running(database, Network()),
        database.connection(server_settings={"search_path": "relay"}) as connection,
    ):
        _, samples = await book.snapshot(connection, "relay", None, 30)
        assert list(samples) == []
        await publish(database, *range(20))
        await all_ended(database)
        now += FRESH_S

        async def counted() -> bool:
            found = await live_status.read_live_status(
                connection, "relay", tenant=None, since_batch=None, limit=0
            )
            return found.totals.pending == 0 and found.totals.sequenced == 20

        await until(counted, 20, "the progress to be written down")
        (sample,) = (await book.snapshot(connection, "relay", None, 30))[1]
    assert sample.pending == 0
    assert sample.events == sample.deliveries == sample.ended > 0
    assert sample.events * sample.seconds == pytest.approx(20), "it says over how long"


async def test_concurrent_requests_share_a_query(
    database: Database, monkeypatch: pytest.MonkeyPatch
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
    book = LiveStatusCache(lambda: now)

    async def names(connection: Connection[Any], limit: int) -> list[str]:
        seen, _ = await book.snapshot(connection, "relay", None, limit)
        return [each.name for each in seen.endpoints]

    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        for limit in range(LIVE_ENDPOINTS + 1):
            assert await names(connection, limit) == ["a", "b", "c"][:limit]
        assert asked == [LIVE_ENDPOINTS]
        at = (await book.snapshot(connection, "relay", None, 2))[0].totals.at
        for limit in range(LIVE_ENDPOINTS + 1, LIVE_ENDPOINTS_MAX + 1):
            assert await names(connection, limit) == ["a", "b", "c"], "who asks for more gets it"
        assert asked == [LIVE_ENDPOINTS, LIVE_ENDPOINTS_MAX], "once"
        seen, samples = await book.snapshot(connection, "relay", None, 3)
        assert (seen.totals.at, list(samples)) == (at, []), "it says nothing of rates"
        now += FRESH_S
        await names(connection, 3)
        assert asked == [LIVE_ENDPOINTS, LIVE_ENDPOINTS_MAX, LIVE_ENDPOINTS_MAX]
        polling = book._caches[None].refreshing
        async with polling:  # While a query runs, others get the latest snapshot.
            assert (await book.snapshot(connection, "relay", None, 3))[0].totals.at > at
        now += 3600
        await polling.acquire()
        late = asyncio.ensure_future(book.snapshot(connection, "relay", None, 3))
        await asyncio.sleep(0)
        assert not late.done(), "but not what was seen an hour ago"
        polling.release()
        _, samples = await late
        assert list(samples) == [], "what was an hour ago says nothing of now"
        assert asked[3:] == [LIVE_ENDPOINTS], "nor does who asked for more then"


@pytest.mark.full
async def test_a_tenant_sees_only_its_own_endpoints(database: Database, api: Api) -> None:
    await add_endpoint(database, "acme", tenant="acme", retry=RETRY)
    await add_endpoint(database, "other", tenant="other", retry=RETRY)
    await add_endpoint(database, "nobodys", retry=RETRY)
    tenants = api.with_token(await make_token(database, "t", ("read",), tenant="acme"))
    async with running(database, Network(lambda _: BUSY)):
        await publish(database, 1, tenant="acme")
        await publish(database, 1, 2, 3, tenant="other")

        async def seen() -> bool:
            return bool((await tenants.get("/v1/live")).json["totals"]["pending"])

        await until(seen, 20, "it to be pending")
        reported = (await tenants.get("/v1/live")).json
    assert [each["name"] for each in reported["endpoints"]] == ["acme"]
    assert reported["totals"]["pending"] == 1
    assert reported["totals"]["lanes"] == 1
    assert sum(reported["totals"]["states"].values()) == 1
    assert all(each["events"] == 0 for each in reported["samples"])


async def test_samples_are_returned_once(api: Api) -> None:
    first = (await api.get("/v1/live")).json
    again = await api.get("/v1/live", since=first["totals"]["at"])
    assert all(each["at"] > first["totals"]["at"] for each in again.json["samples"])
    assert (await api.get("/v1/live", since="yesterday")).status == 422

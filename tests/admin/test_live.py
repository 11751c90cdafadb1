"""What moves: rates between looks, whose they are, and how often the database is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox.admin.live import FRESH_S, LiveBook
from outbox.store import live
from tests.support.api import make_token
from tests.support.relay import BUSY, OK, Network, add_endpoint, all_ended, publish, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from outbox.core.answer import Answer
    from tests.support.api import Api
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major

RETRY = {"base_s": 0.02, "factor": 1.0, "cap_s": 0.1, "attempts_max": 10_000}


async def test_what_is_owed_is_told_with_its_lanes(database: Database, api: Api) -> None:
    def script(sent: Sent) -> Answer:
        return BUSY if sent.url.endswith("/sick") else OK

    await add_endpoint(database, "sick", lanes=2, retry=RETRY)
    await add_endpoint(database, "well")
    async with running(database, Network(script)):
        for n in range(10):
            await publish(database, n, key=f"key {n}")

        async def settled() -> bool:
            told = (await api.get("/v1/live")).json["endpoints"]
            return [(each["name"], each["owed"]) for each in told] == [("sick", 10), ("well", 0)]

        await until(settled, 20, "it to settle")
        told = (await api.get("/v1/live")).json
    sick, well = told["endpoints"]
    assert sum(lane["owed"] for lane in sick["lanes"]) == 10
    assert all(lane["failing"] for lane in sick["lanes"])
    assert sick["oldest_s"] > 0
    assert well["lanes"] == [{"owed": 0, "failing": False, "blocked": False}]
    assert told["totals"]["owed"] == 10
    assert told["totals"]["failing_lanes"] == 2
    assert told["totals"]["states"] == {"failing": 1, "healthy": 1}


async def test_rates_are_between_two_looks(database: Database) -> None:
    now = 0.0
    book = LiveBook(lambda: now)
    await add_endpoint(database, "shop")
    async with (
        running(database, Network()),
        database.connection(server_settings={"search_path": "relay"}) as connection,
    ):
        first = await book.look(connection, "relay", None)
        assert list(first.samples) == []
        await publish(database, *range(20))
        await all_ended(database)
        now += FRESH_S

        async def counted() -> bool:
            found = await live.totals(connection, "relay", tenant=None, since_batch=None)
            return found.owed == 0 and found.numbered == 20

        await until(counted, 10, "the progress to be written down")
        (sample,) = (await book.look(connection, "relay", None)).samples
    assert sample.owed == 0
    assert sample.events == sample.numbered == sample.ended > 0


async def test_however_many_watch_it_is_looked_at_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    totals = live.totals

    async def counting(*arguments: object, **options: object) -> object:
        nonlocal asked
        asked += 1
        return await totals(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("outbox.store.live.totals", counting)
    now = 0.0
    book = LiveBook(lambda: now)
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        for _ in range(5):
            await book.look(connection, "relay", None)
        assert asked == 1
        now += FRESH_S
        await book.look(connection, "relay", None)
        assert asked == 2
        now += 3600
        watched = await book.look(connection, "relay", None)
        assert list(watched.samples) == [], "what was an hour ago says nothing of now"


async def test_a_tenant_sees_what_is_its_own(database: Database, api: Api) -> None:
    await add_endpoint(database, "acme", tenant="acme", retry=RETRY)
    await add_endpoint(database, "other", tenant="other", retry=RETRY)
    await add_endpoint(database, "nobodys", retry=RETRY)
    tenants = api.with_token(await make_token(database, "t", ("read",), tenant="acme"))
    async with running(database, Network(lambda _: BUSY)):
        await publish(database, 1, tenant="acme")
        await publish(database, 1, 2, 3, tenant="other")

        async def seen() -> bool:
            return bool((await tenants.get("/v1/live")).json["totals"]["owed"])

        await until(seen, 10, "it to be owed")
        told = (await tenants.get("/v1/live")).json
    assert [each["name"] for each in told["endpoints"]] == ["acme"]
    assert told["totals"]["owed"] == 1
    assert told["totals"]["lanes"] == 1
    assert sum(told["totals"]["states"].values()) == 1
    assert all(each["events"] == 0 for each in told["samples"])


async def test_a_page_gets_samples_once(api: Api) -> None:
    first = (await api.get("/v1/live")).json
    again = await api.get("/v1/live", since=first["totals"]["at"])
    assert all(each["at"] > first["totals"]["at"] for each in again.json["samples"])
    assert (await api.get("/v1/live", since="yesterday")).status == 422

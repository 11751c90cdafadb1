"""Rate limits on both listeners: failed logins by address, requests by token."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from outbox.core.model.api_token import digest
from outbox.operations import api_tokens, fetch_tokens
from outbox.receiver import fetch as fetching
from outbox.web.address import Address
from outbox.web.serving import listen, serving
from outbox_api import rate_limit, receivers
from outbox_api.app import application
from outbox_api.database import Database as Connections
from outbox_api.login_failures import FailedLogins
from outbox_api.problem import Problem
from outbox_api.rate_limit import FAILURES, RateLimiter
from outbox_api.shared import Shared
from tests.support.api import Api, make_token
from tests.support.relay import add_endpoint, current, settings_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

HERE = Address("127.0.0.1", 0)
GOOD, BAD = digest("good"), digest("bad")


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Asked:
    """Counts the queries for tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.times = 0
        find = getattr(module, name)

        async def counted(*arguments: Any) -> Any:
            self.times += 1
            return await find(*arguments)

        monkeypatch.setattr(module, name, counted)


@asynccontextmanager
async def api_of(database: Database, clock: Clock, **options: Any) -> AsyncIterator[Api]:
    settings = settings_for(database, dsn_source="test", **options)
    connections = Connections(current(settings))
    app = application(settings, HERE, connections, FailedLogins(connections), Shared(), clock=clock)
    async with (
        connections.opened(),
        serving(app, await listen(HERE)) as at,
        aiohttp.ClientSession() as session,
    ):
        yield Api(session, at.url, None)


async def test_failed_logins_are_limited_without_a_query(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, clock = Asked(monkeypatch, api_tokens, "find_token"), Clock()
    async with api_of(database, clock) as client:
        known = client.with_token(await make_token(database, "known"))
        assert (await known.get("/v1/me")).status == 200
        reported = [await client.with_token(f"obx_{n:043}").get("/v1/me") for n in range(15)]
        assert [each.status for each in reported] == [401] * FAILURES.burst + [429] * 5
        assert asked.times == 1 + FAILURES.burst
        refused = reported[-1]
        assert refused.json["type"] == "urn:outbox:problem:too-many-requests"
        assert refused.detail == ("too many failed logins from this address; retry in 6 s")
        assert refused.headers["Retry-After"] == "6"
        # A malformed token counts as a failed login; a request without a token does not.
        assert (await client.with_token("obx_").get("/v1/me")).status == 429
        assert (await client.get("/v1/me")).status == 401
        # A token that was good is heard, although what was known of it is forgotten.
        clock.now += 5
        assert (await known.get("/v1/me")).status == 200
        # A new one from there has to wait.
        newcomer = client.with_token(await make_token(database, "newcomer"))
        assert (await newcomer.get("/v1/me")).status == 429
        clock.now += 2
        assert (await newcomer.get("/v1/me")).status == 200


async def test_a_revoked_token_counts_as_a_failed_login(database: Database) -> None:
    clock = Clock()
    async with api_of(database, clock) as client:
        api = client.with_token(await make_token(database, "gone"))
        assert (await api.get("/v1/me")).status == 200
        async with database.connection(server_settings={"search_path": "relay"}) as db:
            await api_tokens.revoke_token(db, "relay", "gone", actor="test")
        clock.now += 10
        reported = [(await api.get("/v1/me")).status for _ in range(FAILURES.burst + 1)]
        assert reported == [401] * FAILURES.burst + [429]


async def test_a_token_is_limited_to_its_request_rate(database: Database) -> None:
    clock = Clock()
    async with api_of(database, clock, api_rate_max=2) as client:
        one = client.with_token(await make_token(database, "one"))
        other = client.with_token(await make_token(database, "other"))
        assert [(await one.get("/v1/me")).status for _ in range(6)] == [200] * 4 + [429] * 2
        refused = await one.post("/v1/events", {"type": "a.b"})
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        assert "this token exceeds its request rate (OUTBOX_API_RATE_MAX)" in refused.detail
        assert (await other.get("/v1/me")).status == 200
        clock.now += 0.5
        assert (await one.post("/v1/events", {"type": "a.b"})).status == 201
        assert (await one.get("/v1/me")).status == 429


async def test_the_receiver_listener_has_the_same_limits(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, clock = Asked(monkeypatch, fetch_tokens, "find_fetcher"), Clock()
    await add_endpoint(database)
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        token = (await fetch_tokens.add_fetch_token(db, "relay", "shop", actor="test")).token
    settings = settings_for(database, dsn_source="test")
    connections = Connections(current(settings))
    app = receivers.application(
        connections, FailedLogins(connections), RateLimiter(2, clock), Shared()
    )
    async with (
        connections.opened(),
        serving(app, await listen(HERE)) as at,
        aiohttp.ClientSession() as session,
    ):

        async def request_status(shown: str) -> int:
            headers = {"Authorization": f"Bearer {shown}"}
            async with session.get(f"{at.url}v1/lanes", headers=headers) as response:
                body = await response.json(content_type=None)
                assert response.headers["X-Frame-Options"] == "DENY"
                if response.status == 429:
                    assert int(response.headers["Retry-After"]) >= 1
                    assert body["type"] == "urn:outbox:problem:too-many-requests"
                return response.status

        assert [await request_status(token) for _ in range(5)] == [200] * 4 + [429]
        before = asked.times
        reported = [await request_status(f"obf_{n:043}") for n in range(12)]
        assert reported == [401] * FAILURES.burst + [429] * 2
        assert asked.times == before + FAILURES.burst
        clock.now += 4
        assert await request_status(token) == 200
        assert await request_status("obf_" + "z" * 43) == 429


async def test_a_receiver_over_its_limit_waits_and_continues(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, waits = Clock(), []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(fetching.time, "sleep", sleep)
    await add_endpoint(database, lanes=5)
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        token = (await fetch_tokens.add_fetch_token(db, "relay", "shop", actor="test")).token
    settings = settings_for(database, dsn_source="test")
    connections = Connections(current(settings))
    app = receivers.application(
        connections, FailedLogins(connections), RateLimiter(1, clock), Shared()
    )
    async with connections.opened(), serving(app, await listen(HERE)) as at:
        fetch = fetching.FetchClient(at.url, token)
        lanes = [standing.lane async for standing in fetch.lanes_async()]
        assert len(lanes) == 5
        for lane in lanes:
            assert (await fetch.page_async(lane, 0)).items == ()
    assert waits == [1.0] * 4


def test_the_number_of_limited_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "LIMITED_ADDRESSES_MAX", 50)
    monkeypatch.setattr(rate_limit, "LIMITED_TOKENS_MAX", 50)
    monkeypatch.setattr(rate_limit, "GOOD_MAX", 50)
    here = RateLimiter(1, Clock())
    for n in range(500):
        here.record_bad_token(f"10.0.{n // 256}.{n % 256}", None)
        here.record_good_token(digest(str(n)))
        here.require_request_quota(n)
    assert {len(here._failures), len(here._requests), len(here._good)} == {50}


def test_a_successful_login_is_remembered_for_an_hour() -> None:
    clock = Clock()
    here = RateLimiter(1, clock)
    here.record_good_token(GOOD)
    for _ in range(20):
        here.record_bad_token("10.0.0.1", BAD)
    here.require_login_quota("10.0.0.1", GOOD)
    clock.now += rate_limit.GOOD_S + 1
    for _ in range(20):
        here.record_bad_token("10.0.0.1", BAD)
    with pytest.raises(Problem):
        here.require_login_quota("10.0.0.1", GOOD)
    here.require_login_quota("10.0.0.2", GOOD)


def test_an_ipv6_network_shares_a_limit() -> None:
    here = RateLimiter(1, Clock())
    for n in range(20):
        here.record_bad_token(f"2001:db8::{n:x}", None)
    with pytest.raises(Problem):
        here.require_login_quota("2001:db8::ffff", BAD)
    here.require_login_quota("2001:db8:0:1::1", BAD)

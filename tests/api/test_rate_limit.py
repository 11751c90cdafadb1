"""How often one may come: guessers by address, tokens by themselves; on both listeners."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from outbox.api import rate_limit, receivers
from outbox.api.app import application
from outbox.api.database import Database as Connections
from outbox.api.login_failures import FailedLogins
from outbox.api.problem import Problem
from outbox.api.rate_limit import FAILURES, RateLimiter
from outbox.core.model.api_token import digest
from outbox.operations import api_tokens, fetch_tokens
from outbox.receiver import fetch as fetching
from outbox.store.connection import dsn
from outbox.web.address import Address
from outbox.web.serving import serving
from tests.support.api import Api, make_token
from tests.support.relay import add_endpoint, settings_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

HERE = Address("127.0.0.1", 0)
GOOD, BAD = digest("good"), digest("bad")


class Clock:
    """Moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Asked:
    """Counts how often the database is asked for a token."""

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
    connections = Connections(dsn.from_settings(settings), settings)
    app = application(settings, HERE, connections, FailedLogins(connections), clock=clock)
    async with (
        connections.opened(),
        serving(app, HERE) as at,
        aiohttp.ClientSession() as session,
    ):
        yield Api(session, at.url, None)


async def test_who_guesses_is_refused_before_the_database_is_asked(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, clock = Asked(monkeypatch, api_tokens, "find_token"), Clock()
    async with api_of(database, clock) as anybody:
        known = anybody.with_token(await make_token(database, "known"))
        assert (await known.get("/v1/me")).status == 200
        told = [await anybody.with_token(f"obx_{n:043}").get("/v1/me") for n in range(15)]
        assert [each.status for each in told] == [401] * FAILURES.burst + [429] * 5
        assert asked.times == 1 + FAILURES.burst
        refused = told[-1]
        assert refused.json["type"] == "urn:outbox:problem:too-many-requests"
        assert refused.detail == ("too many failed logins from this address; retry in 6 s")
        assert refused.headers["Retry-After"] == "6"
        # What does not even look like a token counts, and one that nobody shows does not.
        assert (await anybody.with_token("obx_").get("/v1/me")).status == 429
        assert (await anybody.get("/v1/me")).status == 401
        # A token that was good is heard, although what was known of it is forgotten.
        clock.now += 5
        assert (await known.get("/v1/me")).status == 200
        # A new one from there has to wait.
        newcomer = anybody.with_token(await make_token(database, "newcomer"))
        assert (await newcomer.get("/v1/me")).status == 429
        clock.now += 2
        assert (await newcomer.get("/v1/me")).status == 200


async def test_a_token_that_was_revoked_counts_as_any_other(database: Database) -> None:
    clock = Clock()
    async with api_of(database, clock) as anybody:
        api = anybody.with_token(await make_token(database, "gone"))
        assert (await api.get("/v1/me")).status == 200
        async with database.connection(server_settings={"search_path": "relay"}) as db:
            await api_tokens.revoke(db, "relay", "gone", actor="test")
        clock.now += 10
        told = [(await api.get("/v1/me")).status for _ in range(FAILURES.burst + 1)]
        assert told == [401] * FAILURES.burst + [429]


async def test_a_token_asks_no_more_often_than_it_may(database: Database) -> None:
    clock = Clock()
    async with api_of(database, clock, api_rate_max=2) as anybody:
        one = anybody.with_token(await make_token(database, "one"))
        other = anybody.with_token(await make_token(database, "other"))
        assert [(await one.get("/v1/me")).status for _ in range(6)] == [200] * 4 + [429] * 2
        refused = await one.post("/v1/events", {"type": "a.b"})
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        assert "this token exceeds its request rate (OUTBOX_API_RATE_MAX)" in refused.detail
        assert (await other.get("/v1/me")).status == 200
        clock.now += 0.5
        assert (await one.post("/v1/events", {"type": "a.b"})).status == 201
        assert (await one.get("/v1/me")).status == 429


async def test_receivers_are_held_to_the_same(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, clock = Asked(monkeypatch, fetch_tokens, "find_fetcher"), Clock()
    await add_endpoint(database)
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        token = (await fetch_tokens.add(db, "relay", "shop", actor="test")).token
    settings = settings_for(database, dsn_source="test")
    connections = Connections(dsn.from_settings(settings), settings)
    app = receivers.application(connections, FailedLogins(connections), RateLimiter(2, clock))
    async with (
        connections.opened(),
        serving(app, HERE) as at,
        aiohttp.ClientSession() as session,
    ):

        async def ask(shown: str) -> int:
            headers = {"Authorization": f"Bearer {shown}"}
            async with session.get(f"{at.url}v1/lanes", headers=headers) as response:
                body = await response.json(content_type=None)
                assert response.headers["X-Frame-Options"] == "DENY"
                if response.status == 429:
                    assert int(response.headers["Retry-After"]) >= 1
                    assert body["type"] == "urn:outbox:problem:too-many-requests"
                return response.status

        assert [await ask(token) for _ in range(5)] == [200] * 4 + [429]
        before = asked.times
        told = [await ask(f"obf_{n:043}") for n in range(12)]
        assert told == [401] * FAILURES.burst + [429] * 2
        assert asked.times == before + FAILURES.burst
        clock.now += 4
        assert await ask(token) == 200
        assert await ask("obf_" + "z" * 43) == 429


async def test_a_receiver_that_fetches_more_than_it_may_waits_and_goes_on(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, waits = Clock(), []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(fetching.time, "sleep", sleep)
    await add_endpoint(database, lanes=5)
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        token = (await fetch_tokens.add(db, "relay", "shop", actor="test")).token
    settings = settings_for(database, dsn_source="test")
    connections = Connections(dsn.from_settings(settings), settings)
    app = receivers.application(connections, FailedLogins(connections), RateLimiter(1, clock))
    async with connections.opened(), serving(app, HERE) as at:
        fetch = fetching.FetchClient(at.url, token)
        lanes = [standing.lane async for standing in fetch.lanes_async()]
        assert len(lanes) == 5
        for lane in lanes:
            assert (await fetch.page_async(lane, 0)).items == ()
    assert waits == [1.0] * 4


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "ADDRESSES_MAX", 50)
    monkeypatch.setattr(rate_limit, "TOKENS_MAX", 50)
    monkeypatch.setattr(rate_limit, "GOOD_MAX", 50)
    here = RateLimiter(1, Clock())
    for n in range(500):
        here.record_bad_token(f"10.0.{n // 256}.{n % 256}", None)
        here.record_good_token(digest(str(n)))
        here.require_request_quota(n)
    assert {len(here._failures), len(here._requests), len(here._good)} == {50}


def test_that_a_token_was_good_is_forgotten_after_an_hour() -> None:
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


def test_networks_of_version_6_are_one_guesser() -> None:
    here = RateLimiter(1, Clock())
    for n in range(20):
        here.record_bad_token(f"2001:db8::{n:x}", None)
    with pytest.raises(Problem):
        here.require_login_quota("2001:db8::ffff", BAD)
    here.require_login_quota("2001:db8:0:1::1", BAD)

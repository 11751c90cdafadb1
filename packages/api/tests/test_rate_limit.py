"""Rate limits on both listeners; `test_logins` has those of failed logins."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from outbox.operations.tokens import fetch as fetch_tokens
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


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


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
    here = RateLimiter(1, Clock())
    for n in range(500):
        here.count_failed_login(f"10.0.{n // 256}.{n % 256}")
        here.require_request_quota(n)
    assert {len(here._failures), len(here._requests)} == {50}


def test_an_ipv6_network_shares_a_limit() -> None:
    here = RateLimiter(1, Clock())
    for n in range(FAILURES.burst):
        here.count_failed_login(f"2001:db8::{n:x}")
    with pytest.raises(Problem):
        here.count_failed_login("2001:db8::ffff")
    here.count_failed_login("2001:db8:0:1::1")

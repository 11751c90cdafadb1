"""Attacks on logins, at both listeners: nothing that others send refuses a valid token."""

from __future__ import annotations

import asyncio
import base64
import os
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from outbox.core.model.api_token import digest
from outbox.operations.tokens import api as api_tokens
from outbox.operations.tokens import fetch as fetch_tokens
from outbox.web.address import Address
from outbox.web.serving import listen, serving
from outbox_api import logins, receivers
from outbox_api.app import application
from outbox_api.database import Database as Connections
from outbox_api.login_failures import FailedLogins
from outbox_api.rate_limit import FAILURES, RateLimiter
from outbox_api.shared import Shared
from tests.support.api import make_token
from tests.support.relay import add_endpoint, current, fetchval, settings_for
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

HERE = Address("127.0.0.1", 0)
GUESSES = 100
BOTH = pytest.mark.parametrize("listener", ["api", "receivers"], indirect=True)
"""Without it, the receivers' listener, which shares the code, is tested by --full only."""
AFTER_CACHE_S = 2.1


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Listener:
    """A running listener, and the uses of the connection on which it authenticates."""

    def __init__(self, name: str, database: Database, connections: Connections) -> None:
        self.is_api = name == "api"
        self.uses = 0
        self.permits: asyncio.Semaphore | None = None
        """While the connection is slow, each use takes one."""
        self.clock = Clock()
        self.shared = Shared()
        self.query_s = 0.0
        """How long a use takes by the clock."""
        self.url = ""
        self.session: Any = None
        self._database = database
        login = connections.login

        @asynccontextmanager
        async def counted() -> AsyncIterator[Any]:
            self.uses += 1
            if self.permits is not None:
                await self.permits.acquire()
            async with login() as connection:
                yield connection
            self.clock.now += self.query_s

        connections.login = counted  # type: ignore[method-assign]

    def guess(self) -> str:
        """A well-formed token that does not exist."""
        text = base64.urlsafe_b64encode(os.urandom(32)).rstrip(b"=").decode()
        return ("obx_" if self.is_api else "obf_") + text

    async def token(self, name: str = "valid") -> str:
        """Create a token."""
        if self.is_api:
            return await make_token(self._database, name)
        async with self._database.connection(server_settings={"search_path": "relay"}) as db:
            added = await fetch_tokens.add_fetch_token(db, "relay", "shop", actor="test")
        return added.token

    async def end(self, how: str) -> None:
        """Revoke the token, or let it expire."""
        if how == "expired":
            table = "token" if self.is_api else "fetch_token"
            sql = f"UPDATE {table} SET expires_at = now() - interval '1 s' RETURNING id"
            await fetchval(self._database, sql)
            return
        async with self._database.connection(server_settings={"search_path": "relay"}) as db:
            if self.is_api:
                await api_tokens.revoke_token(db, "relay", "valid", actor="test")
            else:
                await fetch_tokens.revoke_fetch_tokens(db, "relay", "shop", actor="test")

    async def request(self, token: str) -> tuple[int, str]:
        """Send a token; return the status and the detail of the problem."""
        path = "v1/me" if self.is_api else "v1/lanes"
        headers = {"Authorization": f"Bearer {token}"}
        async with self.session.get(self.url + path, headers=headers) as response:
            body = await response.json(content_type=None)
            if response.status == 429:
                assert int(response.headers["Retry-After"]) >= 1
            return response.status, body.get("detail", "")

    async def status(self, token: str) -> int:
        return (await self.request(token))[0]

    async def statuses(self, tokens: list[str]) -> list[int]:
        """Send tokens at the same time."""
        return await asyncio.gather(*map(self.status, tokens))


@asynccontextmanager
async def started(name: str, database: Database) -> AsyncIterator[Listener]:
    """A listener that has just been started; all clients have one address."""
    settings = settings_for(database, dsn_source="test", api_rate_max=1000)
    connections = Connections(current(settings))
    listener = Listener(name, database, connections)
    failures, clock = FailedLogins(connections), listener.clock
    if listener.is_api:
        app = application(settings, HERE, connections, failures, listener.shared, clock=clock)
    else:
        limits = RateLimiter(settings.api_rate_max, clock)
        app = receivers.application(connections, failures, limits, listener.shared, clock=clock)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        connections.opened(),
        serving(app, await listen(HERE)) as at,
        aiohttp.ClientSession(connector=connector) as listener.session,
    ):
        listener.url = at.url
        yield listener


@asynccontextmanager
async def in_background(
    *requests: Coroutine[Any, Any, Any],
) -> AsyncIterator[list[asyncio.Future[Any]]]:
    """Requests whose clients leave at the end."""
    tasks = [asyncio.ensure_future(each) for each in requests]
    try:
        yield tasks
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(params=["api", pytest.param("receivers", marks=pytest.mark.full)])
async def listener(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Listener]:
    if request.param == "receivers":
        await add_endpoint(database)
    async with started(request.param, database) as running:
        yield running


@BOTH
async def test_a_flood_of_guesses_does_not_refuse_a_first_login(listener: Listener) -> None:
    """As after a restart: the listener has seen none of its tokens."""
    token = await listener.token()
    statuses = await listener.statuses([listener.guess() for _ in range(GUESSES)])
    assert statuses.count(401) == FAILURES.burst
    assert statuses.count(429) == GUESSES - FAILURES.burst
    assert [await listener.status(token) for _ in range(3)] == [200] * 3
    assert await listener.status(listener.guess()) == 429


@BOTH
async def test_a_token_that_is_created_during_a_flood_is_valid_at_once(listener: Listener) -> None:
    async with in_background(*(_flood(listener) for _ in range(8))):
        for n in range(3):
            token = await listener.token(f"t{n}")
            assert await listener.status(token) == 200


@BOTH
async def test_a_new_token_is_known_when_its_client_tries_again(listener: Listener) -> None:
    """Its first request is refused: guesses from its address wait for as many queries as may."""
    assert await listener.status(await listener.token("first")) == 200
    listener.permits, before = asyncio.Semaphore(0), listener.uses
    token = await listener.token("next")
    guesses = [listener.status(listener.guess()) for _ in range(GUESSES)]
    async with in_background(*guesses) as guessing:
        refused = GUESSES - logins.ADDRESS_WAITING_MAX
        await until(lambda: sum(each.done() for each in guessing) == refused, what="the limit")
        assert await listener.status(token) == 429
        assert listener.uses == before + 1
        for _ in range(GUESSES):
            listener.permits.release()
        await until(lambda: listener.uses > before + 1, what="the next query")
        await until(lambda: all(each.done() for each in guessing), what="the guesses")
    listener.permits = None
    async with in_background(*(_flood(listener) for _ in range(2 * logins.ADDRESS_WAITING_MAX))):
        await asyncio.sleep(0.1)
        assert await listener.status(token) == 200


async def _flood(listener: Listener) -> None:
    while True:
        await listener.status(listener.guess())


async def test_guesses_cost_no_query_each(listener: Listener) -> None:
    token = await listener.token()
    assert await listener.status(token) == 200
    before = listener.uses
    await listener.statuses([listener.guess() for _ in range(GUESSES)])
    await listener.statuses([listener.guess() + "x" for _ in range(GUESSES)])
    # One read for those that arrived before it began, and one for the rest; the connections of a
    # client are opened one after another, so some arrive later.
    assert listener.uses - before <= GUESSES // 10


async def test_queries_for_unknown_tokens_take_a_small_share_of_the_time(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of guesses that arrive one after another."""
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(round(seconds, 6))

    async with started("api", database) as api:
        monkeypatch.setattr(logins, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
        for api.query_s in (0.01, 0.05, 60.0, 0.0):
            await api.status(api.guess())
    assert pauses[1:] == [0.2, 1.0, 2.0]


@pytest.mark.parametrize("restarted", [True, False])
async def test_guesses_do_not_wait_in_front_of_a_valid_token(
    listener: Listener, restarted: bool
) -> None:
    """The connection to the database is slow: the test allows one use at a time."""
    token = await listener.token()
    if not restarted:
        assert await listener.status(token) == 200
        listener.clock.now += AFTER_CACHE_S
    listener.permits, before = asyncio.Semaphore(0), listener.uses
    guesses = [listener.status(listener.guess()) for _ in range(GUESSES // 2)]
    async with in_background(*guesses) as guessing:
        await until(lambda: listener.uses > before, what="the first query")
        if not restarted:
            # Others would have the connections of the listener for as long as it is slow.
            refused = GUESSES // 2 - logins.ADDRESS_WAITING_MAX
            await until(lambda: sum(each.done() for each in guessing) == refused, what="the limit")
        async with in_background(listener.status(token)) as (valid,):
            for _ in range(4):
                listener.permits.release()
                used = listener.uses
                await until(
                    lambda used=used: valid.done() or listener.uses > used, what="another query"
                )
                if valid.done():
                    break
            assert valid.done()
            assert valid.result() == 200


async def test_malformed_tokens_refuse_no_valid_one(listener: Listener) -> None:
    token = await listener.token()
    malformed = ["x", listener.guess()[:-1], listener.guess() + "A", "obx_" + "é" * 43]
    statuses = await listener.statuses(malformed * 5)
    assert sorted(statuses) == [401] * FAILURES.burst + [429] * (20 - FAILURES.burst)
    assert listener.uses == 0
    assert await listener.status(token) == 200


@BOTH
@pytest.mark.parametrize("how", ["revoked", "expired"])
async def test_an_ended_token_is_refused_within_two_seconds(listener: Listener, how: str) -> None:
    token = await listener.token()
    assert await listener.status(token) == 200
    await listener.end(how)
    listener.clock.now += AFTER_CACHE_S
    before = listener.uses
    # It counts as a failed login, and costs at most one query in two seconds.
    reported = [await listener.request(token) for _ in range(FAILURES.burst + 2)]
    assert [status for status, _ in reported] == [401] * FAILURES.burst + [429] * 2
    assert {"revoked": "revoked", "expired": "expired"}[how] in reported[0][1]
    assert listener.uses - before <= 2
    assert await listener.status(await listener.token("next")) == 200


async def test_a_hash_that_begins_like_that_of_a_valid_token_is_refused(
    listener: Listener, database: Database
) -> None:
    """The listener keeps eight bytes of each hash."""
    token, similar = await listener.token(), listener.guess()
    table = "token" if listener.is_api else "fetch_token"
    sql = f"UPDATE {table} SET hash = $1 RETURNING id"
    await fetchval(database, sql, digest(similar)[:8] + digest(token)[8:])
    assert await listener.status(similar) == 401
    await fetchval(database, sql, digest(token))
    assert await listener.status(token) == 200


async def test_clients_that_leave_do_not_delay_a_valid_token(listener: Listener) -> None:
    """A client that leaves while it is authenticated cancels its request only."""
    token = await listener.token()
    listener.permits = asyncio.Semaphore(0)

    async def in_progress(requests: int) -> None:
        name = "api" if listener.is_api else "receivers"
        counts = listener.shared.meters._in_progress
        await until(lambda: counts[name] == requests, what="the requests")

    async with in_background(listener.status(listener.guess())):
        await until(lambda: listener.uses > 0, what="the first query")
        # Both wait for the next query.
        async with in_background(listener.status(token)) as (valid,):
            async with in_background(listener.status(listener.guess())):
                await in_progress(3)
            await in_progress(2)
            for _ in range(GUESSES):
                listener.permits.release()
            assert await valid == 200


async def test_a_query_that_hangs_ends(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    token = await listener.token()
    monkeypatch.setattr(logins, "REQUEST_TIMEOUT_S", 0.01)
    listener.permits = asyncio.Semaphore(0)
    assert await listener.status(listener.guess()) == 503
    listener.permits = None
    monkeypatch.undo()
    assert await listener.status(token) == 200


async def test_a_database_without_the_schema_is_reported_as_such(
    listener: Listener, database: Database
) -> None:
    token = await listener.token()
    await fetchval(database, "ALTER SCHEMA relay RENAME TO elsewhere")
    try:
        for each in (token, listener.guess()):
            status, detail = await listener.request(each)
            assert status == 503
            assert "outbox migrate" in detail
    finally:
        await fetchval(database, "ALTER SCHEMA elsewhere RENAME TO relay")
    assert await listener.status(token) == 200


async def test_the_number_of_kept_tokens_is_bounded(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logins, "KEPT_TOKENS_MAX", 2)
    async with started("api", database) as api:
        tokens = [await api.token(f"t{n}") for n in range(4)]
        assert await api.statuses(tokens) == [200] * 4
        before = api.uses
        assert await api.statuses(tokens) == [200] * 4
        assert api.uses - before >= 2

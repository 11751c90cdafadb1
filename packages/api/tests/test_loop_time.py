"""Shares of the event loop's time: who waits, what is measured, and what a coroutine sees of it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from outbox.web import serving
from outbox.web.address import parse_address
from outbox_api import loop_time
from outbox_api.limits import CONNECTION_WAIT_S
from outbox_api.loop_time import LOOP_SHARE, REQUEST_S, LoopTime
from outbox_api.problem import Problem
from tests.support.api import Api, make_token
from tests.support.virtual_time import VirtualTimeLoop, run_virtual
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from outbox_api.rate_limit import Holder
    from tests.support.postgres import Database

HOG, ACME = ("tenant", "hog"), ("tenant", "acme")
OPERATOR = ("token", 1)


def compute(seconds: float) -> None:
    """Keep the event loop busy."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop._now_s += seconds


async def request(seconds: float) -> None:
    """A request that takes so much of the event loop."""
    compute(seconds)


class Requests:
    """Requests of several holders, on virtual time."""

    def __init__(self) -> None:
        self.now = asyncio.get_running_loop().time
        self.shares = LoopTime(self.now)

    async def run(self, holder: Holder, seconds: float = 0.0) -> float:
        """Run a request; returns when it was processed."""
        await self.shares.run(holder, lambda: request(seconds))
        return self.now() - seconds

    async def send_often(self, holder: Holder, total_s: float) -> None:
        """Send a short request each tenth of a second."""
        for _ in range(round(total_s * 10)):
            self.shares.note(holder)
            await asyncio.sleep(0.1)


def test_above_its_share_a_tenant_waits_while_others_send_requests() -> None:
    async def run() -> None:
        requests = Requests()
        others = asyncio.create_task(requests.send_often(OPERATOR, 100))
        await asyncio.sleep(0)
        began_at = requests.now()
        used_s = 0.0
        for _ in range(100):
            await requests.run(HOG, 0.05)
            used_s += 0.05
        took_s = requests.now() - began_at
        # Its burst is free.
        assert used_s / took_s == pytest.approx(LOOP_SHARE.per_s, rel=0.1)
        others.cancel()

    run_virtual(run())


@pytest.mark.parametrize("others", [[], [HOG]], ids=["alone", "itself"])
def test_alone_it_does_not_wait(others: list[Holder]) -> None:
    async def run() -> None:
        requests = Requests()
        for each in others:
            requests.shares.note(each)
        for _ in range(20):
            began_at = requests.now()
            assert await requests.run(HOG, 0.05) == pytest.approx(began_at)

    run_virtual(run())


def test_others_do_not_wait_for_a_tenant_above_its_share() -> None:
    async def run() -> None:
        requests = Requests()
        requests.shares.note(OPERATOR)
        async with asyncio.TaskGroup() as group:
            hogs = [group.create_task(requests.run(HOG, 0.2)) for _ in range(4)]
            await asyncio.sleep(0.01)
            began_at = requests.now()
            assert await requests.run(ACME) == pytest.approx(began_at)
        processed_at = [each.result() for each in hogs]
        assert processed_at == sorted(processed_at), "its requests are not in their order"

    run_virtual(run())


def test_requests_that_are_refused_count() -> None:
    async def refuse() -> None:
        raise Problem.__new__(Problem)

    async def run() -> None:
        requests = Requests()
        others = asyncio.create_task(requests.send_often(OPERATOR, 100))
        await asyncio.sleep(0)
        began_at = requests.now()
        for _ in range(1000):
            with pytest.raises(Problem):
                await requests.shares.run(HOG, refuse)
        burst_s = LOOP_SHARE.burst
        expected_s = (1000 * REQUEST_S - burst_s) / LOOP_SHARE.per_s
        assert requests.now() - began_at == pytest.approx(expected_s, rel=0.1)
        others.cancel()

    run_virtual(run())


def test_time_in_which_a_request_waits_does_not_count() -> None:
    async def wait() -> None:
        await asyncio.sleep(3600)

    async def run() -> None:
        requests = Requests()
        await requests.shares.run(HOG, wait)
        requests.shares.note(OPERATOR)
        began_at = requests.now()
        assert await requests.run(HOG) == began_at

    run_virtual(run())


def test_a_tenant_that_has_no_time_left_for_too_long_is_refused() -> None:
    async def run() -> None:
        requests = Requests()
        await requests.run(HOG, 60)
        requests.shares.note(OPERATOR)
        began_at = requests.now()
        with pytest.raises(Problem, match="more than its share of the API's processor time"):
            await requests.run(HOG)
        assert requests.now() - began_at == pytest.approx(CONNECTION_WAIT_S)

    run_virtual(run())


def test_a_request_runs_as_without_being_measured() -> None:
    """It returns and raises the same, sees its cancellation, and may wait for anything."""
    seen: list[object] = []

    async def process(step: Callable[[], Awaitable[Any]]) -> object:
        try:
            async with asyncio.timeout(5):
                return await step()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        finally:
            await asyncio.sleep(1)
            seen.append("ended")

    async def fail() -> None:
        await asyncio.sleep(0)
        raise LookupError("nothing there")

    async def run() -> None:
        shares = Requests().shares
        assert await shares.run(HOG, lambda: process(lambda: asyncio.sleep(1, "slept"))) == "slept"
        with pytest.raises(LookupError, match="nothing there"):
            await shares.run(HOG, lambda: process(fail))
        with pytest.raises(TimeoutError):
            await shares.run(HOG, lambda: process(lambda: asyncio.sleep(60)))
        task = asyncio.create_task(
            shares.run(HOG, lambda: process(lambda: asyncio.sleep(60)))  # type: ignore[arg-type]
        )
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["ended", "ended", "ended", "cancelled", "ended"]

    run_virtual(run())


class Body:
    """What a request holds in memory."""


def test_what_a_cancelled_request_holds_is_freed_at_once() -> None:
    async def run() -> None:
        shares, kept = Requests().shares, []

        async def process() -> None:
            body = Body()
            kept.append(weakref.ref(body))
            await asyncio.sleep(60)

        task = asyncio.create_task(shares.run(HOG, process))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        del task
        assert kept[0]() is None, "a reference cycle keeps it"

    gc.disable()
    try:
        run_virtual(run())
    finally:
        gc.enable()


async def test_tenants_of_the_api_have_shares_and_operators_are_not_limited(
    database: Database, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    hog, acme = [
        api.with_token(await make_token(database, tenant, tenant=tenant))
        for tenant in ("hog", "acme")
    ]
    for each in (api, hog, acme):
        assert (await each.get("/v1/endpoints")).status == 200
    monkeypatch.setattr(loop_time, "CONNECTION_WAIT_S", 0.05)
    monkeypatch.setattr(loop_time, "PRESENT_S", 3600)
    monkeypatch.setattr(LoopTime, "_wait_s", lambda _, holder: 60.0 * (holder == HOG))
    refused = await hog.post("/v1/events", data=b"not even JSON")
    assert refused.status == 429
    assert "share of the API's processor time" in refused.detail
    assert refused.headers["Retry-After"] == "1"
    for each in (api, acme):
        assert (await each.get("/v1/endpoints")).status == 200


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[serving.Connections]:
    """Those of each listener that is opened after this fixture, of which each has at most five."""
    opened: list[serving.Connections] = []

    class FewConnections(serving.Connections):
        def __init__(self, server: Any, _: int, log: Any) -> None:
            super().__init__(server, 5, log)
            opened.append(self)

    monkeypatch.setattr(serving, "Connections", FewConnections)
    return opened


@pytest.mark.system
@pytest.mark.parametrize("body", ["", "{"], ids=["no body", "half a body"])
async def test_requests_that_wait_for_their_share_do_not_keep_others_out(
    body: str,
    connections: list[serving.Connections],
    database: Database,
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hog = await make_token(database, "hog", tenant="hog")
    monkeypatch.setattr(loop_time, "CONNECTION_WAIT_S", 60)
    monkeypatch.setattr(LoopTime, "_wait_s", lambda _, holder: 60.0 * (holder == HOG))
    request = (
        f"GET /v1/endpoints HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {hog}\r\n"
        f"Content-Length: {2 * len(body)}\r\n\r\n{body}"
    ).encode()
    at = parse_address(api.url.removeprefix("http://"))
    waiting = connections[0].waiting

    share = serving.Awaited.SHARE

    def of_the_hog() -> int:
        return sum(len(each) for (_, awaited), each in waiting.items() if awaited is share)

    async with AsyncExitStack() as stack:
        for _ in range(6):
            _, writer = await asyncio.open_connection(at.host, at.port)
            stack.callback(writer.close)
            writer.write(request)
            await asyncio.sleep(0.05)
        await until(lambda: of_the_hog() == 5, what="the requests that wait")
        for _ in range(3):
            assert (await api.get("/v1/endpoints")).status == 200
        assert of_the_hog() == 4

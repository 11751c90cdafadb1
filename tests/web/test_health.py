"""The health listener: frequent requests and disconnects cost no more than one request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest

from outbox.web.address import Address
from outbox.web.health import application
from outbox.web.serving import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HERE = Address("127.0.0.1", 0)


class Metrics:
    """A metrics source that blocks until it is released."""

    def __init__(self) -> None:
        self.at_once = self.at_most = self.requests = 0
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, accept: str) -> tuple[bytes, str]:
        self.requests += 1
        self.at_once += 1
        self.at_most = max(self.at_most, self.at_once)
        self.begun.set()
        await self.go_on.wait()
        self.at_once -= 1
        return accept.encode(), "text/plain"


@pytest.fixture
async def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def url(metrics: Metrics) -> AsyncIterator[str]:
    async with serving(application(lambda: None, metrics), HERE) as address:
        yield address.url


async def test_a_disconnected_client_causes_no_second_snapshot(metrics: Metrics, url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(5):
            metrics.begun.clear()
            asking = asyncio.ensure_future(session.get(f"{url}metrics"))
            if not metrics.requests:
                await metrics.begun.wait()
            else:
                await (await session.get(f"{url}healthz")).read()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        last = asyncio.ensure_future(session.get(f"{url}metrics"))
        await (await session.get(f"{url}healthz")).read()
        metrics.go_on.set()
        assert (await last).status == 200
    # The last request may have arrived just after the first snapshot ended.
    assert metrics.at_most == 1
    assert metrics.requests <= 2


async def test_formats_are_rendered_one_after_the_other(metrics: Metrics, url: str) -> None:
    metrics.go_on.set()
    async with aiohttp.ClientSession() as session:

        async def request_health(accept: str) -> str:
            async with session.get(f"{url}metrics", headers={"Accept": accept}) as response:
                return await response.text()

        texts = ["a", "b", "a", "c"]
        assert await asyncio.gather(*map(request_health, texts)) == texts
    assert metrics.at_most == 1


async def test_the_response_says_why_the_relay_is_not_ready() -> None:
    async with (
        serving(application(lambda: "its lease ran out", Metrics()), HERE) as address,
        aiohttp.ClientSession() as session,
    ):
        response = await session.get(f"{address.url}readyz")
        assert (response.status, await response.text()) == (503, "not ready: its lease ran out\n")
        assert (await session.get(f"{address.url}healthz")).status == 200
        assert (await session.get(f"{address.url}elsewhere")).status == 404

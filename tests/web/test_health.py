"""The health listener: who asks often, or hangs up, costs no more than who asks once."""

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
    """Takes as long as it is told to."""

    def __init__(self) -> None:
        self.at_once = self.at_most = self.asked = 0
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, accept: str) -> tuple[bytes, str]:
        self.asked += 1
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


async def test_who_hangs_up_leaves_no_second_look_behind(metrics: Metrics, url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(5):
            metrics.begun.clear()
            asking = asyncio.ensure_future(session.get(f"{url}metrics"))
            if not metrics.asked:
                await metrics.begun.wait()
            else:
                await (await session.get(f"{url}healthz")).read()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        last = asyncio.ensure_future(session.get(f"{url}metrics"))
        await (await session.get(f"{url}healthz")).read()
        metrics.go_on.set()
        assert (await last).status == 200
    # The last one may have come when the first look had just ended.
    assert metrics.at_most == 1
    assert metrics.asked <= 2


async def test_formats_are_rendered_one_after_the_other(metrics: Metrics, url: str) -> None:
    metrics.go_on.set()
    async with aiohttp.ClientSession() as session:

        async def ask(accept: str) -> str:
            async with session.get(f"{url}metrics", headers={"Accept": accept}) as answer:
                return await answer.text()

        texts = ["a", "b", "a", "c"]
        assert await asyncio.gather(*map(ask, texts)) == texts
    assert metrics.at_most == 1


async def test_why_it_is_not_ready_is_told() -> None:
    async with (
        serving(application(lambda: "its lease ran out", Metrics()), HERE) as address,
        aiohttp.ClientSession() as session,
    ):
        answer = await session.get(f"{address.url}readyz")
        assert (answer.status, await answer.text()) == (503, "not ready: its lease ran out\n")
        assert (await session.get(f"{address.url}healthz")).status == 200
        assert (await session.get(f"{address.url}elsewhere")).status == 404

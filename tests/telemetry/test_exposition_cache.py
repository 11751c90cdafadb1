"""The exposition cache: any number of scrapes costs one snapshot a second."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import aiohttp
import pytest

from outbox.telemetry.exposition_cache import MAX_AGE_S, ExpositionCache
from outbox.telemetry.prometheus import ExpositionFormat, PrometheusRenderer, negotiate_format
from outbox.telemetry.snapshot import Snapshot
from outbox.web.address import Address
from outbox.web.health import application
from outbox.web.serving import listen, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TEXT, OPENMETRICS = ExpositionFormat


class Renderer(PrometheusRenderer):
    """Counts renderings by format."""

    def __init__(self) -> None:
        super().__init__({})
        self.renderings: Counter[ExpositionFormat] = Counter()

    def render(self, snapshot: Snapshot, chosen: ExpositionFormat) -> tuple[bytes, str]:
        self.renderings[chosen] += 1
        _, content_type = super().render(snapshot, chosen)
        return f"{snapshot.at}".encode(), content_type


class Source:
    """Snapshots, numbered by their time, that wait for `go_on`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.snapshots = 0
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.renderer = Renderer()
        self.cache = ExpositionCache(self._take_snapshot, self.renderer, lambda: self.now_s)

    async def _take_snapshot(self) -> Snapshot:
        self.snapshots += 1
        self.begun.set()
        await self.go_on.wait()
        return Snapshot(0.0, float(self.snapshots), {})


@pytest.fixture
async def source() -> Source:
    return Source()


@pytest.fixture
async def url(source: Source) -> AsyncIterator[str]:
    health = application(Address("127.0.0.1", 0), lambda: None, source.cache.exposition)
    async with serving(health, await listen(Address("127.0.0.1", 0))) as address:
        yield address.url


@pytest.mark.system
async def test_a_hundred_accept_headers_cost_one_snapshot(source: Source, url: str) -> None:
    async with aiohttp.ClientSession() as session:

        async def scrape(accept: str) -> str:
            async with session.get(f"{url}metrics", headers={"Accept": accept}) as response:
                assert response.status == 200
                return await response.text()

        accepts = [
            *(f"a/{number}" for number in range(50)),
            *(f"application/openmetrics-text;version={number}.x" for number in range(50)),
        ]
        pages = await asyncio.gather(*map(scrape, accepts))
        pages += [await scrape(accept) for accept in accepts[::10]]
    assert set(pages) == {"1.0"}
    assert source.snapshots == 1
    assert source.renderer.renderings == {TEXT: 1, OPENMETRICS: 1}


async def test_a_page_is_never_older_than_a_second(source: Source) -> None:
    for now_s, page in ((0.0, b"1.0"), (MAX_AGE_S * 0.99, b"1.0"), (MAX_AGE_S, b"2.0")):
        source.now_s = now_s
        assert (await source.cache.exposition(""))[0] == page


async def test_slow_snapshots_do_not_pile_up(source: Source) -> None:
    source.go_on.clear()
    scrapes = []
    for _ in range(10):
        scrapes.append(asyncio.create_task(source.cache.exposition("")))
        await asyncio.sleep(0)
        source.now_s += 2 * MAX_AGE_S
    source.go_on.set()
    assert {page for page, _ in await asyncio.gather(*scrapes)} == {b"1.0"}


@pytest.mark.system
async def test_a_disconnected_client_causes_no_second_snapshot(source: Source, url: str) -> None:
    source.go_on.clear()
    async with aiohttp.ClientSession() as session:
        asking = asyncio.ensure_future(session.get(f"{url}metrics"))
        await source.begun.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        source.now_s += 2 * MAX_AGE_S
        last = asyncio.ensure_future(session.get(f"{url}metrics"))
        await (await session.get(f"{url}healthz")).read()
        source.go_on.set()
        assert (await last).status == 200
    # The last request may have arrived just after the first snapshot ended.
    assert source.snapshots <= 2


async def test_a_failed_snapshot_is_taken_again_after_a_second(source: Source) -> None:
    async def fail() -> Snapshot:
        source.snapshots += 1
        raise ConnectionError("cut off")

    cache = ExpositionCache(fail, source.renderer, lambda: source.now_s)
    for now_s, snapshots in ((0.0, 1), (0.5, 1), (MAX_AGE_S, 2)):
        source.now_s = now_s
        with pytest.raises(ConnectionError, match="cut off"):
            await cache.exposition("")
        assert source.snapshots == snapshots


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/plain;version=0.0.4", TEXT),
        # Prometheus 3.
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.3", OPENMETRICS),
        ("text/plain;q=0.3, Application/OpenMetrics-Text ; version=junk", OPENMETRICS),
        ("application/openmetrics-textual", TEXT),
    ],
)
def test_the_accept_header_selects_the_format(accept: str, chosen: ExpositionFormat) -> None:
    assert negotiate_format(accept) is chosen

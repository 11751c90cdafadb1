"""Latency of each view of the page on a database with a large history, compared with a small one.

Uses a real browser, from the navigation to the moment at which the view shows its content.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from benchmarks import history
from benchmarks.commands import EVENT
from benchmarks.figures import Rounds, Row, Target
from benchmarks.history import LARGE, QUICK, SMALL
from benchmarks.stage import search
from outbox.errors import CannotRun
from outbox.store.retention.partitions import PartitionStore
from tests.support.api import make_token, serving
from tests.support.chromium import browsing, chromium

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from benchmarks.history import Past
    from benchmarks.stage import Stage
    from tests.support.postgres import Database

TARGET = Target("at most", 3.0)
TIMEOUT_MS = 60_000

# A view, its address, and the element that proves that it is rendered.
VIEWS = {
    "overview": ("overview", ".tile"),
    "endpoints": ("endpoints", "tbody tr"),
    "an endpoint": ("endpoint/e7", ".facts"),
    "dead letters": ("dead-letters", "tbody tr"),
    "dead letters of an endpoint": ("dead-letters?endpoint=e0", "tbody tr"),
    "a dead letter": ("dead-letter/3", ".facts"),
    "events": ("events", "tbody tr"),
    "events of a type": ("events?type=t7.made", "tbody tr"),
    "events of a key": (f"events?key=k{EVENT // 2}", "tbody tr"),
    "trace of an event": (f"events/{EVENT:032x}", "article svg .delivery"),
    "schedules": ("schedules", "p.hint"),
    "replicas": ("replicas", "p.hint"),
}


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Open each view on both databases, alternating."""
    return await run(stage, rounds, QUICK if quick else LARGE)


async def run(stage: Stage, rounds: int, past: Past) -> list[Row]:
    """Run with another history.

    Raises:
        CannotRun: There is no browser.
    """
    if chromium() is None:
        raise CannotRun("the section `pages` needs chromium: apt-get install chromium")
    ours, baseline = Rounds(), Rounds()
    async with AsyncExitStack() as stack:
        large = await stack.enter_async_context(stage.server.database())
        small = await stack.enter_async_context(stage.server.database())
        browser = await stack.enter_async_context(browsing())
        pages = []
        for database, what, samples in ((small, SMALL, baseline), (large, past, ours)):
            stage.say(f"pages: writing {what.events:,} events of {what.endpoints:,} endpoints")
            await _fill(stage, database, what)
            api = await stack.enter_async_context(serving(database))
            pages.append((api.url, await make_token(database), samples))
        for number in range(rounds + 1):
            for name, (address, shown) in VIEWS.items():
                for url, token, samples in pages:
                    took_ms = await _render_ms(browser, f"{url}/#/{address}", token, shown)
                    # The first round opens connections and fills caches, on both.
                    if number:
                        samples.add(name, took_ms)
            stage.say(f"pages, round {number} of {rounds}")
    few = f"{SMALL.events} events, {SMALL.endpoints} endpoints"
    return [
        Row(
            "pages",
            name,
            "ms",
            ours.samples_of(name),
            few,
            baseline.samples_of(name),
            target=TARGET,
        )
        for name in VIEWS
    ]


async def _fill(stage: Stage, database: Database, past: Past) -> None:
    async with search(database) as connection:
        await history.write(connection, stage.urls["http"], past)
        await PartitionStore(connection).summarize()


async def _render_ms(browser: Browser, url: str, token: str, shown: str) -> float:
    """Return the milliseconds from the navigation until the view is rendered in a new tab."""
    context = await browser.new_context()
    try:
        await context.add_init_script(f"sessionStorage.setItem('outbox-token', '{token}')")
        page = await context.new_page()
        await page.goto(url, wait_until="commit")
        seen = await page.wait_for_function(
            f"() => document.querySelector({shown!r}) && performance.now()", timeout=TIMEOUT_MS
        )
        return float(await seen.json_value())
    finally:
        await context.close()

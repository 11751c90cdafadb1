"""Nothing jumps while a view loads, and a row of a list has one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from packages.api.tests.page.shop import shop
from packages.api.tests.page.test_accessibility import PLACES

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.full,
]

SHIFT_MAX = 0.05
# The sum of https://web.dev/articles/cls, since the page was loaded.
SHIFTS = """() => new Promise((resolve) => {
    new PerformanceObserver((list) => resolve(list.getEntries().map(
        ({ value, sources }) => [value, sources.map(({ node }) => node?.outerHTML?.slice(0, 90))],
    ))).observe({ type: "layout-shift", buffered: true });
    setTimeout(() => resolve([]), 1000);
})"""


@pytest.mark.parametrize("phone", [False, True])
async def test_nothing_jumps_while_a_view_loads(
    database: Database, phone: bool, subtests: pytest.Subtests
) -> None:
    async with shop(database, phone=phone, findings=()) as here:
        visitor, page = here.visitor, here.visitor.page
        for place in (*PLACES, "endpoint/sick/settings", "endpoint/sick/journal"):
            with subtests.test(place):
                await visitor.open(place)
                await page.reload()
                await visitor.wait_for(page.get_by_role("heading").first)
                await expect(page.get_by_text("Loading…")).to_have_count(0, timeout=30_000)
                await visitor.settle()
                shifts = await page.evaluate(SHIFTS)
                assert sum(value for value, _ in shifts) <= SHIFT_MAX, shifts

"""Three thousand endpoints on one page, of which only the rows near the window are elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from tests.support.api import make_token, serving
from tests.support.browser import visiting

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.full,
]

FILL = """
INSERT INTO endpoint (id, name, url, retry, lanes)
SELECT gen_random_uuid(), 'customer-' || n, 'http://receiver.test/' || repeat('path/', n % 40),
       '{}', 1
  FROM generate_series(1, 3000) n;
INSERT INTO endpoint_health (endpoint_id) SELECT id FROM endpoint;
INSERT INTO subscription (endpoint_id, from_batch, types, tenant, all_tenants)
SELECT id, 1, types, tenant, all_tenants FROM endpoint;
ANALYZE;
"""
# Scrolls through the whole page, and returns the longest frame in ms and the most rows.
SCROLL = """async () => {
    let longest = 0;
    let rows = 0;
    let last = performance.now();
    while (scrollY + innerHeight < document.documentElement.scrollHeight - 1) {
        scrollBy(0, 700);
        await new Promise(requestAnimationFrame);
        const now = performance.now();
        longest = Math.max(longest, now - last);
        last = now;
        rows = Math.max(rows, document.querySelectorAll("tbody tr:not(.space)").length);
    }
    return [longest, rows];
}"""
# Whether the rows that are elements fill the window.
FILLED = """() => {
    const rows = [...document.querySelectorAll("tbody tr:not(.space)")];
    const head = document.querySelector("thead").getBoundingClientRect().bottom;
    const end = document.querySelector("table").getBoundingClientRect().bottom;
    return rows[0].getBoundingClientRect().top <= Math.max(head, 0) + 1
        && rows.at(-1).getBoundingClientRect().bottom >= Math.min(innerHeight, end) - 1;
}"""


async def test_three_thousand_endpoints_are_scrolled_through(database: Database) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        await connection.execute(FILL)
    secret = await make_token(database, "me")
    async with serving(database) as api, visiting(api.url) as visitor:
        page = visitor.page
        await visitor.sign_in(secret)
        await visitor.open("endpoints")
        await visitor.wait_for(page.get_by_text("Select all 3,000 on this page"))
        table = page.get_by_role("table")
        await expect(table).to_have_attribute("aria-rowcount", "3001")
        longest_ms, rows = await page.evaluate(SCROLL)
        print(f"longest frame {longest_ms:.0f} ms, {rows} rows")
        assert rows < 200, "rows that are elements"
        await visitor.wait_for(page.get_by_role("link", name="customer-3000"))
        assert await page.evaluate(FILLED)
        await page.evaluate("() => scrollTo(0, 30_000)")
        await expect(page.get_by_role("link", name="customer-1", exact=True)).to_have_count(0)
        assert await page.evaluate(FILLED)
        # A refresh moves nothing.
        link = page.locator("tbody a").nth(30)
        before = await link.bounding_box()
        async with page.expect_response("**/v1/endpoints?*after=customer-2799*"):
            await page.evaluate("dispatchEvent(new Event('online'))")
        await visitor.settle()
        assert await link.bounding_box() == before
        await visitor.filter_by("customer-29")
        await visitor.wait_for(page.get_by_text("Select all 111 on this page"))
        await page.locator("tbody a").first.focus()
        assert visitor.complaints == []

"""The overview's list of what needs attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from tests.page.browser import PHONE, visiting
from tests.page.shop import shop
from tests.support.api import make_token, serving

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
]


async def test_failing_lanes_come_before_dead_letters_each_with_its_action(
    database: Database,
) -> None:
    async with shop(database, phone=True) as here:
        visitor, page = here.visitor, here.visitor.page
        needs = page.get_by_role("region", name="Needs attention")
        items = needs.get_by_role("listitem")
        await expect(items).to_have_count(2)
        await expect(items.nth(0)).to_contain_text("sick")
        await expect(items.nth(0)).to_contain_text("last response 503")
        await expect(items.nth(1)).to_contain_text("strict: 3 dead letters wait for a decision")
        # Lanes of healthy endpoints without pending deliveries are collapsed.
        await expect(page.locator(".lanelist li", has_text="well")).to_be_hidden()
        assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        await visitor.press("Skip", inside=items.nth(0))
        await visitor.wait_for(visitor.dialog.get_by_role("heading", name="Skip sequence"))
        await page.keyboard.press("Escape")
        await items.nth(1).get_by_role("link", name="Replay or discard…").click()
        await visitor.wait_for(page.get_by_role("heading", name="Dead letters"))
        assert page.url.endswith("#/dead-letters?endpoint=strict")


async def test_without_a_relay_that_is_what_needs_attention(database: Database) -> None:
    secret = await make_token(database, "me")
    async with serving(database) as api, visiting(api.url) as visitor:
        await visitor.sign_in(secret)
        await visitor.wait_for("No relay is running: nothing is delivered.")

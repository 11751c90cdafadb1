"""The delivery log: filters as chips, a list that stays, and a delivery in a panel beside it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import pytest
from playwright.async_api import expect

from packages.api.tests.page.shop import shop
from tests.support.api import make_token, serving
from tests.support.browser import visiting
from tests.support.relay import fetchval, publish
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.mark.slow
async def test_a_failed_delivery_is_found_and_opened_beside_the_list(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("endpoint/strict")
        rows = page.locator(".pages tbody tr")
        await expect(rows).to_have_count(3)
        field = page.get_by_role("combobox", name="Filters")
        await field.fill("failed status:4xx order-1")
        await field.press("Enter")
        await expect(rows).to_have_count(1)
        await expect(rows).to_contain_text("refused")
        chips = page.locator(".searched .chip")
        await expect(chips).to_have_text([re.compile(each) for each in CHIPS])

        await rows.locator("a.id").click()
        panel = page.get_by_role("complementary", name="Delivery")
        await expect(panel).to_contain_text("Request of attempt 1, rebuilt without its signature")
        await expect(panel.locator("pre").last).to_contain_text("POST http://receiver.test/strict")
        await expect(panel).to_contain_text("400")
        await expect(rows, "the list stays").to_have_count(1)
        assert "show=" in page.url
        await page.keyboard.press("Escape")
        await expect(panel).to_be_hidden()
        await expect(rows.locator("a.id")).to_be_focused()

        # The last chip is edited again, and a link keeps the filters.
        await page.get_by_role("button", name="Remove the filter status:4xx").click()
        await expect(chips).to_have_count(2)
        await field.press("Backspace")
        await expect(chips).to_have_count(1)
        assert "endpoint/strict?key=order-1" in page.url
        assert visitor.complaints == []


CHIPS = ("status:4xx", "key:order-1", "failed")


@pytest.mark.full
async def test_the_list_is_live_and_a_delivery_is_sent_again_from_its_panel(
    database: Database,
) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("deliveries?endpoint=well")
        rows = page.locator(".pages tbody tr")
        await expect(rows).to_have_count(3)
        await publish(database, {"order": 99}, type="order.paid", key="order-99")
        await expect(rows.first).to_contain_text("order-99", timeout=30_000)
        await rows.first.locator("a.id").focus()
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Enter")
        panel = page.get_by_role("complementary", name="Delivery")
        await visitor.press("Send again…", inside=panel)
        await visitor.press("Send again", inside=visitor.dialog)
        again = "SELECT count(*) FROM delivery WHERE backfill_id IS NOT NULL"
        await until(lambda: fetchval(database, again), what="another delivery")
        await expect(rows).to_have_count(5, timeout=30_000)


@pytest.mark.full
async def test_without_an_endpoint_the_page_says_what_to_name(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await page.keyboard.press("g")
        await page.keyboard.press("l")
        await visitor.wait_for("Name an endpoint, a tenant, a key or an event:")
        await page.keyboard.press("/")
        await page.keyboard.type("order-2")
        await page.keyboard.press("Enter")
        await expect(page.locator("tbody tr")).to_have_count(3)
        await visitor.open("deliveries?event=00000000-0000-4000-8000-000000000000")
        await visitor.wait_for("no event")


@pytest.mark.full
async def test_a_tenant_sees_its_own_and_a_phone_shows_the_panel_alone(database: Database) -> None:
    async with shop(database, tenant="acme", scopes=("read",), phone=True) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("deliveries")
        rows = page.locator(".pages tbody tr")
        await expect(rows).to_have_count(1)
        await expect(rows).to_contain_text("acme")
        await rows.locator("a.id").click()
        panel = page.get_by_role("complementary", name="Delivery")
        await expect(panel).to_contain_text("sequence 1 of lane")
        await expect(panel.get_by_role("button", name="Send again…")).to_have_count(0)
        assert await visitor.fits()
        await panel.get_by_role("button", name="Close").click()
        await expect(panel).to_be_hidden()


EVENT = "0f0e0d0c-0b0a-4988-8776-655443322110"
TYPED = (
    ("order-7", {"key": "order-7"}),
    ('"order 7" failed', {"key": "order 7", "failed": "true"}),
    ('key:"order 7" STATUS:5xx', {"key": "order 7", "status": "5xx"}),
    (f"endpoint:shop {EVENT.upper()}", {"endpoint": "shop", "event": EVENT.upper()}),
    ("order:7", {"key": "order:7"}),
    ("pending since:2h", {"outcome": "pending", "since": "2h"}),
    ("https://a.test/b?c=d", {"key": "https://a.test/b?c=d"}),
    ('since:1h key:""', {"since": "1h"}),
)


@pytest.mark.full
async def test_what_is_typed_is_in_the_url(database: Database, subtests: pytest.Subtests) -> None:
    async with serving(database) as api, visiting(api.url) as visitor:
        await visitor.sign_in(await make_token(database, "me"))
        for typed, filters in TYPED:
            with subtests.test(typed):
                await visitor.open("deliveries")
                await visitor.filter_by(typed)
                await visitor.page.wait_for_url("**/#/deliveries?*")
                found = parse_qsl(visitor.page.url.partition("?")[2])
                assert dict(found) == filters
        await visitor.open("deliveries")
        await visitor.filter_by("state:dead")
        field = visitor.main.get_by_role("combobox", name="Filters")
        reason = await field.evaluate("each => each.validationMessage")
        assert reason.startswith(
            "There is no filter “state” here, but endpoint, tenant, status, outcome"
        )
        assert visitor.page.url.endswith("#/deliveries")


@pytest.mark.full
async def test_another_filter_keeps_the_place_and_the_focus(database: Database) -> None:
    async with shop(database, phone=True) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("endpoint/strict")
        rows = page.locator(".pages tbody tr")
        await expect(rows).to_have_count(3)
        field = visitor.main.get_by_role("combobox", name="Filters")
        await field.scroll_into_view_if_needed()
        top = await page.evaluate("scrollY")
        assert top > 0
        await visitor.filter_by("order-1")
        await expect(rows).to_have_count(1)
        await expect(field).to_be_focused()
        assert await page.evaluate("scrollY") == pytest.approx(top, abs=2)
        await page.keyboard.press("ArrowDown")
        await expect(rows.locator("a").first).to_be_focused()

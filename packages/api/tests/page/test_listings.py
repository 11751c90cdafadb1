"""Listings refresh by themselves, and keep what a visitor has opened or loaded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from outbox.operations.endpoints import states as endpoint_states
from packages.api.tests.page.shop import shop
from tests.support.api import make_token, serving
from tests.support.browser import visiting
from tests.support.relay import add_endpoint, publish

if TYPE_CHECKING:
    from playwright.async_api import Route

    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.full,
]


async def test_new_events_and_entries_are_listed_while_others_stay_open(
    database: Database,
) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("events")
        first = page.locator("tbody tr").first
        await visitor.wait_for(first)
        await publish(database, {"order": 99}, type="order.paid", key="order-99")
        await expect(first).to_contain_text("order-99", timeout=30_000)
        await visitor.open("journal")
        older = page.locator("tbody tr", has_text="endpoint added").first
        await older.locator("summary").click()
        async with database.at_hand() as connection:
            await endpoint_states.pause_endpoints(connection, "relay", ["well"], actor="test")
        await expect(first).to_contain_text("endpoint paused", timeout=30_000)
        await expect(older.locator("details")).to_have_attribute("open", "")


async def test_a_refresh_in_flight_does_not_undo_load_more(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        for n in range(60):
            await publish(database, {"order": n}, type="quiet", key=f"quiet-{n}")
        await visitor.open("events")
        rows = page.locator("tbody tr")
        await expect(rows).to_have_count(50)
        refreshes, released = asyncio.Event(), asyncio.Event()

        async def hold_refresh(route: Route) -> None:
            if "after=" not in route.request.url:
                refreshes.set()
                await released.wait()
            await route.continue_()

        await page.route("**/v1/events?*", hold_refresh)
        await asyncio.wait_for(refreshes.wait(), 30)
        await visitor.press("Load more")
        await expect(rows).to_have_count(64)
        # After the refresh, the view only checks the connection.
        async with page.expect_request("**/v1/me"):
            released.set()
        await expect(rows).to_have_count(64)


HEIGHTS = "() => [...document.querySelectorAll('tbody tr')].map((each) => each.offsetHeight)"


async def test_endpoints_are_in_natural_order_and_a_row_has_one_line(database: Database) -> None:
    path = "a-very-long-path/" * 20
    for n in (10, 9, 1):
        await add_endpoint(database, f"to-{n}", url=f"https://receiver.test/{path}{n}")
    await add_endpoint(database, "a " * 60 + "name", types=[f"type-{n}.*" for n in range(30)])
    secret = await make_token(database)
    async with serving(database) as api, visiting(api.url) as visitor:
        await visitor.sign_in(secret)
        await visitor.open("endpoints")
        names = visitor.page.locator("tbody tr td:nth-child(2)")
        await expect(names).to_have_count(4)
        assert [each.strip() for each in await names.all_text_contents()][1:] == [
            "to-1",
            "to-9",
            "to-10",
        ]
        heights = await visitor.page.evaluate(HEIGHTS)
        assert max(heights) < 50, heights

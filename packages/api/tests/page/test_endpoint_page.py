"""The page of an endpoint: tabs, a menu with Remove apart, present lanes, ranges of charts."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from outbox.operations.endpoints import changes as endpoint_changes
from packages.api.tests.page.shop import shop
from tests.support.api import make_token, serving
from tests.support.browser import visiting
from tests.support.relay import add_endpoint, fetchval

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.mark.slow
async def test_tabs_have_urls_and_the_menu_closes(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("endpoint/strict")
        tabs = visitor.main.get_by_role("navigation").get_by_role("link")
        await expect(tabs).to_have_text(["Deliveries", "Settings", "Journal"])
        await expect(page.locator(".pages tbody tr")).to_have_count(3)
        await visitor.filter_by("failed key:order-1")
        await expect(page.locator(".pages tbody tr")).to_have_count(1)
        await expect(page).to_have_url(f"{visitor.url}/#/endpoint/strict?failed=true&key=order-1")
        await tabs.get_by_text("Settings").click()
        await expect(page).to_have_url(f"{visitor.url}/#/endpoint/strict/settings")
        await visitor.wait_for("Ownership history")
        await expect(page.locator(".pages")).to_have_count(0)
        await tabs.get_by_text("Journal").click()
        await expect(page.locator("tbody tr").last).to_contain_text("endpoint added")
        await page.go_back()
        await visitor.wait_for("Ownership history")

        menu = page.locator("details.menu")
        items = menu.locator(".items")
        for is_by_key in (True, False):
            await menu.locator("summary").click()
            await expect(items).to_be_visible()
            await (page.keyboard.press("Escape") if is_by_key else page.locator("h1").click())
            await expect(items).to_be_hidden()
        # Remove is apart, and red.
        assert await items.locator("> *").last.text_content() == "Remove"
        before = items.locator("> *").nth(-2)
        assert await before.evaluate("each => each.tagName") == "HR"
        await visitor.choose("Remove")
        await visitor.wait_for(visitor.dialog.get_by_role("heading", name="Remove strict?"))
        await expect(items).to_be_hidden()
        assert visitor.complaints == []


@pytest.mark.full
async def test_the_number_of_lanes_is_that_of_the_present_generation(database: Database) -> None:
    await add_endpoint(database, "shop", lanes=4)
    secret = await make_token(database, "me")
    async with database.at_hand() as connection:
        for lanes in (7, 2):
            await endpoint_changes.update_endpoint(
                connection, "relay", "shop", partial(replace, lanes=lanes), actor="test"
            )
    assert await fetchval(database, "SELECT count(*) FROM lane") > 2
    async with serving(database) as api, visiting(api.url) as visitor:
        await visitor.sign_in(secret)
        await visitor.open("endpoint/shop")
        heading = visitor.page.get_by_role("heading", name="Lanes")
        await expect(heading).to_have_text("Lanes 2")


# Half an hour, and a slow hour half a day ago.
RECENT = """
INSERT INTO delivery_history (endpoint_id, slot, began_at, successes, failures, latencies)
SELECT e.id, n % 288, to_timestamp(n * 300), 100, 0,
       CASE WHEN $2 THEN ARRAY[0, 0, 0, 0, 0, 0, 0, 0, 100, 0, 0, 0, 0]
            ELSE ARRAY[0, 0, 100, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0] END
  FROM endpoint e,
       generate_series(floor(extract(epoch FROM now()) / 300)::bigint - $1::int - 4,
                       floor(extract(epoch FROM now()) / 300)::bigint - $1::int) n
"""


@pytest.mark.full
async def test_the_range_is_what_exists_and_p99_means_the_same_everywhere(
    database: Database,
) -> None:
    await add_endpoint(database, "shop")
    secret = await make_token(database, "me")
    async with database.at_hand() as connection:
        await connection.execute(RECENT, 1, False)
    async with serving(database) as api, visiting(api.url) as visitor:
        page = visitor.page
        await visitor.sign_in(secret)
        await visitor.open("endpoint/shop")
        ranges = page.get_by_role("group", name="Range of the charts").get_by_role("button")
        durations = page.get_by_role("img", name="Duration of successful requests")
        await expect(ranges.and_(page.locator("[aria-pressed=true]"))).to_have_text("1 h")
        await visitor.wait_for(page.get_by_role("img", name="Last hour: 500 delivered"))
        async with database.at_hand() as connection:
            await connection.execute(RECENT, 140, True)
        await page.reload()
        pressed = ranges.and_(page.locator("[aria-pressed=true]"))
        await expect(pressed).to_have_text("24 h")
        whole = await durations.get_attribute("aria-label")
        await visitor.open("endpoints")
        row = page.locator("tr[data-key=shop]")
        await expect(row.get_by_role("img", name="Last 24 hours")).to_be_visible()
        median, p99 = re.findall(r"median ([^,]+), 99th percentile (.+)", whole or "")[0]
        await expect(row).to_contain_text(f"{median}, {p99}")
        await row.get_by_role("link", name="shop").click()
        await ranges.get_by_text("6 h").click()
        await visitor.wait_for(page.get_by_role("img", name="Last 6 hours: 500 delivered"))
        await expect(durations).not_to_have_attribute("aria-label", re.compile(p99))
        # It is kept where another endpoint is shown.
        await visitor.open("overview")
        await expect(pressed).to_have_text("6 h")


async def test_an_endpoint_that_catches_up_shows_how_far_it_is(database: Database) -> None:
    """Its enabling asks for what it has missed; a new endpoint may begin earlier."""
    await add_endpoint(database, "shop")
    await fetchval(
        database,
        "WITH e AS (UPDATE endpoint SET state = 'disabled' RETURNING id)"
        " UPDATE subscription SET to_batch = 1 FROM e WHERE endpoint_id = e.id",
    )
    secret = await make_token(database, "me")
    async with serving(database) as api, visiting(api.url) as visitor:
        page = visitor.page
        await visitor.sign_in(secret)
        await visitor.open("endpoint/shop")
        await visitor.press("Enable")
        await expect(page.get_by_label("Send it first")).to_be_checked()
        await visitor.press("Enable", inside=visitor.dialog)
        await visitor.wait_for("It first gets what it has missed.")
        await expect(page.locator("dl").first).to_contain_text("Catching up")
        await visitor.open("new-endpoint")
        await page.get_by_label("Name", exact=True).fill("search")
        await page.get_by_label("URL", exact=True).fill("https://search.example/")
        await page.get_by_label("Begin at").fill("beginning")
        await visitor.press("Create endpoint")
        await visitor.press("Done", inside=visitor.dialog)
        await visitor.wait_for("It first gets earlier events.")
    assert await fetchval(database, "SELECT count(*) FROM feed WHERE ended_at IS NULL") == 2

"""The last 24 hours on the page: charts of the overview and of an endpoint, and sparklines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from packages.api.tests.page.shop import shop
from tests.support.api import make_token, serving
from tests.support.browser import visiting
from tests.support.relay import add_endpoint

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
]

# Twenty hours of an endpoint and of the sum: each interval has deliveries in two buckets of the
# histogram, and failures during one hour.
PAST = """
WITH past AS (
    SELECT floor(extract(epoch FROM now()) / 300)::bigint - n AS n, n AS age
      FROM generate_series(12, 240) AS n)
INSERT INTO delivery_history (endpoint_id, slot, began_at, successes, failures, latencies)
SELECT id, n % 288, to_timestamp(n * 300), 100, (age BETWEEN 100 AND 111)::int * 40,
       ARRAY[0, 0, 90, 0, 8, 0, 2, 0, 0, 0, 0, 0, 0]
  FROM past, unnest(ARRAY['00000000-0000-0000-0000-000000000000', $1]::uuid[]) AS id
"""
DELIVERED, FAILED = 229 * 100, 12 * 40


@pytest.mark.full
async def test_the_last_24_hours_are_shown_at_once(database: Database) -> None:
    past = await add_endpoint(database, "past", types=["past.*"])
    async with database.at_hand() as connection:
        await connection.execute(PAST, past.id)
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("endpoints")
        row = page.locator("tr[data-key=past]")
        await expect(row).to_contain_text(f"{100 * DELIVERED / (DELIVERED + FAILED):.1f} %")
        await expect(row.get_by_role("img", name="Last 24 hours")).to_have_attribute(
            "aria-label", f"Last 24 hours: {DELIVERED:,} delivered, {FAILED} failed requests"
        )
        await expect(row).to_contain_text("18 ms, 375 ms")
        await row.get_by_role("link", name="past").click()
        chart = page.get_by_role("img", name="Last 24 hours")
        await expect(chart).to_have_attribute(
            "aria-label", f"Last 24 hours: {DELIVERED:,} delivered, {FAILED} failed requests"
        )
        await expect(chart.locator("rect.r")).to_have_count(12)
        await expect(page.get_by_role("img", name="Duration")).to_have_attribute(
            "aria-label",
            "Duration of successful requests: median 18 ms, 99th percentile 375 ms",
        )
        await visitor.open("overview")
        # With what was delivered meanwhile.
        await visitor.wait_for(page.get_by_role("img", name=re.compile(r"22,9\d\d delivered")))


@pytest.mark.full
async def test_the_history_is_read_after_the_first_paint_once_a_minute(database: Database) -> None:
    async with shop(database) as here:
        page = here.visitor.page
        requested: list[str] = []
        page.on("request", lambda request: requested.append(request.url.split("/v1/")[-1]))
        for place, state in (("overview", "live?"), ("endpoint/well", "endpoints/well")):
            await here.visitor.open("events")
            await here.visitor.wait_for(page.get_by_role("heading", name="Events"))
            requested.clear()
            await here.visitor.open(place)
            for _ in range(3):
                async with page.expect_response(f"**/v1/{state}*"):
                    pass
            histories = [n for n, url in enumerate(requested) if "history" in url]
            assert len(histories) == 1, requested
            assert any(url.startswith(state) for url in requested[: histories[0]]), requested


# An hour of the installation, in which no page was open.
HOUR = """
INSERT INTO installation_history (slot, n, at, seconds, events, deliveries, completed, pending,
                                  batch, sequenced, acked)
SELECT n, n, now() - (359 - n) * interval '10 s', 10, 70, 140, 140, 33, 0, 0, 0
  FROM generate_series(0, 358) n
"""


@pytest.mark.full
@pytest.mark.parametrize("tenant", [None, "acme"])
async def test_the_last_hour_is_shown_at_once_but_to_no_tenant(
    database: Database, tenant: str | None
) -> None:
    secret = await make_token(database, "me", tenant=tenant)
    async with database.at_hand() as connection:
        await connection.execute(HOUR)
    async with serving(database) as api, visiting(api.url) as visitor:
        page = visitor.page
        await visitor.sign_in(secret)
        rates = page.get_by_role("img", name="Per second: events 7.0, deliveries completed 14")
        if tenant is None:
            await expect(rates.locator(".line polyline")).to_have_count(2)
            await expect(rates.locator(".gap")).to_have_count(0)
            whole = await rates.locator("line.grid").first.bounding_box()
            drawn = await rates.locator(".line polyline").first.bounding_box()
            assert whole
            assert drawn
            assert drawn["width"] == pytest.approx(whole["width"], abs=6)
        else:
            # The tile has its own deliveries, of the history that it may see.
            await visitor.wait_for(page.locator(".tile", has_text="Delivered in 24 hours0"))
            await expect(page.get_by_role("img", name="Per second")).to_have_count(0)
            await expect(page.get_by_text("14/s")).to_have_count(0)

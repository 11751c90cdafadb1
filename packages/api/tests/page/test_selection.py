"""Rows are selected one by one, by the page, or all that match the filter, and changed together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from packages.api.tests.page.shop import shop
from tests.support.relay import add_endpoint, fetchval

if TYPE_CHECKING:
    from playwright.async_api import Route

    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.full,
]

# Dead letters with the sequences from $1 to $2.
ADD_DEAD_LETTERS = """
INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, outbox_id, event_id, type,
                         payload, reason, attempts, last_response)
SELECT l.endpoint_id, l.id, 0, n, n, n, gen_random_uuid(), 'order.late', '{}', 'refused', 1,
       '{"status": 410}'
  FROM generate_series($1::bigint, $2::bigint) AS n,
       (SELECT l.* FROM lane l JOIN endpoint e ON e.id = l.endpoint_id
         WHERE e.name = 'well' ORDER BY l.id LIMIT 1) l
"""
STATES = "SELECT array_agg(state ORDER BY name) FROM endpoint"
BY_TYPE = """
SELECT array_agg(type || ' ' || state || ' ' || n ORDER BY type, state)
  FROM (SELECT type, state, count(*) AS n FROM dead_letter GROUP BY type, state) found
"""


async def test_a_selection_survives_pages_and_visits_and_a_filter_clears_it(
    database: Database,
) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await fetchval(database, ADD_DEAD_LETTERS, 1001, 1055)
        await visitor.open("dead-letters?type=order.late")
        await visitor.wait_for("55 dead")
        bar = page.locator(".selection")
        boxes = page.locator("tbody input[type=checkbox]")
        everything = bar.get_by_role("checkbox")
        # By keyboard.
        await everything.focus()
        await page.keyboard.press("Space")
        await expect(bar.get_by_role("status")).to_have_text("All 50 on this page are selected.")
        await visitor.wait_for(bar.get_by_role("button", name="Replay 50"))
        await boxes.nth(3).uncheck()
        await expect(bar.get_by_role("status")).to_have_text("49 selected.")
        assert await everything.evaluate("box => box.indeterminate")
        # A visit of an item.
        await page.locator("tbody tr").nth(5).get_by_role("link").first.click()
        await visitor.wait_for(page.get_by_role("heading", name="Dead letter"))
        await page.go_back()
        await expect(bar.get_by_role("status")).to_have_text("49 selected.")
        await expect(boxes.nth(3)).not_to_be_checked()
        await expect(boxes.nth(4)).to_be_checked()
        # The next page.
        await visitor.press("Load more")
        await expect(boxes).to_have_count(55)
        await boxes.nth(54).check()
        await expect(bar.get_by_role("status")).to_have_text("50 selected.")
        # After a reload of the first page alone, one of them is on another page.
        await page.get_by_role("link", name="Overview").click()
        await visitor.open("dead-letters?type=order.late")
        await expect(bar.get_by_role("status")).to_have_text(
            "50 selected, 1 of them not on this page."
        )
        await visitor.filter_by("reason:refused")
        await expect(bar.get_by_role("button", name="Replay")).to_have_count(0)
        await expect(page.locator("tbody input:checked")).to_have_count(0)


async def test_all_that_match_are_discarded_but_not_what_comes_later(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await fetchval(database, ADD_DEAD_LETTERS, 1001, 1055)
        await visitor.open("dead-letters?type=order.late")
        bar = page.locator(".selection")
        await bar.get_by_role("checkbox").check()
        more = bar.get_by_role("button", name="Select all 55 that match the filter")
        await more.focus()
        await page.keyboard.press("Enter")
        await expect(bar.get_by_role("status")).to_have_text(
            "All 55 dead letters that match the filter are selected."
        )
        await visitor.press("Discard 55")
        await visitor.wait_for(visitor.dialog.get_by_text("55 dead letters will never be sent."))
        await visitor.wait_for(visitor.dialog.get_by_text("is not included"))
        await fetchval(database, ADD_DEAD_LETTERS, 1056, 1056)
        await visitor.press("Discard", inside=visitor.dialog)
        await visitor.wait_for("55 dead letters discarded.")
        assert await fetchval(database, BY_TYPE) == [
            "order.late dead 1", "order.late discarded 55", "order.paid dead 3",
        ]  # fmt: skip
        # Nothing is selected any more, and the new one is shown.
        await expect(page.locator("tbody tr")).to_have_count(1)
        await expect(bar.get_by_role("button")).to_have_count(0)


async def test_endpoints_on_several_pages_are_paused_and_resumed(database: Database) -> None:
    for name in ("shop-1", "shop-2", "shop-3", "shop-off"):
        await add_endpoint(database, name, types=["none"], lanes=1)
    await fetchval(database, "UPDATE endpoint SET state = 'disabled' WHERE name = 'shop-off'")
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page

        async def respond_with_two(route: Route) -> None:
            """As if there were more endpoints than the page reads."""
            response = await route.fetch()
            whole = await response.json()
            await route.fulfill(response=response, json={**whole, "items": whole["items"][:2]})

        await page.route("**/v1/endpoints?*", respond_with_two)
        await visitor.open("endpoints?search=SHOP")
        bar = page.locator(".selection")
        await expect(page.locator("tbody tr")).to_have_count(2)
        await bar.get_by_role("checkbox").check()
        # A refresh keeps it.
        async with page.expect_response("**/v1/endpoints?*"):
            await page.evaluate("dispatchEvent(new Event('online'))")
        await expect(bar.get_by_role("status")).to_have_text("All 2 on this page are selected.")
        await visitor.press("Select all 4 that match the filter")
        await expect(page.locator("tbody input:checked")).to_have_count(2)
        await page.unroute("**/v1/endpoints?*")
        await visitor.press("Pause…")
        await visitor.wait_for(visitor.dialog.get_by_text("3 endpoints will be paused."))
        await visitor.wait_for(visitor.dialog.get_by_text("1 endpoint is left as it is:"))
        await visitor.wait_for(visitor.dialog.get_by_text("is disabled and cannot be paused"))
        # It matches the filter, too, but was not counted.
        await add_endpoint(database, "shop-4", types=["none"])
        await visitor.dialog.get_by_label("Comment").fill("their maintenance")
        await visitor.press("Pause 3 endpoints", inside=visitor.dialog)
        await visitor.wait_for("3 endpoints are paused.")
        assert await fetchval(database, STATES + " WHERE name LIKE 'shop-%'") == [
            "paused", "paused", "paused", "active", "disabled",
        ]  # fmt: skip
        assert await fetchval(database, STATES + " WHERE name NOT LIKE 'shop-%'") == ["active"] * 4
        await expect(bar.get_by_role("button")).to_have_count(0)
        await visitor.filter_by("condition:paused")
        await expect(page).to_have_url(f"{visitor.url}/#/endpoints?search=SHOP&condition=paused")
        await page.get_by_label("Select shop-2").check()
        await visitor.press("Enable…")
        await visitor.wait_for("No endpoint is enabled: ")
        await visitor.press("Resume…")
        await visitor.press("Resume 1 endpoint", inside=visitor.dialog)
        await visitor.wait_for("1 endpoint is resumed.")
        await expect(page.get_by_label("Select shop-2")).to_have_count(0)

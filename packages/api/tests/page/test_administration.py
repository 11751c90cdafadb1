"""Tokens, schedules and the journal on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from packages.api.tests.page.shop import READING, shop
from tests.support.api import make_token, serving
from tests.support.browser import PHONE, visiting
from tests.support.relay import add_endpoint, fetchval

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.full,
]


async def test_a_token_is_created_shown_once_and_revoked(database: Database) -> None:
    secret = await make_token(database, "me")
    async with serving(database) as api, visiting(api.url) as visitor:
        page = visitor.page
        await visitor.sign_in(secret)
        await page.get_by_role("link", name="Tokens").click()
        await visitor.press("New token")
        await visitor.dialog.get_by_label("Name").fill("me")
        await visitor.press("Create", inside=visitor.dialog)
        # The problem is in the dialog, which stays open.
        await visitor.wait_for(visitor.dialog.get_by_role("alert").get_by_text("me"))
        await visitor.dialog.get_by_label("Name").fill("support")
        await visitor.dialog.get_by_label("Tenant").fill("acme")
        await visitor.press("Create", inside=visitor.dialog)
        shown = visitor.dialog.get_by_label("Token", exact=True)
        made = await shown.input_value()
        assert made.startswith("obx_")
        assert (await api.with_token(made).get("/v1/me")).json["tenant"] == "acme"
        await page.keyboard.press("Escape")
        await expect(shown).to_have_value(made)
        await visitor.press("Done", inside=visitor.dialog)
        row = page.locator("tbody tr", has_text="support")
        await expect(row).to_contain_text("acme")
        await expect(page.locator("dialog input")).to_have_count(0)
        assert made not in await page.content()
        await visitor.press("Revoke", inside=row)
        await visitor.press("Revoke", inside=visitor.dialog)
        await visitor.wait_for("support is revoked.")
        await expect(row).to_have_count(0)
        assert await fetchval(database, "SELECT revoked_by FROM token WHERE name = 'support'")
        await visitor.filter_by("revoked:true")
        await expect(row).to_contain_text("revoked")
        await visitor.filter_by("tenant:acme")
        await expect(page).to_have_url(f"{visitor.url}/#/tokens?revoked=true&tenant=acme")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await visitor.press("Remove the filter revoked:true")
        await visitor.wait_for("No tokens match the filter.")
        await page.get_by_role("link", name="Journal").click()
        await visitor.wait_for(page.get_by_role("cell", name="token revoked"))


async def test_a_schedule_is_created_and_changed(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("schedules")
        await visitor.press("New schedule")
        form = visitor.dialog
        await form.get_by_label("Name").fill("nightly")
        await form.get_by_label("Cron").fill("0 25 * * *")
        await form.get_by_label("Type of the event").fill("report.nightly")
        await form.get_by_label("Payload").fill('{"rows": 7')
        await visitor.press("Create", inside=form)
        await visitor.wait_for(form.get_by_text("is not JSON"))
        await form.get_by_label("Payload").fill('{"rows": 7}')
        await visitor.press("Create", inside=form)
        await visitor.wait_for(form.get_by_role("alert").get_by_text("25"))
        await form.get_by_label("Cron").fill("0 3 * * *")
        await visitor.press("Create", inside=form)
        await visitor.wait_for("nightly is created.")
        await visitor.press("Edit")
        await expect(form.get_by_label("Payload")).to_have_value('{\n  "rows": 7\n}')
        await form.get_by_label("Cron").fill("30 4 * * *")
        await visitor.press("Save", inside=form)
        await visitor.wait_for("nightly is changed.")
        await visitor.wait_for(page.get_by_text("30 4 * * *"))
        row = "SELECT ARRAY[cron, payload ->> 'rows', grace_s::text] FROM schedule"
        assert (await fetchval(database, row))[:2] == ["30 4 * * *", "7"]


async def test_the_journal_of_an_endpoint_is_a_link(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("journal?endpoint=strict")
        await expect(page.locator("tbody tr").last).to_contain_text("endpoint added")
        assert await page.locator("tbody tr", has_text="well").count() == 0
        await visitor.filter_by("endpoint:well")
        await expect(page).to_have_url(f"{visitor.url}/#/journal?endpoint=well")
        await expect(page.locator("tbody tr").last).to_contain_text("well")


async def test_a_read_token_sees_no_action_in_any_view(database: Database) -> None:
    async with shop(database, scopes=("read",)) as here:
        visitor, page = here.visitor, here.visitor.page
        await expect(page.get_by_role("link", name="Tokens")).to_have_count(0)
        lists = ("endpoints", "dead-letters", "events", "schedules", "journal")
        items = ("endpoint/sick", "dead-letter/1", "trace/order-0", "edit-endpoint/sick")
        for place in (*lists, *items, "new-endpoint"):
            await visitor.open(place)
            await visitor.wait_for(page.get_by_role("heading").first)
            await expect(page.get_by_text("Loading…")).to_have_count(0, timeout=30_000)
            buttons = await visitor.main.get_by_role("button").all_text_contents()
            assert set(buttons) <= READING, place
            for name in ("Edit", "New endpoint"):
                await expect(visitor.main.get_by_role("link", name=name)).to_have_count(0)


async def test_the_journal_is_filtered_by_url_and_a_chip_removes_a_filter(
    database: Database,
) -> None:
    await add_endpoint(database, "shop")
    secret = await make_token(database, "me")
    async with serving(database) as api, visiting(api.url, phone=True) as visitor:
        page = visitor.page
        await visitor.sign_in(secret)
        await visitor.open("journal?kind=endpoint_added&since=1h")
        rows = page.locator("tbody tr")
        await expect(rows).to_have_count(1)
        await expect(rows).to_contain_text("shop")
        await visitor.press("Remove the filter kind:endpoint_added")
        await expect(rows).not_to_have_count(1)
        assert page.url.endswith("#/journal?since=1h")
        await visitor.filter_by("actor:unknown")
        await visitor.wait_for("No entries match the filter.")
        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"]

"""The journal shows what people changed first, and on request what relays did."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from outbox.operations import journal
from packages.api.tests.page.shop import shop
from tests.support.api import make_token, serving
from tests.support.browser import visiting
from tests.support.relay import fetchval

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.full,
]


async def test_what_relays_did_is_shown_on_request(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("journal")
        rows = page.locator("tbody tr")
        await expect(rows.filter(has_text="endpoint added")).to_have_count(4)
        await expect(rows.filter(has_text="endpoint claimed")).to_have_count(0)
        await page.get_by_role("link", name="Show what relays did, too").click()
        await expect(rows.filter(has_text="endpoint claimed")).to_have_count(4)
        await expect(rows.filter(has_text="endpoint added")).to_have_count(4)
        assert page.url == f"{visitor.url}/#/journal?by=all"
        # The filters of the list are kept.
        await visitor.filter_by("endpoint:strict")
        await expect(rows.filter(has_text="endpoint claimed")).to_have_count(1)
        await expect(page.get_by_role("columnheader", name="Endpoint")).to_have_count(0)
        await page.get_by_role("link", name="Show what people changed only").click()
        await expect(rows).to_have_count(1)
        assert page.url == f"{visitor.url}/#/journal?endpoint=strict"


async def test_a_rare_change_is_found_by_loading_more(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = await make_token(database, "me")
    await fetchval(
        database,
        """INSERT INTO journal (kind, actor)
           SELECT 'sequencing_stopped', 'replica 7' FROM generate_series(1, 6) RETURNING id""",
    )
    monkeypatch.setattr(journal, "SCANNED_MAX", 6)
    async with serving(database) as api, visiting(api.url) as visitor:
        await visitor.sign_in(secret)
        await visitor.open("journal")
        await visitor.wait_for("None among the entries that were searched.")
        await visitor.press("Load more")
        await expect(visitor.page.locator("tbody tr")).to_have_count(1)
        await visitor.wait_for(visitor.page.get_by_role("cell", name="token added"))

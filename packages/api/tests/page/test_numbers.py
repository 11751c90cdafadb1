"""The page shows each number as it is stored, and publishes it as it is typed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
import pytest
from playwright.async_api import expect

from tests.support.api import make_token, serving
from tests.support.browser import visiting
from tests.support.old_rows import OLD_ROWS, insert_old_rows
from tests.support.relay import fetchval

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
]

NUMBERS = "[9007199254740993, 18446744073709551616, 1234567890.123456789]"


async def test_no_number_is_rounded_and_no_old_row_blinds_the_page(database: Database) -> None:
    async with serving(database) as api, visiting(api.url) as visitor:
        page = visitor.page
        await page.goto(api.url)
        await visitor.sign_in(await make_token(database))
        await visitor.open("events")
        await visitor.press("Publish event")
        await visitor.dialog.get_by_label("Type").fill("payment-intent.created")
        await visitor.dialog.get_by_label("Payload").fill(NUMBERS)
        await visitor.press("Publish", inside=visitor.dialog)
        await visitor.wait_for("The event is published.")
        assert await fetchval(database, "SELECT payload::text FROM outbox") == NUMBERS
        await page.get_by_text("Payload", exact=True).last.click()
        shown = page.locator("details[open] pre")
        for number in orjson.loads(NUMBERS.replace("[", '["').replace(", ", '","')[:-1] + '"]'):
            await expect(shown).to_contain_text(number)
        async with database.connection() as db:
            await insert_old_rows(db)
        await visitor.open("events?limit=20")
        for name in OLD_ROWS:
            await expect(visitor.main).to_contain_text(name)
        endless = "SELECT id::text FROM outbox WHERE key = 'an endless number'"
        await visitor.open(f"trace/{await fetchval(database, endless)}")
        await page.get_by_text("Payload", exact=True).last.click()
        await expect(shown).to_contain_text("0" * 1000)

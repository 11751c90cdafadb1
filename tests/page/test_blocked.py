"""Lanes that wait for somebody: what blocks them, and what goes on when it is decided."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from tests.page.browser import visiting
from tests.support.api import make_token, serving
from tests.support.relay import OK, REFUSED, Network, add_endpoint, fetchval, publish, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.core.model.response import Answer
    from tests.page.browser import Visitor
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
]


@asynccontextmanager
async def blocked(
    database: Database, *, tenant: str | None = None, dead: int = 1
) -> AsyncIterator[Visitor]:
    """A lane that waits for a dead letter, with three deliveries behind it."""
    refused: list[str] = []

    def answer(sent: Sent) -> Answer:
        # A receiver that cannot take the first ones.
        if len(refused) < dead:
            refused.append(sent.url)
            return REFUSED
        return OK

    await add_endpoint(database, "strict", lanes=1, on_dead_letter="block", tenant="acme")
    secret = await make_token(database, "me", tenant=tenant)
    async with (
        serving(database) as api,
        visiting(api.url) as visitor,
        running(database, Network(answer)),
    ):
        await publish(database, *range(4), tenant="acme")

        async def there() -> bool:
            return bool(await fetchval(database, "SELECT count(*) FROM lane_block"))

        await until(there, 30, "the lane to be blocked")
        await visitor.come_in(secret)
        yield visitor


async def unblocked(database: Database) -> None:
    async def gone() -> bool:
        return not await fetchval(database, "SELECT count(*) FROM lane_block")

    await until(gone, 30, "the lane to go on")


async def test_an_endpoint_names_the_dead_letter_that_blocks_it_and_lets_it_be_passed(
    database: Database,
) -> None:
    async with blocked(database) as visitor:
        await visitor.goes_to("endpoint/strict")
        by = visitor.main.get_by_role("link", name="blocked by dead letter 1")
        await expect(by).to_have_attribute("href", "#/letter/1")
        await visitor.sees(visitor.page.get_by_role("columnheader", name="Blocked", exact=True))
        await visitor.sees(visitor.page.get_by_role("columnheader", name="Done"))
        await visitor.presses("Let blocked lanes go on")
        await visitor.sees(
            visitor.dialog.get_by_text(
                "A lane waits for this: it goes on, with 3 deliveries behind it."
            )
        )
        await visitor.presses("Let them go on", inside=visitor.dialog)
        await visitor.sees("The lanes of strict go on.")
        await unblocked(database)
        await expect(by).to_have_count(0)


async def test_who_sends_again_or_discards_is_told_that_the_lane_goes_on(
    database: Database,
) -> None:
    async with blocked(database) as visitor:
        goes_on = "A lane waits for this: it goes on, with 3 deliveries behind it."
        await visitor.goes_to("dead")
        await visitor.page.get_by_label("Select all 1 shown").check()
        for press in ("Send 1 again", "Discard 1"):
            await visitor.presses(press)
            await visitor.sees(visitor.dialog.get_by_text(goes_on))
            await visitor.presses("Leave it", inside=visitor.dialog)
        await visitor.goes_to("letter/1")
        await visitor.presses("Send again")
        await visitor.sees(visitor.dialog.get_by_text(goes_on))
        await visitor.presses("Send again", inside=visitor.dialog)
        await unblocked(database)


async def test_a_job_whose_deliveries_wait_does_not_look_done(database: Database) -> None:
    async with blocked(database, dead=2) as visitor:
        await visitor.goes_to("letter/1")
        await visitor.presses("Send again")
        await visitor.presses("Send again", inside=visitor.dialog)
        await visitor.page.get_by_role("link", name="Job 1").click()
        job = visitor.page.locator("#jobs tbody tr")
        # The next one is refused, too, so what is sent again waits behind it.
        await expect(job).to_contain_text("on the way", timeout=30_000)
        await expect(job).to_contain_text("all 1 in their lanes, on the way at 1 endpoint")
        await expect(job).to_contain_text("lanes are blocked at strict")
        await expect(job.locator("progress")).to_have_count(0)
        await visitor.presses("Abort")
        await expect(job).to_contain_text("aborted", timeout=30_000)


async def test_a_tenant_is_not_told_of_relays(database: Database) -> None:
    async with blocked(database, tenant="acme") as visitor:
        await visitor.goes_to("endpoint/strict")
        await visitor.sees("All settings")
        await visitor.sees_no("Whose hands it went through")

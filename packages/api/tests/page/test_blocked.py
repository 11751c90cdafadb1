"""Stuck lanes: what blocks them is shown, and actions unblock or skip it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from tests.support.api import make_token, serving
from tests.support.browser import visiting
from tests.support.relay import (
    OK,
    RAISED,
    REFUSED,
    Network,
    add_endpoint,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.core.model.response import AttemptResult
    from tests.support.browser import Visitor
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.full,
]


@asynccontextmanager
async def blocked(
    database: Database, *, tenant: str | None = None, dead: int = 1
) -> AsyncIterator[Visitor]:
    """A lane that is blocked by a dead letter, with three pending deliveries."""
    refused: list[str] = []

    def response(sent: Sent) -> AttemptResult:
        # The receiver rejects the first ones.
        if len(refused) < dead:
            refused.append(sent.url)
            return REFUSED
        return OK

    await add_endpoint(database, "strict", lanes=1, on_dead_letter="block", tenant="acme")
    secret = await make_token(database, "me", tenant=tenant)
    async with (
        serving(database) as api,
        visiting(api.url) as visitor,
        running(database, Network(response)),
    ):
        await publish(database, *range(4), tenant="acme")

        async def there() -> bool:
            return bool(await fetchval(database, "SELECT count(*) FROM lane_block"))

        await until(there, what="the lane to be blocked")
        await visitor.sign_in(secret)
        yield visitor


async def unblocked(database: Database) -> None:
    async def gone() -> bool:
        return not await fetchval(database, "SELECT count(*) FROM lane_block")

    await until(gone, what="the lane to go on")


async def test_an_endpoint_links_the_blocking_dead_letter_and_can_be_unblocked(
    database: Database,
) -> None:
    async with blocked(database) as visitor:
        await visitor.open("endpoint/strict")
        by = visitor.main.get_by_role("link", name="blocked by dead letter 1")
        await expect(by).to_have_attribute("href", "#/dead-letter/1")
        await visitor.wait_for(visitor.page.get_by_role("columnheader", name="Stuck", exact=True))
        await visitor.wait_for(visitor.page.get_by_role("columnheader", name="Completed"))
        await visitor.press("Unblock lanes")
        await visitor.wait_for(
            visitor.dialog.get_by_text("This unblocks 1 lane with 3 pending deliveries.")
        )
        await visitor.press("Unblock", inside=visitor.dialog)
        await visitor.wait_for("The lanes of strict are unblocked.")
        await unblocked(database)
        await expect(by).to_have_count(0)


async def test_replay_and_discard_dialogs_name_the_lanes_that_they_unblock(
    database: Database,
) -> None:
    async with blocked(database) as visitor:
        unblocks = "This unblocks 1 lane with 3 pending deliveries."
        await visitor.open("dead-letters")
        await visitor.page.get_by_label("Select all 1 on this page").check()
        for press in ("Replay 1", "Discard 1"):
            await visitor.press(press)
            await visitor.wait_for(visitor.dialog.get_by_text(unblocks))
            await visitor.press("Cancel", inside=visitor.dialog)
        await visitor.open("dead-letter/1")
        await visitor.press("Replay")
        await visitor.wait_for(visitor.dialog.get_by_text(unblocks))
        await visitor.press("Replay", inside=visitor.dialog)
        await unblocked(database)


async def test_a_job_with_pending_deliveries_is_not_shown_as_done(database: Database) -> None:
    async with blocked(database, dead=2) as visitor:
        await visitor.open("dead-letter/1")
        await visitor.press("Replay")
        await visitor.press("Replay", inside=visitor.dialog)
        await visitor.page.get_by_role("link", name="job 1").click()
        job = visitor.page.locator("#jobs tbody tr")
        # The next delivery is rejected as well and blocks the replayed one.
        await expect(job).to_contain_text("delivering", timeout=30_000)
        await expect(job).to_contain_text("all 1 queued in their lanes, pending at 1 endpoint")
        await expect(job).to_contain_text("blocked lanes at strict")
        await expect(job.locator("progress")).to_have_count(0)
        await visitor.press("Abort")
        await expect(job).to_contain_text("aborted", timeout=30_000)


async def test_a_tenant_does_not_see_the_ownership_history(database: Database) -> None:
    async with blocked(database, tenant="acme") as visitor:
        await visitor.open("endpoint/strict/settings")
        await visitor.wait_for("All settings")
        await visitor.wait_until_absent("Ownership history")


async def test_a_stuck_delivery_is_skipped_from_the_page(database: Database) -> None:
    retry = {"base_s": 0.05, "factor": 1.0, "cap_s": 0.05, "attempts_max": 10_000}
    await add_endpoint(database, "strict", lanes=1, retry=retry)
    secret = await make_token(database, "me")
    network = Network(lambda sent: RAISED if sent.body["data"] == "poison" else OK)
    async with (
        serving(database) as api,
        visiting(api.url) as visitor,
        running(database, network),
    ):
        await publish(database, "poison", 2, 3)
        await until(lambda: network.sent, what="an attempt")
        await visitor.sign_in(secret)
        await visitor.open("endpoint/strict")
        await visitor.press("Skip")
        await visitor.wait_for(visitor.dialog.get_by_text("2 deliveries wait behind it."))
        await visitor.press("Skip", inside=visitor.dialog)
        letter = visitor.page.get_by_role("link", name="dead letter 1")
        await expect(letter).to_have_attribute("href", "#/dead-letter/1")
        await until(lambda: network.data() == [2, 3], what="the lane to go on")
        await expect(visitor.main.get_by_role("button", name="Skip")).to_have_count(0)

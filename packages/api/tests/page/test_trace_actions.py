"""What a trace explains can be resolved there: skip, replay, discard, resume."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from outbox.operations.endpoints import states as endpoint_states
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


@pytest.mark.full
@pytest.mark.slow
async def test_the_delivery_that_a_lane_is_stuck_on_is_skipped(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        here.sick_key = "order-0"
        await visitor.open("trace/order-0")
        stuck = page.locator("details", has=page.get_by_text("sick", exact=True)).first
        await visitor.press("Skip", inside=stuck)
        await visitor.dialog.get_by_label("Comment").fill("a test order")
        await visitor.press("Skip", inside=visitor.dialog)
        await visitor.wait_for("Skipped: dead letter")
        skipped = "SELECT count(*) FROM dead_letter WHERE reason = 'skipped' AND key = 'order-0'"
        assert await fetchval(database, skipped) == 1
        # The trace has its dead letter, which can be replayed there.
        await expect(stuck.get_by_role("button", name="Replay")).to_be_visible(timeout=30_000)
        await expect(stuck.get_by_role("button", name="Skip")).to_have_count(0)


@pytest.mark.full
async def test_dead_letters_are_replayed_and_discarded_in_the_trace(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        here.refuses = False
        await visitor.open("trace/order-1")
        cause = page.locator(".diagnosis li", has_text="strict")
        await expect(cause).not_to_contain_text("outbox dead replay")
        await visitor.press("Replay dead letter 2", inside=cause)
        await visitor.wait_for(visitor.dialog.get_by_text("1 dead letter will be sent again."))
        await visitor.press("Replay", inside=visitor.dialog)
        await visitor.wait_for("Replaying 1 dead letter.")
        await here.dead("dead", 2)
        await visitor.open("trace/order-2")
        refused = page.locator("details", has=page.get_by_text("strict", exact=True)).first
        await visitor.press("Discard", inside=refused)
        await visitor.press("Discard", inside=visitor.dialog)
        await here.dead("discarded", 1)


@pytest.mark.full
async def test_a_paused_endpoint_is_resumed_in_the_trace(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            await endpoint_states.pause_endpoints(connection, "relay", ["sick"], actor="test")
        await visitor.open("trace/order-1")
        await visitor.press("Resume sick")
        await visitor.wait_for("sick is resumed.")
        await expect(page.get_by_role("button", name="Resume sick")).to_have_count(0)


@pytest.mark.full
async def test_an_event_is_published_and_traced(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("events")
        await visitor.press("Publish event")
        await visitor.dialog.get_by_label("Type").fill("order paid")
        await visitor.dialog.get_by_label("Key").fill("order-77")
        await visitor.dialog.get_by_label("Payload").fill('{"order": 77}')
        await visitor.press("Publish", inside=visitor.dialog)
        await visitor.wait_for(visitor.dialog.get_by_role("alert").get_by_text("type"))
        await visitor.dialog.get_by_label("Type").fill("order.paid")
        await visitor.press("Publish", inside=visitor.dialog)
        await visitor.wait_for("The event is published.")
        await visitor.wait_for(page.get_by_role("link", name="order-77"))
        await visitor.wait_for(page.locator("summary", has_text="delivered").first)


@pytest.mark.full
async def test_a_delivered_event_says_so(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        here.refuses, here.sick_key = False, "none"
        await publish(database, {"order": 9}, type="order.paid", key="order-9")
        await visitor.open("trace/order-9")
        await expect(page.locator(".success")).to_contain_text(
            re.compile(r"^Delivered to 3 endpoints, the last .+ after publish\.$"), timeout=30_000
        )
        # Of an earlier event, one delivery is a dead letter.
        await visitor.open("trace/order-1")
        await visitor.wait_for("it is dead letter 2")
        await expect(page.locator(".success")).to_have_count(0)
        await visitor.press("Replay dead letter 2")
        await visitor.press("Replay", inside=visitor.dialog)
        await expect(page.locator(".success")).to_contain_text("with a replay", timeout=30_000)
        await visitor.open("dead-letter/2")
        text = re.compile(r"^Its replay was delivered with sequence \d+ of lane .+\.$")
        await expect(page.locator(".success")).to_have_text(text)


@pytest.mark.full
async def test_a_delivered_event_is_sent_again(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("trace/order-0")
        delivered = page.locator("details", has=page.get_by_text("well", exact=True)).first
        await delivered.locator("summary").first.click()
        await visitor.press("Send again…", inside=delivered)
        await visitor.wait_for("a receiver that has processed the event processes it again")
        await visitor.press("Send again", inside=visitor.dialog)
        await visitor.wait_for("The event is sent again.")
        again = "SELECT count(*) FROM delivery WHERE backfill_id IS NOT NULL"
        await until(lambda: fetchval(database, again), what="another delivery")


HOLD = """
SELECT (publish_shared(tenant => 'acme', passes => false, costs => '{3,2}', held_max => 100,
                       types => '{a.b,a.b}', payloads => '{1,2}')).event_ids[2]
"""


async def test_held_events_are_shown_with_their_place(database: Database) -> None:
    secret = await make_token(database, "acme", ("read",), tenant="acme")
    event = await fetchval(database, HOLD)
    async with serving(database) as api, visiting(api.url) as visitor:
        await visitor.sign_in(secret)
        await visitor.open("events")
        await visitor.wait_for("2 events with 5 deliveries held for the share of acme, the oldest")
        await visitor.open(f"trace/{event}")
        await visitor.wait_for("3 deliveries of the tenant are published before it.")


@pytest.mark.full
async def test_an_unknown_event_is_searched_for_again(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("trace/order-4711")
        await visitor.wait_for("No event matches order-4711.")
        await page.get_by_label("Event").fill("order-0")
        await visitor.press("Trace")
        await visitor.wait_for(page.get_by_role("heading", name="Trace order-0"))

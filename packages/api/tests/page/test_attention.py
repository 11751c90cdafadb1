"""The overview's list of what needs attention."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from playwright.async_api import expect

from outbox.operations.endpoints.states import pause_endpoints
from packages.api.tests.page.shop import shop
from tests.support.api import make_token, serving
from tests.support.browser import PHONE, WAIT_MS, visiting
from tests.support.relay import fetchval, publish
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.mark.slow
async def test_failing_lanes_come_before_dead_letters_each_with_its_action(
    database: Database,
) -> None:
    async with shop(database, phone=True, findings=()) as here:
        visitor, page = here.visitor, here.visitor.page
        needs = page.get_by_role("region", name="Needs attention")
        items = needs.get_by_role("listitem")
        await expect(items).to_have_count(2)
        await expect(items.nth(0)).to_contain_text("sick")
        await expect(items.nth(0)).to_contain_text("last response 503")
        await expect(items.nth(1)).to_contain_text("strict: 3 dead letters wait for a decision")
        # Lanes of healthy endpoints without pending deliveries are collapsed.
        await expect(page.locator(".lanelist li", has_text="well")).to_be_hidden()
        assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        # Both lanes get 503: the next delivery would fail as well.
        await expect(items.nth(0).get_by_role("button", name="Skip")).to_have_count(0)
        await visitor.press("Pause", inside=items.nth(0))
        await visitor.wait_for(visitor.dialog.get_by_role("heading", name="Pause sick"))
        await page.keyboard.press("Escape")
        await items.nth(1).get_by_role("link", name="Replay or discard…").click()
        await visitor.wait_for(page.get_by_role("heading", name="Dead letters"))
        assert page.url.endswith("#/dead-letters?endpoint=strict")


@pytest.mark.full
async def test_without_a_relay_that_is_what_needs_attention(database: Database) -> None:
    secret = await make_token(database, "me")
    async with serving(database) as api, visiting(api.url) as visitor:
        await visitor.sign_in(secret)
        await visitor.wait_for("No relay is running: nothing is delivered.")


def finding(check: str, severity: str, message: str, action: str | None = None) -> dict[str, Any]:
    """A finding of GET /v1/doctor."""
    return {
        "subject": "preconditions",
        "check": check,
        "severity": severity,
        "message": message,
        "action": action,
    }


@pytest.mark.full
async def test_findings_of_the_doctor_are_listed_by_severity(database: Database) -> None:
    findings = (
        finding("server", "ok", "PostgreSQL 18"),
        finding("failing lanes", "warning", "the status has it"),
        finding("clock", "problem", "the clocks differ by 200 s", "synchronize the clocks"),
        finding("old periods", "warning", "a partition is left", "DROP TABLE x"),
        finding("roles", "warning", "a relay connects as a superuser"),
    )
    async with shop(database, findings=findings) as here:
        visitor, page = here.visitor, here.visitor.page
        items = page.get_by_role("region", name="Needs attention").get_by_role("listitem")
        await expect(items).to_have_count(4)
        await expect(items.nth(0)).to_contain_text("Clock: the clocks differ by 200 s.")
        await expect(items.nth(0)).to_contain_text("To do: synchronize the clocks")
        await expect(items.nth(1)).to_contain_text("sick")
        await expect(items.nth(3)).to_contain_text("2 checks have a warning: old periods, roles.")
        # The number of endpoints in a condition leads to them.
        await page.get_by_role("link", name="3 healthy").click()
        await expect(page.locator("tbody tr")).to_have_count(3)
        assert page.url == f"{visitor.url}/#/endpoints?condition=healthy"


@pytest.mark.full
async def test_a_tenant_sees_what_needs_attention_at_its_endpoints(database: Database) -> None:
    async with shop(database, tenant="acme") as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.wait_for("Nothing needs attention.")
        here.refuses_all = True
        await publish(database, 1, tenant="acme")
        items = page.get_by_role("region", name="Needs attention").get_by_role("listitem")
        await expect(items).to_have_count(1, timeout=30_000)
        await expect(items).to_contain_text("acme: 1 dead letter waits for a decision.")
        await items.get_by_role("link", name="Replay or discard…").click()
        await expect(page.locator("tbody tr")).to_have_count(1)


@pytest.mark.full
async def test_one_failing_lane_is_retried_at_once(database: Database) -> None:
    """The other lane delivers, so the circuit breaker is closed."""
    retried = "SELECT count(*) FROM journal WHERE kind = 'endpoint_retried'"
    async with shop(database, findings=()) as here:
        visitor, page = here.visitor, here.visitor.page
        here.sick_key = "order-1"
        for n in range(8):  # For the other lane, too.
            await publish(database, {"order": n}, type="order.paid", key=f"order-{n + 20}")
        item = page.get_by_role("region", name="Needs attention").get_by_role("listitem").nth(0)
        text = re.compile(r"sick: 1 lane is failing for [\d.]+ m?s, after \d+ attempts?")
        await expect(item).to_contain_text(text, timeout=30_000)
        await visitor.press("Retry now", inside=item)
        await until(lambda: fetchval(database, retried), what="the request")
        await page.goto(f"{visitor.url}/#/endpoints/sick")
        await visitor.press("Retry now")
        await until(lambda: _is(database, retried, 2), what="another request")


async def _is(database: Database, sql: str, value: int) -> bool:
    return bool(await fetchval(database, sql) == value)


@pytest.mark.full
async def test_a_paused_endpoint_with_a_backlog_is_resumed(database: Database) -> None:
    async with shop(database, findings=()) as here:
        visitor, page = here.visitor, here.visitor.page
        async with database.at_hand() as connection:
            await pause_endpoints(
                connection, "relay", ["sick"], actor="me@vm", comment="ticket 4711"
            )
        items = page.get_by_role("region", name="Needs attention").get_by_role("listitem")
        item = items.filter(has_text="sick")
        # The page may have read the status just before, and reads it every ten seconds.
        await expect(item).to_contain_text(
            "ago by me@vm (ticket 4711); 3 deliveries pending.", timeout=WAIT_MS
        )
        await visitor.press("Resume…", inside=item)
        await expect(item).to_contain_text("failing", timeout=WAIT_MS)


@pytest.mark.full
async def test_new_dead_letters_are_listed_while_the_list_is_open(database: Database) -> None:
    async with shop(database, findings=()) as here:
        page = here.visitor.page
        await page.goto(f"{here.visitor.url}/#/dead-letters?endpoint=strict")
        await expect(page.locator("tbody tr")).to_have_count(3)
        await publish(database, {"order": 9}, type="order.paid", key="order-9")
        await expect(page.locator("tbody tr")).to_have_count(4, timeout=30_000)

"""The overview's list of what needs attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from playwright.async_api import expect

from tests.page.browser import PHONE, visiting
from tests.page.shop import shop
from tests.support.api import make_token, serving
from tests.support.relay import publish

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
]


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
        await visitor.press("Skip", inside=items.nth(0))
        await visitor.wait_for(visitor.dialog.get_by_role("heading", name="Skip sequence"))
        await page.keyboard.press("Escape")
        await items.nth(1).get_by_role("link", name="Replay or discard…").click()
        await visitor.wait_for(page.get_by_role("heading", name="Dead letters"))
        assert page.url.endswith("#/dead-letters?endpoint=strict")


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

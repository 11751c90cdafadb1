"""The page with a keyboard, and by the rules of axe-core in every view."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from outbox.errors import CannotRun
from packages.api.tests.page.shop import shop
from tests.support.npm import npm_package
from tests.support.waiting import until

if TYPE_CHECKING:
    from playwright.async_api import Request

    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.full,
]

AXE = ("axe-core", "4.14.1")
PLACES = (
    "overview", "endpoints", "endpoint/sick", "new-endpoint", "edit-endpoint/sick",
    "preview/well?event=order-0", "deliveries?endpoint=sick", "dead-letters", "dead-letter/1",
    "events", "trace/order-0", "schedules", "replicas", "journal", "tokens",
)  # fmt: skip
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice")
RUN_AXE = """async (rules) => {
    const { violations } = await axe.run(document, { runOnly: rules });
    const serious = violations.filter((each) => ["serious", "critical"].includes(each.impact));
    return serious.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html).join(" | ")}`);
}"""
# Everything that the Tab key should reach.
FOCUSABLE = """() => {
    const kinds = "a[href], button, input, select, summary, [tabindex='0']";
    const all = [...document.querySelectorAll(kinds)];
    const found = all.filter((each) => each.checkVisibility() && !each.disabled);
    found.forEach((each, n) => { each.dataset.n = n; });
    return found.length;
}"""
NO_TIMERS = """() => {
    for (let n = setTimeout(() => 0); n > 0; n -= 1) clearTimeout(n);
    window.setTimeout = () => 0;
}"""
FOCUSED = """() => {
    const { activeElement: each } = document;
    const { outlineStyle, outlineWidth } = getComputedStyle(each);
    return [each.dataset.n ?? null, outlineStyle !== "none" && parseFloat(outlineWidth) > 0];
}"""


@pytest.fixture(scope="session")
def axe() -> str:
    """The text of axe-core."""
    try:
        return (npm_package(*AXE) / "axe.min.js").read_text("utf-8")
    except CannotRun as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("variant", ["light", "dark", "phone"])
async def test_no_view_breaks_a_serious_rule(database: Database, axe: str, variant: str) -> None:
    found: dict[str, list[str]] = {}
    async with shop(database, dark=variant == "dark", phone=variant == "phone") as here:
        visitor, page = here.visitor, here.visitor.page

        async def check(where: str) -> None:
            await page.evaluate(axe)
            if problems := await page.evaluate(RUN_AXE, list(RULES)):
                found[where] = problems

        for place in PLACES:
            await visitor.open(place)
            await visitor.wait_for(page.get_by_role("heading").first)
            await expect(page.get_by_text("Loading…")).to_have_count(0, timeout=30_000)
            await check(place)
        for place, press in (("dead-letters", "Replay 3"), ("endpoints", "Pause…")):
            await visitor.open(place)
            await page.locator(".selection").get_by_role("checkbox").check()
            await check(f"{place} with a selection")
            await visitor.press(press)
            await visitor.wait_for(visitor.dialog.get_by_role("heading"))
            await check(f"{place} with a dialog")
            await visitor.press("Cancel", inside=visitor.dialog)
    assert found == {}


@pytest.mark.parametrize("place", ["overview", "endpoints", "dead-letters", "endpoint/sick"])
async def test_everything_is_reached_by_the_tab_key(database: Database, place: str) -> None:
    async with shop(database, findings=()) as here:
        visitor, page = here.visitor, here.visitor.page
        in_flight: set[Request] = set()
        begun: list[Request] = []
        page.on("request", lambda request: in_flight.add(request))
        page.on("request", lambda request: begun.append(request))
        page.on("requestfinished", lambda request: in_flight.discard(request))
        page.on("requestfailed", lambda request: in_flight.discard(request))
        await visitor.open(place)
        await visitor.wait_for(page.get_by_role("heading").first)
        await expect(page.get_by_text("Loading…")).to_have_count(0, timeout=30_000)
        if place in ("endpoints", "dead-letters"):
            await page.locator(".selection").get_by_role("checkbox").check()
        # A refresh would move what is numbered: let none begin, also of those that a timer has
        # begun to wait for, and wait for those in flight, of which each response may be followed
        # by another request.
        await page.evaluate(NO_TIMERS)
        known = -1
        while known != len(begun):
            known = len(begun)
            await until(lambda: not in_flight, what="the responses")
            await visitor.settle()
        await page.evaluate("() => { document.activeElement.blur(); scrollTo(0, 0); }")
        expected = await page.evaluate(FOCUSABLE)
        reached, unseen = set(), []
        # The browser also stops at what scrolls, and at its own controls.
        for _ in range(2 * expected + 10):
            await page.keyboard.press("Tab")
            n, outlined = await page.evaluate(FOCUSED)
            reached.add(n)
            if n is not None and not outlined:
                unseen.append(n)
        assert reached - {None} == {str(n) for n in range(expected)}
        assert unseen == [], "the focus is not visible"

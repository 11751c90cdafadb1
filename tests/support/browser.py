"""A browser tab with a token; page errors fail the test at its end."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from playwright.async_api import ViewportSize, expect

from tests.support.chromium import browsing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Locator, Page

WAIT_MS = 30_000
"""Enough for a machine that is busy with other tests."""
DESKTOP = ViewportSize(width=1280, height=800)
PHONE = ViewportSize(width=390, height=844)
# A response that has arrived is rendered some frames later.
UNCHANGED = """() => new Promise((resolve) => {
    let frames = 0;
    const observer = new MutationObserver(() => { frames = 0; });
    observer.observe(document, { attributes: true, childList: true, subtree: true });
    const count = () => {
        frames += 1;
        if (frames < 20) return requestAnimationFrame(count);
        observer.disconnect();
        return resolve();
    };
    requestAnimationFrame(count);
})"""


class Visitor:
    """A tab and the actions in it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url.rstrip("/")
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._record_console)
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    def _record_console(self, message: Any) -> None:
        # Chromium logs failed requests as well; the page shows those itself.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    async def sign_in(self, secret: str) -> None:
        """Sign in."""
        await self.page.goto(f"{self.url}/")
        await self.page.get_by_label("Token").fill(secret)
        await self.page.get_by_role("button", name="Sign in").click()
        await self.wait_for(self.page.get_by_role("navigation", name="Views"))

    async def open(self, place: str) -> None:
        """Open a view by its route."""
        await self.page.goto(f"{self.url}/#/{place}")

    async def press(self, name: str, *, inside: Locator | None = None) -> None:
        """Press a button."""
        place = inside or self.page
        await place.get_by_role("button", name=name, exact=True).first.click()

    async def choose(self, name: str) -> None:
        """Choose a further action in the menu of an endpoint."""
        await self.main.locator("details.menu > summary").click()
        await self.main.locator("details.menu").get_by_text(name, exact=True).click()

    async def filter_by(self, text: str) -> None:
        """Type filters into the search field of a list."""
        field = self.main.get_by_role("combobox", name="Filters")
        await field.fill(text)
        await field.press("Enter")

    async def wait_for(self, what: Locator | str) -> None:
        """Wait until something is visible."""
        found = self.page.get_by_text(what).first if isinstance(what, str) else what
        await expect(found).to_be_visible(timeout=WAIT_MS)

    async def save(self, name: str) -> None:
        """Save a picture into the directory OUTBOX_SCREENSHOTS, for the documents or to look at."""
        if directory := os.environ.get("OUTBOX_SCREENSHOTS"):
            await self.page.screenshot(path=f"{directory}/{name}.png")

    async def fits(self) -> bool:
        """Whether nothing is wider than the window."""
        script = "document.documentElement.scrollWidth <= window.innerWidth"
        return bool(await self.page.evaluate(script))

    async def settle(self) -> None:
        """Wait until nothing has changed for some frames."""
        await self.page.evaluate(UNCHANGED)

    async def wait_until_absent(self, what: str) -> None:
        """Wait until a text is absent."""
        await expect(self.page.get_by_text(what)).to_have_count(0, timeout=WAIT_MS)

    @property
    def main(self) -> Locator:
        """Content below the menu."""
        return self.page.locator("main")

    @property
    def dialog(self) -> Locator:
        """The open dialog."""
        return self.page.locator("dialog[open]")


@asynccontextmanager
async def visiting(url: str, *, phone: bool = False, dark: bool = False) -> AsyncIterator[Visitor]:
    """A visitor without a session; browser errors fail the test."""
    async with browsing() as browser:
        context = await browser.new_context(
            viewport=PHONE if phone else DESKTOP,
            color_scheme="dark" if dark else "light",
            has_touch=phone,
        )
        visitor = Visitor(await context.new_page(), url)
        yield visitor
        await context.close()
    assert visitor.complaints == []
    assert visitor.hosts <= {visitor.url.removeprefix("http://")}, "the page requested another host"

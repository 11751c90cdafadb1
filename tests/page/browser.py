"""Somebody in front of the page, with a token; what the page gets wrong is told at the end."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from playwright.async_api import expect

from tests.support.chromium import browsing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Locator, Page

WAIT_MS = 30_000
"""On a machine that is busy with other tests."""
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}


class Visitor:
    """A tab, and what is done in it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url.rstrip("/")
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._heard)
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    def _heard(self, message: Any) -> None:
        # What the API refuses is told to the visitor; the browser says it, too.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    async def come_in(self, secret: str) -> None:
        """Through the door, as anybody does."""
        await self.page.goto(f"{self.url}/")
        await self.page.get_by_label("Token").fill(secret)
        await self.page.get_by_role("button", name="Sign in").click()
        await self.sees(self.page.get_by_role("navigation", name="Views"))

    async def goes_to(self, place: str) -> None:
        """A view, by its address."""
        await self.page.goto(f"{self.url}/#/{place}")

    async def presses(self, name: str, *, inside: Locator | None = None) -> None:
        """A button."""
        place = inside or self.page
        await place.get_by_role("button", name=name, exact=True).first.click()

    async def sees(self, what: Locator | str) -> None:
        """Something, some time soon."""
        found = self.page.get_by_text(what).first if isinstance(what, str) else what
        await expect(found).to_be_visible(timeout=WAIT_MS)

    async def sees_no(self, what: str) -> None:
        """Nothing like that."""
        await expect(self.page.get_by_text(what)).to_have_count(0, timeout=WAIT_MS)

    @property
    def main(self) -> Locator:
        """Below the menu."""
        return self.page.locator("main")

    @property
    def dialog(self) -> Locator:
        """What is asked."""
        return self.page.locator("dialog[open]")


@asynccontextmanager
async def visiting(url: str, *, phone: bool = False, dark: bool = False) -> AsyncIterator[Visitor]:
    """A visitor at the door; whatever the browser complained of fails the test."""
    async with browsing() as browser:
        context = await browser.new_context(
            viewport=PHONE if phone else DESKTOP,  # type: ignore[arg-type]
            color_scheme="dark" if dark else "light",
            has_touch=phone,
        )
        visitor = Visitor(await context.new_page(), url)
        yield visitor
        await context.close()
    assert visitor.complaints == []
    assert visitor.hosts <= {visitor.url.removeprefix("http://")}, "it asked another host"

"""A real browser for tests, where the system has one."""

from __future__ import annotations

import shutil
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

from playwright.async_api import async_playwright

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser


@lru_cache(1)
def chromium() -> str | None:
    """Where the system's browser is; None: it has none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


_shared: Browser | None = None


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """The browser that is shared, or else one of its own; visits are kept apart by contexts."""
    if _shared is not None:
        yield _shared
        return
    async with _started() as browser:
        yield browser


@asynccontextmanager
async def shared() -> AsyncIterator[None]:
    """One browser for all that ask within the block: to start one takes seconds.

    It belongs to the event loop that starts it, and so do those who ask.
    """
    global _shared
    async with _started() as _shared:
        try:
            yield
        finally:
            _shared = None


@asynccontextmanager
async def _started() -> AsyncIterator[Browser]:
    program = chromium()
    assert program is not None
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=program,
            # Root may not use the sandbox, and nothing but our own page is opened.
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        try:
            yield browser
        finally:
            await browser.close()

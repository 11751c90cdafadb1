"""A real browser for tests, if the system has one."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser


@lru_cache(1)
def chromium() -> str | None:
    """The path of the system's browser, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


_shared: Browser | None = None
_shared_loop: asyncio.AbstractEventLoop | None = None


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """The shared browser, or a new one; contexts isolate visits."""
    if _shared is not None and _shared_loop is asyncio.get_running_loop():
        yield _shared
        return
    async with _started() as browser:
        yield browser


@asynccontextmanager
async def shared() -> AsyncIterator[None]:
    """Share one browser within the block, because a start takes seconds.

    It is bound to the event loop that starts it; in another loop, `browsing` starts a new one.
    """
    global _shared, _shared_loop
    _shared_loop = asyncio.get_running_loop()
    async with _started() as _shared:
        try:
            yield
        finally:
            _shared = None


@asynccontextmanager
async def _started() -> AsyncIterator[Browser]:
    from playwright.async_api import async_playwright

    program = chromium()
    assert program is not None
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=program,
            # Root cannot use the sandbox, and only the project's own page is opened.
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        try:
            yield browser
        finally:
            await browser.close()

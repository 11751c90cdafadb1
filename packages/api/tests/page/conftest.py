"""One browser for all tests of the page, and one event loop, because a browser is bound to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from tests.support.chromium import shared

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest_asyncio.fixture(scope="session", loop_scope="session", autouse=True)
async def one_browser() -> AsyncIterator[None]:
    async with shared():
        yield

"""Count the iterations of the running event loop."""

from __future__ import annotations

import asyncio
from typing import Any, Self


class Iterations:
    """Counts inside the context."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Handle | None = None

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(self, *_: Any) -> None:
        assert self._next is not None
        self._next.cancel()

    def _begin(self) -> None:
        self.count += 1
        self._next = self._loop.call_soon(self._begin)

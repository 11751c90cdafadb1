"""The link of a destination that has no server: its blocking work waits."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from outbox_devtools.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from outbox.destination import Broker


class GatedLink:
    """A driver whose threads wait before their work, or before they return its result."""

    def __init__(self, broker: Broker, *methods: str) -> None:
        self.broker = broker
        self._begins = threading.Event()
        self._returns = threading.Event()
        self._lock = threading.Lock()
        self._pending = 0
        self.release_threads()
        for name in methods:
            setattr(broker, name, self._gated(getattr(broker, name)))

    def _gated(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def do(*arguments: Any) -> Any:
            self._count(1)
            self._begins.wait()
            try:
                result = work(*arguments)
            finally:
                self._count(-1)
            self._returns.wait()
            return result

        return do

    def _count(self, change: int) -> None:
        with self._lock:
            self._pending += change

    def lose_responses(self) -> None:
        self._returns.clear()

    def hold_requests(self) -> None:
        self._begins.clear()

    async def held(self) -> None:
        await until(lambda: self._pending, what="a request")

    async def release(self) -> None:
        self._begins.set()
        await until(lambda: not self._pending, what="the late requests")

    def heal(self) -> None:
        self._returns.set()

    def release_threads(self) -> None:
        """Let all threads end."""
        self._begins.set()
        self._returns.set()


@asynccontextmanager
async def gated(broker: Broker, *methods: str) -> AsyncIterator[GatedLink]:
    """A link to a driver whose methods of these names do its blocking work in threads."""
    link = GatedLink(broker, *methods)
    try:
        yield link
    finally:
        link.release_threads()
        await broker.aclose()

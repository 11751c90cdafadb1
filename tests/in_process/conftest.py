"""A relay in the process of the test: its environment, its event loops, and a receiver."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from tests.in_process.receiver import Receiver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run one module's tests on uvloop as well, if it is installed."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if item.path.stem == "test_lifecycle":
        loops["uvloop"] = pytest.importorskip("uvloop").new_event_loop
    return loops


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave uvloop to the tier `full`: one loop shows each behaviour."""
    if "uvloop" in item.keywords or "[uvloop" in item.name or "-uvloop" in item.name:
        item.add_marker(pytest.mark.full)


@pytest.fixture(autouse=True)
def _no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith(("OUTBOX_", "PG", "DATABASE_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """A local receiver."""
    receiver = Receiver()
    async with receiver.serve():
        yield receiver

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.destinations import certificates as tls

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tls.Certificates:
    return tls.make(tmp_path_factory.mktemp("tls"))


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run classes with `uvloop` in their name on uvloop, if it is installed."""
    if item.parent is None or "Uvloop" not in item.parent.name:
        return {"asyncio": asyncio.new_event_loop}
    return {"uvloop": pytest.importorskip("uvloop").new_event_loop}

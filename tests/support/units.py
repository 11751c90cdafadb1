"""Units: tests that one process runs, see `forks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def unit_of(item: pytest.Item) -> str:
    """The unit of a test: that of its marker `together`, or mostly itself."""
    marker = item.get_closest_marker("together")
    return item.nodeid if marker is None else f"together {marker.args[0]}"

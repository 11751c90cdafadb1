"""Checks of the tree itself."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _kept_trees() -> Iterator[None]:
    """Leave the garbage collector off: it would look at a million nodes again and again."""
    gc.disable()
    yield
    gc.enable()

"""Checks of the tree itself."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _kept_trees() -> Iterator[None]:
    """Keep the garbage collector from the trees: it would visit millions of nodes repeatedly."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()

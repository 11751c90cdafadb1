"""The wheels of this tree, built once for all environments that tests make."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.wheel import build_wheel

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's wheel, beside which those of the leaves are."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))

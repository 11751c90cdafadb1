"""Fixtures for the embedded server."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user can access; pytest's own are private."""
    path = Path(tempfile.mkdtemp(prefix="outbox-test-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)

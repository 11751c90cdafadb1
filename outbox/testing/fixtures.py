"""Fixtures for pytest: `pytest_plugins = ["outbox.testing.fixtures"]` in a conftest.py."""

from __future__ import annotations

import pytest

from outbox.testing.sender import SECRET, FakeSender


@pytest.fixture
def outbox_secret() -> str:
    """A secret for tests alone: everybody knows it."""
    return SECRET


@pytest.fixture
def outbox_sender(outbox_secret: str) -> FakeSender:
    """A sender whose receiver knows `outbox_secret`."""
    return FakeSender(outbox_secret)

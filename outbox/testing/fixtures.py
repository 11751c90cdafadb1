"""Fixtures for pytest: `pytest_plugins = ["outbox.testing.fixtures"]` in a conftest.py."""

from __future__ import annotations

import pytest

from outbox.testing.sender import SECRET, FakeSender


@pytest.fixture
def outbox_secret() -> str:
    """Publicly known secret, for tests only."""
    return SECRET


@pytest.fixture
def outbox_sender(outbox_secret: str) -> FakeSender:
    """Fake sender that signs with `outbox_secret`."""
    return FakeSender(outbox_secret)

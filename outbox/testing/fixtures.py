"""Fixtures for pytest: `pytest_plugins = ["outbox.testing.fixtures"]` in a conftest.py."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from outbox.testing.sender import SECRET, FakeSender

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.testing.delivery_pass import DeliveryReport


@pytest.fixture
def outbox_secret() -> str:
    """Publicly known secret, for tests only."""
    return SECRET


@pytest.fixture
def outbox_sender(outbox_secret: str) -> FakeSender:
    """Fake sender that signs with `outbox_secret`."""
    return FakeSender(outbox_secret)


@pytest.fixture
def outbox_dsn() -> str | None:
    """Database of `outbox_deliver_now`, to be overridden; None: that of OUTBOX_DSN."""
    return None


@pytest.fixture
def outbox_deliver_now(outbox_dsn: str | None) -> Callable[..., DeliveryReport]:
    """`outbox.testing.deliver_now` on the database of `outbox_dsn`."""
    from outbox.testing import deliver_now

    return partial(deliver_now, outbox_dsn)

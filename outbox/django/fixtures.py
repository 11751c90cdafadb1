"""Fixtures for pytest-django: `pytest_plugins = ["outbox.django.fixtures"]` in a conftest.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest


class TransactionEvents(Sequence[Any]):
    """The events that the test's transaction holds now; read from the database at each access.

    They are `outbox.testing.CapturedEvent`s.
    """

    def __init__(self, captured: Any) -> None:
        self._captured = captured

    def __len__(self) -> int:
        return len(self._captured.refresh())

    def __getitem__(self, index: Any) -> Any:
        return self._captured.refresh()[index]

    def __eq__(self, other: object) -> bool:
        return bool(self._captured.refresh() == other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._captured.refresh())

    @property
    def types(self) -> list[str]:
        """The type of each event."""
        return [event.type for event in self]


@pytest.fixture
def outbox_events(db: None) -> Iterator[TransactionEvents]:
    """The events that the test has published, in the first of `OUTBOX_DATABASES`.

    The transaction of pytest-django's `db` is rolled back at the end, and no relay sees them.  For
    another database: `outbox.testing.captured(connections["alias"])`.
    """
    from django.db import connections

    from outbox.django.settings import read_databases, read_schema
    from outbox.testing import captured

    connection = connections[read_databases()[0]]
    with captured(connection, schema=read_schema()) as events:
        yield TransactionEvents(events)

"""A Django project whose default database is the test's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.django.projects import database_settings, project

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.postgres import Database


@pytest.fixture
def site(database: Database) -> Iterator[None]:
    """A project in this process."""
    with project({"default": database_settings(database.dsn)}):
        yield

"""Fixtures of these tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.books import Books, open_books

if TYPE_CHECKING:
    from tests.support.postgres import Database


@pytest.fixture
async def books(database: Database) -> Books:
    return await open_books(database)

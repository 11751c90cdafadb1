"""A page ends by its rows or by the bytes of their texts, and the next one continues."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from outbox.operations.pages import (
    PAGE_BYTES_MAX,
    PORTION_ROWS,
    convert,
    page_of,
    read_page,
)
from outbox.operations.rows import RowPage

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

ROWS = """
SELECT n, CASE WHEN n % 2 = 0 THEN repeat('a', $3) END AS text,
       CASE WHEN n % 2 = 1 THEN ARRAY[repeat('a', $3)] END AS texts
  FROM generate_series($1::int + 1, 1000) n LIMIT $2
"""
"""Texts that PostgreSQL compresses well."""


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(server_settings={"search_path": "relay"})


async def read(db: Connection[Any], after: int, limit: int, size: int) -> tuple[list[int], bool]:
    page = await read_page(db, ROWS, "n", after, limit, size)
    return [row["n"] for row in page], page.more


@pytest.mark.parametrize("limit", [1, PORTION_ROWS - 1, PORTION_ROWS, PORTION_ROWS + 1, 400])
async def test_a_page_of_small_rows_ends_by_its_limit(db: Connection[Any], limit: int) -> None:
    assert await read(db, 0, limit, 1) == (list(range(1, limit + 1)), True)
    assert await read(db, 1000 - limit, limit, 1) == (list(range(1001 - limit, 1001)), False)
    assert await read(db, 1000, limit, 1) == ([], False)


async def test_a_page_of_large_rows_ends_by_their_bytes(db: Connection[Any]) -> None:
    found: list[int] = []
    more = True
    while more:
        rows, more = await read(db, found[-1] if found else 0, 400, 10_000)
        assert len(rows) == PAGE_BYTES_MAX // 10_100 + 1 or not more
        found += rows
    assert found == list(range(1, 1001))


async def test_a_page_has_at_least_one_row(db: Connection[Any]) -> None:
    assert await read(db, 7, 400, 2 * PAGE_BYTES_MAX) == ([8], True)
    assert await read(db, 999, 400, 2 * PAGE_BYTES_MAX) == ([1000], False)


@pytest.mark.parametrize("size", [1, 10_000, 2 * PAGE_BYTES_MAX])
async def test_rows_that_were_read_at_once_are_the_same_page(
    db: Connection[Any], size: int
) -> None:
    for limit in (1, 2, 200):
        rows = await db.fetch(ROWS, 0, limit + 1, size if limit < 3 else min(size, 10_000))
        page = page_of(rows, limit)
        given = size if limit < 3 else min(size, 10_000)
        assert ([row["n"] for row in page], page.more) == await read(db, 0, limit, given)
    assert list(page_of([], 5)) == []
    assert not page_of([], 5).more


async def test_other_tasks_run_while_a_page_is_converted() -> None:
    """A long page is a request of one tenant: those of others must not wait for all of it."""
    converted: list[int] = []
    seen: list[int] = []

    async def other() -> None:
        while len(converted) < 1000:
            seen.append(len(converted))
            await asyncio.sleep(0)

    def make(row: int) -> int:
        converted.append(row)
        return -row

    async with asyncio.TaskGroup() as running:
        running.create_task(other())
        page = await convert(RowPage(range(1000), more=True), make)
    assert list(page) == [-n for n in range(1000)]
    assert page.more
    assert seen == list(range(PORTION_ROWS, 1000, PORTION_ROWS))

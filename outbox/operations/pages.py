"""Pages of listings, limited in rows and in bytes.

A page of rows that are small in most installations may be large in another one: settings of an
endpoint have up to 100 KiB.  So a page also ends after `PAGE_BYTES_MAX`.  The rows are read in
portions, and their size is that of their texts in memory, not the compressed one in the database.
"""

from __future__ import annotations

import asyncio
from itertools import accumulate
from sys import getsizeof
from typing import TYPE_CHECKING, Any, TypeVar, cast

from outbox.operations.rows import RowPage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from asyncpg import Connection, Record

Row = TypeVar("Row")
Item = TypeVar("Item")

PAGE_BYTES_MAX = 1024 * 1024
PORTION_ROWS = 50
"""Rows that are read at a time, with the largest settings some 5 MB, and that are converted at a
time, in about a millisecond."""
WHOLE_RESPONSES_MAX = 100
"""Receivers' responses in a result that have bodies and headers, each of at most some 25 KB."""


async def read_page(
    connection: Connection[Any],
    statement: str,
    column: str,
    after: object,
    limit: int,
    *arguments: object,
) -> RowPage[Record]:
    """Read the rows of a page: at least one, at most `limit`, and no more after `PAGE_BYTES_MAX`.

    Args:
        statement: selects at most $2 rows after the row whose column has the value $1.
        column: the column that orders the rows.
        arguments: the parameters of the statement from $3 on.
    """
    rows: list[Record] = []
    size = 0
    while True:
        wanted = min(PORTION_ROWS, limit + 1 - len(rows))
        portion = await connection.fetch(statement, after, wanted, *arguments)
        for row in portion:
            size += _text_bytes(row.values())
            if len(rows) == limit or (rows and size > PAGE_BYTES_MAX):
                return RowPage(rows, more=True)
            rows.append(row)
        if len(portion) < wanted:
            return RowPage(rows, more=False)
        after = portion[-1][column]


def page_of(rows: Sequence[Record], limit: int) -> RowPage[Record]:
    """Limit up to `limit + 1` rows that were read at once, because they are small."""
    sizes = accumulate(_text_bytes(row.values()) for row in rows)
    count = min(limit, max(1, sum(size <= PAGE_BYTES_MAX for size in sizes)))
    return RowPage(rows[:count], more=len(rows) > count)


async def convert(rows: RowPage[Row], make: Callable[[Row], Item]) -> RowPage[Item]:
    """Convert the rows of a page; other tasks run between two portions."""
    made: list[Item] = []
    for row in rows:
        made.append(make(row))
        if len(made) % PORTION_ROWS == 0:
            await asyncio.sleep(0)
    return RowPage(made, more=rows.more, cursor=rows.cursor)


def _text_bytes(values: Iterable[object]) -> int:
    """The memory of texts; what has a fixed size is limited by the number of rows."""
    size = 0
    for each in values:
        # Not by isinstance: a page has up to 50,000 values, and others wait meanwhile.
        kind = type(each)
        if kind is str or kind is bytes:
            size += getsizeof(each)
        elif kind is list:
            size += _text_bytes(cast("list[object]", each))
    return size


def shorten_responses(column: str, order: str) -> str:
    """The expression of a stored response, with body and headers in the first rows only.

    Args:
        column: the column of a receiver's stored response.
        order: the order of the rows, those with whole responses first.
    """
    return f"""
       CASE WHEN row_number() OVER (ORDER BY {order}) <= {WHOLE_RESPONSES_MAX}
            THEN {column} ELSE {column} - '{{body,headers}}'::text[] END"""

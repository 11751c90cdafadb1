"""Pages of listings, limited in bytes.

A page of rows that are small in most installations may be large in another one: settings of an
endpoint have up to 100 KiB.  What is read, parsed and encoded at once pauses the event loop of the
relay beside which the API runs, so a page ends after `PAGE_BYTES_MAX`.  The sizes are summed in the
database, before anything is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncpg import Connection

PAGE_BYTES_MAX = 1024 * 1024


def count_rows_within(page: str, order: str) -> str:
    """The statement that counts the first rows of a page, up to the first one above the limit.

    Args:
        page: selects the rows of the page, each with its column `bytes`.
        order: the order of these rows, by their columns.
    """
    return f"""
SELECT count(*) FROM (
       SELECT sum(p.bytes) OVER (ORDER BY {order} ROWS UNBOUNDED PRECEDING) - p.bytes AS before
         FROM ({page}) p) counted
 WHERE before < {PAGE_BYTES_MAX}
"""  # noqa: S608 (constants only)


def shorten_responses(column: str, order: str) -> str:
    """The expression of a stored response, without its body and headers after the limit.

    Args:
        column: the column of a receiver's stored response.
        order: the order of the rows, those with whole responses first.
    """
    size = f"sum(coalesce(octet_length({column}::text), 0))"
    return f"""
       CASE WHEN {size} OVER (ORDER BY {order} ROWS UNBOUNDED PRECEDING) <= {PAGE_BYTES_MAX}
            THEN {column} ELSE {column} - '{{body,headers}}'::text[] END"""


async def read_page_limit(
    connection: Connection[Any], statement: str, limit: int, *arguments: object
) -> int:
    """Read how many rows the next page may have: at least 1, at most `limit`.

    Args:
        statement: the result of `count_rows_within`; it selects at most `limit` rows by its
            arguments.
    """
    count: int = await connection.fetchval(statement, *arguments)
    return min(max(count, 1), limit)

"""Row level security on our own tables: a statement of ours reads all rows, or fails.

Our sessions set `row_security = off`, with which PostgreSQL raises an error instead of applying a
policy.  That error has the code of a missing privilege, and its text is localized, so the cause is
read from the catalog.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from asyncpg import InsufficientPrivilegeError

from outbox.core.model.sql_names import quote_ident
from outbox.errors import CursorBroken
from outbox.store.schema.migration_files import table_names

if TYPE_CHECKING:
    from asyncpg import Connection

# Our tables whose policies apply to this role, or to their owner, with whose privileges functions
# run.
_READ_PROTECTED = """
SELECT current_schema() AS schema, current_user AS role, array_agg(relname::text) AS tables
  FROM (SELECT c.relname FROM pg_class c
         WHERE c.relnamespace = quote_ident(current_schema())::regnamespace
           AND c.relkind IN ('r', 'p') AND c.relname = ANY ($1::text[])
           AND (row_security_active(c.oid) OR c.relrowsecurity AND c.relforcerowsecurity)
         ORDER BY c.relname <> 'outbox', c.relname) protected
"""


class RowSecurityError(InsufficientPrivilegeError):  # type: ignore[misc]
    """A policy applies to a table that a statement reads or writes."""


def rows_hidden(*tables: str) -> str:
    """An expression: whether policies may hide rows of these tables from the statement.

    Correct only if it is planned with the statement that reads them.  A statement with a cached
    plan fails instead, because sessions that cache plans set `row_security = off`.  The views of
    runs are read with the rights of their owner, so name their tables.
    """
    active = " OR ".join(f"row_security_active('{table}')" for table in tables)
    return f"(SELECT {active})"


async def stop_hidden(connection: Connection[Any]) -> NoReturn:
    """Stop, because a read may have returned only a part of the rows.

    Raises:
        CursorBroken: always.
    """
    raise CursorBroken(await read_row_security_reason(connection))


async def require_unprotected(connection: Connection[Any]) -> None:
    """Require that no policy applies to one of our tables, before reads behind a proxy.

    Raises:
        CursorBroken: one applies, also if it hides nothing.
    """
    if (reason := await read_protected_reason(connection)) is not None:
        raise CursorBroken(reason)


async def stop_empty(connection: Connection[Any], table: str) -> NoReturn:
    """Stop, because a read did not return the row that the migration of a table wrote.

    Raises:
        CursorBroken: always.
    """
    raise CursorBroken(
        await read_protected_reason(connection)
        or f"the table {table} was emptied; restore the whole schema from a backup"
    )


async def read_row_security_reason(connection: Connection[Any]) -> str:
    """Why a read may have returned only a part of the rows, and what to do about it."""
    return await read_protected_reason(connection) or (
        "row level security was active during a read; it is not any more"
    )


async def explain_denial(
    connection: Connection[Any], error: InsufficientPrivilegeError
) -> InsufficientPrivilegeError:
    """Add to an error what to do about row security, if a policy applies to one of our tables."""
    reason = await read_protected_reason(connection)
    if reason is None:
        return error
    message = str(error).partition("\n")[0]
    return RowSecurityError(f"{message}; {reason}")


async def read_protected_reason(connection: Connection[Any]) -> str | None:
    """What to do about row security, also if its policies hide nothing; None: it is not active."""
    row = await connection.fetchrow(_READ_PROTECTED, table_names())
    if not row["tables"]:
        return None
    names = [f"{quote_ident(row['schema'])}.{quote_ident(table)}" for table in row["tables"]]
    others = f" and {len(names) - 1} other tables" if names[1:] else ""
    return (
        f"row level security is active on {names[0]}{others}, and may hide committed rows from the "
        f"role {row['role']}; run: ALTER TABLE {names[0]} DISABLE ROW LEVEL SECURITY (also if its "
        "policies hide nothing), or, unless it is forced: "
        f"ALTER ROLE {quote_ident(row['role'])} BYPASSRLS"
    )

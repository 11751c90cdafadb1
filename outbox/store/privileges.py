"""Privileges that a purpose requires, by the schema's own list (schema/0007_roles.sql)."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from outbox.core.model.schema_name import migrate_command
from outbox.errors import CannotRun
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from asyncpg import Connection

NAMED_MAX = 3

# Privileges that a purpose requires and the current role lacks.  A later version of the schema may
# have overloads of a function.
READ_MISSING_PRIVILEGES = """
SELECT r.privilege || ' on ' || r.name AS missing
  FROM required_privileges($1) r
 WHERE NOT CASE r.kind
           WHEN 'sequence' THEN has_sequence_privilege(r.name, r.privilege)
           WHEN 'function' THEN (
                SELECT bool_or(has_function_privilege(p.oid, r.privilege)) FROM pg_proc p
                 WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
                   AND p.proname = r.name)
           ELSE CASE WHEN r.columns IS NULL THEN has_table_privilege(r.name, r.privilege)
                     ELSE (SELECT bool_and(has_column_privilege(r.name, c, r.privilege))
                             FROM unnest(r.columns) AS c) END
           END
 ORDER BY r.kind DESC, r.name
"""

READ_ROLE = "SELECT current_user"


async def missing_privileges(connection: Connection[Any], purpose: str) -> list[str]:
    """The privileges of a purpose that the current role lacks, such as `SELECT on lane`."""
    return [row["missing"] for row in await connection.fetch(READ_MISSING_PRIVILEGES, purpose)]


async def require_relay_privileges(connection: Connection[Any], schema: str) -> None:
    """Check that the current role may do all that a relay does.

    Without this, a relay would fail at the first statement that it may not execute: some only
    when it leads, or when a partition is dropped.

    Raises:
        CannotRun: the role lacks a privilege; the message has the command that grants it.
        SchemaMissing, DatabaseUnavailable: as in `map_errors`.
    """
    with map_errors(schema, "relay"):
        missing = await missing_privileges(connection, "relay")
        if not missing:
            return
        role = await connection.fetchval(READ_ROLE)
    more = f" and {len(missing) - NAMED_MAX} more" if len(missing) > NAMED_MAX else ""
    raise CannotRun(
        f'the role "{role}" lacks privileges of a relay ({", ".join(missing[:NAMED_MAX])}{more}); '
        f"as the role that ran outbox migrate: {migrate_command(schema)} --relay "
        f"{shlex.quote(role)}"
    )

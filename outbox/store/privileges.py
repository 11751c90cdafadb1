"""Purposes of roles, and the privileges that they require by the schema's own lists."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from outbox.core.model.schema_name import migrate_command
from outbox.errors import CannotRun
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncpg import Connection

PURPOSES: Mapping[str, str] = {
    "producer": "publish",
    "relay": "run outbox relay",
    "operator": "manage endpoints, replays and schedules",
    "api": "run outbox api",
    "reader": "read everything but secrets",
}
"""Purposes that a role can be granted, and what it may do then; see schema/0021_api.sql."""

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


class LacksPrivileges(CannotRun):
    """The current role lacks privileges that its purpose requires."""


async def missing_privileges(connection: Connection[Any], purpose: str) -> list[str]:
    """The privileges of a purpose that the current role lacks, such as `SELECT on lane`."""
    return [row["missing"] for row in await connection.fetch(READ_MISSING_PRIVILEGES, purpose)]


async def require_privileges(connection: Connection[Any], schema: str, purpose: str) -> None:
    """Check that the current role may do all that its purpose requires.

    Without this, a process would fail at the first statement that it may not execute: a relay some
    only when it leads, or when a partition is dropped.

    Raises:
        LacksPrivileges: the message has the command that grants them.
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    with map_errors(schema, purpose):
        missing = await missing_privileges(connection, purpose)
        if not missing:
            return
        role = await connection.fetchval(READ_ROLE)
    more = f" and {len(missing) - NAMED_MAX} more" if len(missing) > NAMED_MAX else ""
    raise LacksPrivileges(
        f'the role "{role}" lacks privileges of the purpose "{purpose}" '
        f"({', '.join(missing[:NAMED_MAX])}{more}); as the role that ran outbox migrate: "
        f"{migrate_command(schema)} --{purpose} {shlex.quote(role)}"
    )

"""The version of the schema of our own connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.model.schema_name import migrate_command
from outbox.drivers.connections import open_connection
from outbox.store.connection.connect import map_errors
from outbox.store.schema.schema_status import not_ours, read_status, require_applied

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.store.schema.schema_status import SchemaStatus


async def status(
    connection: Connection[Any], schema: str, purpose: str | None = None
) -> SchemaStatus:
    """Read which migrations are applied and which are pending; changes nothing.

    Args:
        purpose: see `map_errors`.

    Raises:
        SchemaTooNew: a newer, incompatible version of this package migrated the schema.
        CannotRun: as in `read_status`.
        DatabaseUnavailable: the connection was lost.
    """
    with map_errors(schema, purpose):
        try:
            return await (await open_connection(connection)).execute_plan(read_status(schema))
        except asyncpg.UndefinedColumnError as error:
            raise not_ours(schema) from error


async def require_current(
    connection: Connection[Any], schema: str, purpose: str | None = None
) -> None:
    """Check that the schema is compatible with this program.

    Args:
        purpose: see `map_errors`.

    Raises:
        SchemaMissing: it does not exist, or is older than this program.
        SchemaTooNew: it is newer and incompatible.
        CannotRun: as in `status`.
    """
    require_applied(await status(connection, schema, purpose), f"run: {migrate_command(schema)}")

"""Migrations as statements for a transaction of another migration tool, such as Alembic.

`outbox migrate` sends each file as one message.  Here the transaction is the tool's, its driver
may accept one command at a time (asyncpg's does), and a script that is printed for later does not
know the version that it will find.  So each file is one DO command, which does nothing if the
file was applied before, and the settings of the transaction are restored at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.model.sql_names import quote_ident, quote_literal, schema_name, search_path
from outbox.errors import UsageError
from outbox.store.schema.lock_attempts import MESSAGE_LOCK_TIMEOUT_S
from outbox.store.schema.migration_files import migrations
from outbox.store.schema.migration_statements import (
    CREATE_HISTORY,
    LOCK,
    ROW_SECURITY_OFF,
    statements_of,
)

if TYPE_CHECKING:
    from outbox.store.schema.migration_files import Migration

# The transaction goes on after the migrations, with its own search path, limits and row security.
# They are kept in settings of the same transaction, because a printed script has no other place.
SAVE_SETTINGS = """DO $$ BEGIN
    PERFORM set_config('outbox.saved_search_path', current_setting('search_path'), true);
    PERFORM set_config('outbox.saved_lock_timeout', current_setting('lock_timeout'), true);
    PERFORM set_config('outbox.saved_row_security', current_setting('row_security'), true);
END $$"""
RESTORE_SETTINGS = """DO $$ BEGIN
    PERFORM set_config('search_path', current_setting('outbox.saved_search_path'), true);
    PERFORM set_config('lock_timeout', current_setting('outbox.saved_lock_timeout'), true);
    PERFORM set_config('row_security', current_setting('outbox.saved_row_security'), true);
END $$"""

# Not CREATE SCHEMA IF NOT EXISTS, which requires the privilege also if the schema exists.
CREATE_SCHEMA = """BEGIN
    IF NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = {literal}) THEN
        CREATE SCHEMA {identifier};
    END IF;
END"""

# EXECUTE accepts several commands, and analyzes each after the one before it was executed.
APPLY_FILE = """DO $outbox$ BEGIN
IF (SELECT coalesce(max(version), 0) FROM migration) < {version} THEN
EXECUTE $migration$
{statements};
$migration$;
END IF;
END $outbox$"""


def statements_for(schema: str, to: int) -> list[str]:
    """The commands that migrate a schema from any older version, each to be sent on its own.

    All of them in one transaction, in this order.  None has parameters, and `:` and `%` have no
    special meaning.

    Args:
        schema: created if it does not exist.
        to: the version to migrate to; a schema at this version or a later one is not changed.

    Raises:
        UsageError: an invalid name or version.
    """
    schema_name(schema)
    known = migrations()
    if not 1 <= to <= known[-1].version:
        raise UsageError(f"there is no version {to}; this program knows 1 to {known[-1].version}")
    literal, identifier = quote_literal(schema), quote_ident(schema)
    create = quote_literal(CREATE_SCHEMA.format(literal=literal, identifier=identifier))
    return [
        SAVE_SETTINGS,
        # Producers wait behind each lock that this waits for.
        f"SET LOCAL lock_timeout = {int(MESSAGE_LOCK_TIMEOUT_S * 1000)}",
        # A name may contain the delimiter of a dollar-quoted text.
        f"DO {create}",
        f"SET LOCAL search_path = {search_path(schema)}",
        ROW_SECURITY_OFF,
        CREATE_HISTORY,
        LOCK,
        *map(_apply_once, known[:to]),
        RESTORE_SETTINGS,
    ]


def _apply_once(migration: Migration) -> str:
    statements = ";\n".join(statements_of(migration))
    return APPLY_FILE.format(version=migration.version, statements=statements)

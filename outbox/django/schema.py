"""The schema in one of Django's databases: its status, and applying migrations.

The migrations are those of `outbox migrate`: the same files, in the same messages, with the same
history table.  So either command finds what the other one applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError

from outbox.drivers.blocking import run
from outbox.drivers.connections import open_connection
from outbox.drivers.errors import CREATED_MEANWHILE, NO_PRIVILEGE, server_error
from outbox.errors import CannotRun, UsageError
from outbox.store.errors import ABORTED
from outbox.store.schema.lock_attempts import lock_message, retry_until_granted
from outbox.store.schema.migration_statements import (
    READ_CURRENT_ROLE,
    RELAYS_RUN,
    apply_statements,
    may_not_create_schema,
)
from outbox.store.schema.schema_status import not_ours
from outbox.store.schema.schema_status import read_status as read_status_plan

if TYPE_CHECKING:
    from outbox.store.schema.migration_files import Migration
    from outbox.store.schema.schema_status import SchemaStatus

PRODUCER_FUNCTIONS = (
    "publish",
    "publish_text",
    "publish_checked",
    "publish_many",
    "claim_once",
    "reset_once",
    "payload_bytes_max",
)
"""What a role has to be allowed to execute to publish: see `producer_privileges()`."""

# What this role may do in a schema, from the catalogs, which every role may read.
READ_ACCESS = """
SELECT current_user AS role, h.oid IS NOT NULL AS has_history,
       has_schema_privilege(n.oid, 'USAGE')
       AND coalesce(has_table_privilege(h.oid, 'SELECT'), true) AS may_read_history,
       has_schema_privilege(n.oid, 'USAGE')
       AND coalesce((SELECT bool_and(has_function_privilege(p.oid, 'EXECUTE')) FROM pg_proc p
                      WHERE p.pronamespace = n.oid AND p.proname = ANY (%s)), true) AS may_publish
  FROM pg_namespace n
  LEFT JOIN pg_class h ON h.relnamespace = n.oid AND h.relname = 'migration' AND h.relkind = 'r'
 WHERE n.nspname = %s
"""

# SQLSTATEs, see appendix A of the PostgreSQL documentation.
_EXISTS = ("42P07", "42723")
_UNDEFINED_COLUMN = "42703"


@dataclass(frozen=True, slots=True)
class Access:
    """What the role of a connection may do in the schema."""

    role: str
    has_history: bool
    may_read_history: bool
    may_publish: bool


def read_access(connection: Any, schema: str) -> Access | None:
    """Read what this role may do; None: the schema does not exist."""
    with connection.cursor() as cursor:
        cursor.execute(READ_ACCESS, [list(PRODUCER_FUNCTIONS), schema])
        row = cursor.fetchone()
    return None if row is None else Access(*row)


def read_status(connection: Any, schema: str) -> SchemaStatus:
    """Read which migrations are applied and which are pending.

    Raises:
        SchemaTooNew: a newer, incompatible version of this package migrated the schema.
        CannotRun: an applied file differs from this program's, or the schema belongs to another
            application.
        django.db.Error: such as: this role may not read the history.
    """
    try:
        return run(_read_status(connection, schema))
    except DatabaseError as error:
        if server_error(error).sqlstate == _UNDEFINED_COLUMN:
            raise not_ours(schema) from error
        raise


async def _read_status(connection: Any, schema: str) -> SchemaStatus:
    return await (await open_connection(connection)).execute_plan(read_status_plan(schema))


def migrate(connection: Any, schema: str, version: int) -> list[Migration]:
    """Apply pending migrations up to a version, each in a transaction of its own.

    Returns:
        The migrations applied by this call; none if `outbox migrate` has applied them.

    Raises:
        UsageError: the database is not PostgreSQL.
        SchemaTooNew: as in `read_status`.
        CannotRun: a lock was not granted; a transaction is open; a relay that must stop first
            runs; or as in `read_status`.
    """
    require_postgresql(connection)
    done: list[Migration] = []
    while True:
        status = read_status(connection, schema)
        pending = [each for each in status.pending if each.version <= version]
        if not pending:
            return done
        if connection.in_atomic_block or not connection.get_autocommit():
            raise CannotRun(
                f"{pending[0]} was not applied: a transaction is open, and producers would wait "
                "for its end; run the migration outside of a transaction"
            )
        if _apply(connection, schema, pending):
            done.append(pending[0])


def require_postgresql(connection: Any) -> None:
    """Check that a database is PostgreSQL.

    Raises:
        UsageError: it is not.
    """
    if connection.vendor != "postgresql":
        raise UsageError(
            f'OUTBOX_DATABASES: database "{connection.alias}" is {connection.vendor}; '
            "an outbox requires PostgreSQL"
        )


def _apply(connection: Any, schema: str, pending: list[Migration]) -> bool:
    """Apply the first of some migrations.

    Returns:
        False if another migrator has changed the schema meanwhile.
    """
    migration = pending[0]
    creates_schema = read_access(connection, schema) is None
    # Without parameters it is one message, which PostgreSQL executes as one transaction.
    message = lock_message(apply_statements(schema, pending, creates_schema=creates_schema))

    def attempt() -> None:
        with connection.cursor() as cursor:
            cursor.execute(message)

    try:
        retry_until_granted(attempt, f"{migration} was not applied")
    except DatabaseError as error:
        found = server_error(error)
        sqlstate = found.sqlstate
        if sqlstate == RELAYS_RUN:
            raise CannotRun(found.message) from error
        if sqlstate == ABORTED or (sqlstate in CREATED_MEANWHILE and migration.version == 1):
            return False
        if sqlstate in _EXISTS:
            raise not_ours(schema) from error
        if sqlstate == NO_PRIVILEGE and creates_schema:
            with connection.cursor() as cursor:
                cursor.execute(READ_CURRENT_ROLE)
                current = cursor.fetchone()
            raise may_not_create_schema(*current) from error
        raise
    return True

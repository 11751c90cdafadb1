"""Migrations of the outbox schema in an application's Alembic revisions.

    from alembic import op
    import outbox.alembic

    def upgrade():
        outbox.alembic.upgrade(op, to=9)

The revision applies the files of `outbox migrate`, and both record the version in the same table,
so a database that was migrated by one of them is up to date for the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from outbox.core.model.schema_name import SCHEMA, migrate_command
from outbox.drivers.blocking import run
from outbox.drivers.connections import open_connection
from outbox.drivers.errors import CREATED_MEANWHILE, server_error
from outbox.errors import CannotRun, NoTransaction, UsageError
from outbox.producers.publishing import driver_for
from outbox.store.schema.lock_attempts import retry_until_granted
from outbox.store.schema.migrate_in_transaction import statements_for
from outbox.store.schema.migration_files import migrations
from outbox.store.schema.migration_statements import RELAYS_RUN
from outbox.store.schema.schema_status import not_ours, read_status, require_applied

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeAlias

    from alembic.runtime.migration import MigrationContext
    from sqlalchemy import Connection

    from outbox.store.schema.schema_status import SchemaStatus
    from outbox.sync import ConnectionLike

    NameFilter: TypeAlias = Callable[[str | None, str, Any], bool]
    ObjectFilter: TypeAlias = Callable[[Any, str | None, str, bool, Any], bool]

__all__ = ["check", "downgrade", "include_name", "include_object", "upgrade"]

# SQLSTATEs, see appendix A of the PostgreSQL documentation.
_ANOTHER_TABLE = ("42703", "42P07", "42723")
"""A column is undefined, or a table or function exists already."""


class RevisionOperations(Protocol):
    """`alembic.op` in a revision."""

    def get_context(self) -> MigrationContext:
        """The context of the revision."""
        ...

    def get_bind(self) -> Connection:
        """The connection of the revision."""
        ...


def upgrade(op: RevisionOperations, to: int, schema: str = SCHEMA) -> None:
    """Migrate the outbox schema in the transaction of an Alembic revision.

    Does nothing if the schema is at this version or a later one.  With `alembic upgrade --sql`
    it prints SQL that does the same.

    Producers wait for the locks that the revision holds until its transaction ends, so let it do
    nothing else, and set `transaction_per_migration=True` in env.py.

    Args:
        op: `from alembic import op`.
        to: the version, such as 9: the number of the last file that is applied.
        schema: created if it does not exist.

    Raises:
        UsageError: the version is unknown, the name is invalid, or the database is not PostgreSQL.
        NoTransaction: the revision runs in autocommit; nothing was changed.
        SchemaTooNew: a later, incompatible version of this package migrated the schema.
        CannotRun: another session holds a lock, a relay that must stop first runs, the schema
            belongs to another application, or the isolation level is not READ COMMITTED; nothing
            was changed.
        sqlalchemy.exc.DBAPIError: any other error of the driver.
    """
    statements = statements_for(schema, to)
    context = op.get_context()
    if context.dialect.name != "postgresql":
        raise UsageError(
            f"the outbox is in PostgreSQL, but this revision is for {context.dialect.name}"
        )
    if context.as_sql:
        for statement in statements:
            context.impl.static_output(f"{statement};")
        return
    _upgrade(op.get_bind(), statements, to, schema)


def downgrade(op: RevisionOperations, to: int = 0, schema: str = SCHEMA) -> NoReturn:
    """Refuse: the outbox has no downgrades.

    Raises:
        UsageError: always; nothing was changed.
    """
    raise UsageError(
        f'the outbox schema "{schema}" has no downgrade to version {to}: it would lose events; '
        "restore a backup, or remove the schema by DROP SCHEMA"
    )


def check(connection: ConnectionLike, schema: str = SCHEMA) -> None:
    """Check that the outbox schema is at a version that this library works with.

    For the start of an application: `await connection.run_sync(outbox.alembic.check)` on asyncio.

    Args:
        connection: a connection, as `outbox.sync.publish` takes it.

    Raises:
        SchemaMissing: a migration is pending.
        SchemaTooNew: a later, incompatible version of this package migrated the schema.
        CannotRun: the schema belongs to another application, or to a changed version of this
            package.
        UsageError: the connection is of an unsupported type.
    """
    instead = "await connection.run_sync(outbox.alembic.check)"
    driver_for(connection, is_async=False, instead=instead)
    found = run(_status(connection, schema))
    version = migrations()[-1].version
    require_applied(
        found,
        f"add a revision that calls outbox.alembic.upgrade(op, to={version}) and run alembic "
        f"upgrade head, or run: {migrate_command(schema)}",
    )


def include_name(own: NameFilter | None = None, *, schema: str = SCHEMA) -> NameFilter:
    """Make a filter for `context.configure(include_name=…)`: autogenerate skips the outbox schema.

    Args:
        own: the application's filter for all other names; None: all of them are included.
    """

    def include(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
        inside = name if type_ == "schema" else parent_names.get("schema_name")
        if inside == schema:
            return False
        return own is None or own(name, type_, parent_names)

    return include


def include_object(own: ObjectFilter | None = None, *, schema: str = SCHEMA) -> ObjectFilter:
    """Make a filter for `context.configure(include_object=…)`.

    For applications that declare tables of the outbox schema in their metadata, to read them:
    autogenerate does not create them.

    Args:
        own: the application's filter for all other objects; None: all of them are included.
    """

    def include(item: Any, name: str | None, type_: str, reflected: bool, other: Any) -> bool:
        # Columns, indexes and constraints have their table; a table has its schema.
        if getattr(getattr(item, "table", item), "schema", None) == schema:
            return False
        return own is None or own(item, name, type_, reflected, other)

    return include


def _upgrade(connection: Connection, statements: list[str], to: int, schema: str) -> None:
    if run(_status(connection, schema)).version >= to:
        return
    if not run(open_connection(connection)).has_transaction:
        raise NoTransaction(
            "outbox.alembic.upgrade needs the transaction of the revision; "
            "call it outside of autocommit_block()"
        )
    isolation_level = connection.exec_driver_sql("SHOW transaction_isolation").scalar_one()
    if isolation_level != "read committed":
        raise CannotRun(
            f"this transaction is {isolation_level}, so it would not see what another session "
            'migrates meanwhile; in env.py, give create_engine isolation_level="READ COMMITTED"'
        )

    def send() -> None:
        # A savepoint: after a lock time-out, the transaction of the revision goes on.
        with connection.begin_nested():
            for statement in statements:
                connection.exec_driver_sql(statement, execution_options={"no_parameters": True})

    def attempt() -> None:
        try:
            send()
        except Exception as error:
            if server_error(error).sqlstate not in CREATED_MEANWHILE:
                raise
            send()  # What the other session created is committed, and is seen now.

    try:
        retry_until_granted(attempt, "the outbox schema was not migrated")
    except Exception as error:
        found = server_error(error)
        if found.sqlstate == RELAYS_RUN:
            raise CannotRun(found.message) from error
        if found.sqlstate in _ANOTHER_TABLE:
            raise not_ours(schema) from error
        raise


async def _status(connection: ConnectionLike, schema: str) -> SchemaStatus:
    try:
        return await (await open_connection(connection)).execute_plan(read_status(schema))
    except Exception as error:
        if server_error(error).sqlstate in _ANOTHER_TABLE:
            raise not_ours(schema) from error
        raise

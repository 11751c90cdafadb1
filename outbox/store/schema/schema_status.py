"""The version of the outbox schema: which migrations its table `migration` lists.

Reading it changes nothing, on a connection of any driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.drivers.statement import Call
from outbox.errors import CannotRun, SchemaMissing, SchemaTooNew
from outbox.producers.statements import in_schema
from outbox.store.schema.migration_files import Migration, migrations
from outbox.store.schema.server_product import explain_foreign_product

if TYPE_CHECKING:
    from outbox.drivers.statement import Plan

# The server's product, and whether this schema has a history table, independently of the search
# path.
FIND_HISTORY = """
SELECT version(), EXISTS (
       SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
       WHERE n.nspname = CAST(:schema AS text) AND c.relname = 'migration' AND c.relkind = 'r')
"""

# Applied migrations.
READ_HISTORY = "SELECT version, checksum, works_from FROM {schema}.migration ORDER BY version"


@dataclass(frozen=True, slots=True)
class SchemaStatus:
    """The migration status of a schema."""

    schema: str
    version: int
    """0: no migration was applied.  Higher than the last file's: a newer, compatible program
    migrated the schema."""
    applied: tuple[Migration, ...]
    pending: tuple[Migration, ...]


@dataclass(frozen=True, slots=True)
class _Applied:
    version: int
    checksum: str
    works_from: int


def read_status(schema: str) -> Plan[SchemaStatus]:
    """Read which migrations are applied, on a connection of any driver.

    Raises:
        SchemaTooNew: a newer, incompatible version of this package migrated the schema.
        CannotRun: an applied file differs from this program's, the schema belongs to another
            application, or the server is not PostgreSQL.
    """
    history: dict[int, _Applied] = {}
    ((version, exists),) = yield Call(FIND_HISTORY, {"schema": schema})
    if (reason := explain_foreign_product(version)) is not None:
        raise CannotRun(reason)
    if exists:
        rows = yield Call(in_schema(READ_HISTORY, schema), {})
        history = {row[0]: _Applied(*row) for row in rows}
    return _status_of(schema, history)


def _status_of(schema: str, history: dict[int, _Applied]) -> SchemaStatus:
    known = migrations()
    newest = known[-1].version
    version = max(history, default=0)
    if any(row.version > newest and row.works_from > newest for row in history.values()):
        raise SchemaTooNew(
            f'schema "{schema}" is at version {version}, this program knows '
            f"{newest}; upgrade outbox-relay here"
        )
    applied = {row.version: row.checksum for row in history.values()}
    for migration in known:
        checksum = applied.get(migration.version)
        if checksum is not None and checksum != migration.checksum:
            raise CannotRun(
                f'schema "{schema}" was created by a different {migration} than this program has; '
                "use the version of outbox-relay that created it, or an empty schema"
            )
    done = tuple(m for m in known if m.version in applied)
    pending = tuple(m for m in known if m.version not in applied)
    if pending and version > pending[0].version:
        raise CannotRun(
            f'the history of schema "{schema}" lacks {pending[0]}, but has later migrations'
        )
    return SchemaStatus(schema, version, done, pending)


def require_applied(found: SchemaStatus, remedy: str) -> None:
    """Check that no migration is pending.

    Args:
        remedy: what applies the migrations, for the error.

    Raises:
        SchemaMissing: one is pending.
    """
    if not found.applied:
        raise SchemaMissing(f'schema "{found.schema}" is not there; {remedy}')
    if found.pending:
        raise SchemaMissing(
            f'schema "{found.schema}" is at version {found.version}, this program needs '
            f"{found.pending[-1].version}; {remedy}"
        )


def not_ours(schema: str) -> CannotRun:
    """The error for a schema with tables of another application."""
    return CannotRun(
        f'schema "{schema}" contains tables of another application; '
        "choose another schema with --schema"
    )

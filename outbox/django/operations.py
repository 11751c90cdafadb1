"""The operation of which Django's migrations of the outbox consist.

One Django migration applies one file of `schema/`.  A file that was applied already, by `outbox
migrate` or from another project, is left as it is, and Django records its migration.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError
from django.db import router
from django.db.migrations.exceptions import IrreversibleError
from django.db.migrations.operations.base import Operation

from outbox.django.settings import read_databases, read_schema
from outbox.errors import OutboxError

if TYPE_CHECKING:
    from collections.abc import Iterator


class ApplyFile(Operation):
    """Applies the files of `schema/` up to a version.

    It does nothing in databases that are not in `OUTBOX_DATABASES`, or for which a router's
    `allow_migrate` returns False.  It is not reversible: that would drop the log of events.
    """

    reversible = True  # So that `database_backwards` can give the reason.
    reduces_to_sql = True

    def __init__(self, version: int) -> None:
        self.version = version

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Leave Django's models as they are: those of the outbox are unmanaged."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Apply what is pending."""
        from outbox.django import schema

        connection = schema_editor.connection
        if not _is_selected(connection.alias, app_label):
            return
        if schema_editor.collect_sql:
            schema_editor.collected_sql.append(self._sql())
            return
        with _one_line_errors():
            schema.migrate(connection, read_schema(), self.version)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Refuse to drop the schema; without one there is nothing to do.

        Raises:
            IrreversibleError: the schema exists.
        """
        from outbox.core.model.sql_names import quote_ident
        from outbox.django.schema import read_access

        connection = schema_editor.connection
        name = read_schema()
        if not _is_selected(connection.alias, app_label) or schema_editor.collect_sql:
            return
        if read_access(connection, name) is not None:
            raise IrreversibleError(
                f'a migration does not drop schema "{name}", which holds the events and their '
                "deliveries; to delete them for ever, stop the relays, execute "
                f"DROP SCHEMA {quote_ident(name)} CASCADE, and run this command again"
            )

    def describe(self) -> str:
        """The line of `manage.py migrate --plan`."""
        from outbox.store.schema.migration_files import migrations

        return f"Apply {migrations()[self.version - 1]}.sql of the outbox"

    def _sql(self) -> str:
        """The statements, also for `manage.py sqlmigrate`."""
        from outbox.store.schema.lock_attempts import lock_message
        from outbox.store.schema.migration_files import migrations
        from outbox.store.schema.migration_statements import apply_statements

        migration = migrations()[self.version - 1]
        creates = self.version == 1
        statements = apply_statements(read_schema(), [migration], creates_schema=creates)
        return f"BEGIN;\n{lock_message(statements)};\nCOMMIT;"


def _is_selected(alias: str, app_label: str) -> bool:
    return alias in read_databases() and bool(router.allow_migrate(alias, app_label))


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """`manage.py` prints a CommandError as one line, and any other error as a traceback."""
    try:
        yield
    except OutboxError as error:
        raise CommandError(str(error)) from error

"""System checks of the Django project's settings and of the schema in its databases.

The checks of databases run with `manage.py check --database ALIAS` and before `manage.py migrate`.
What a migration repairs is a warning there: an error would prevent the migration.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from outbox.core.model.schema_name import migrate_command
from outbox.django.settings import (
    APP_LABEL,
    manage_migrate_command,
    read_databases,
    read_page_url,
    read_schema,
)
from outbox.errors import OutboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TAG = "outbox"


def register_all() -> None:
    """Register the checks of this module."""
    checks.register(check_settings, TAG)
    checks.register(check_databases, checks.Tags.database)


def check_settings(**options: Any) -> list[checks.CheckMessage]:
    """E001: a setting is wrong.  E002: a database is not PostgreSQL."""
    found = []
    readers: Sequence[Callable[[], object]] = (read_schema, read_databases, read_page_url)
    for read in readers:
        try:
            read()
        except ImproperlyConfigured as error:
            name, _, problem = str(error).partition(": ")
            found.append(_error("E001", f"{name}: {problem}", f"Correct {name} in the settings."))
    if found:
        return found
    for alias in read_databases():
        vendor = connections[alias].vendor
        if vendor != "postgresql":
            found.append(
                _error(
                    "E002",
                    f'OUTBOX_DATABASES: database "{alias}" is {vendor}, not PostgreSQL.',
                    "List only databases with the engine django.db.backends.postgresql.",
                )
            )
    return found


def check_databases(
    databases: Sequence[str] | None = None, **options: Any
) -> list[checks.CheckMessage]:
    """E003: the schema is not of this version.  W001 to W003: see `_check_database`."""
    found = []
    if not check_settings():
        for alias in read_databases():
            if alias in (databases or ()):
                found += _check_database(alias)
    return found


def _check_database(alias: str) -> list[checks.CheckMessage]:
    """W001: the schema is absent.  W002: it is older.  W003: the role may not publish."""
    from outbox.django.schema import read_access, read_status

    connection, schema = connections[alias], read_schema()
    access = read_access(connection, schema)
    if access is None or not access.has_history:
        message = f'Database "{alias}" has no schema "{schema}" of the outbox.'
        return [_warning("W001", message, _migrate_hint(alias))]
    found = []
    # A role that only publishes may not read the history.
    if access.may_read_history:
        try:
            status = read_status(connection, schema)
        except OutboxError as error:
            hint = "Install the version of outbox-relay that migrated the schema last."
            return [_error("E003", f'Database "{alias}": {error}.', hint)]
        if status.pending:
            message = (
                f'Database "{alias}": schema "{schema}" is at version {status.version}, '
                f"this version of outbox-relay requires {status.pending[-1].version}."
            )
            found.append(_warning("W002", message, _migrate_hint(alias)))
    if not access.may_publish:
        found.append(
            _warning(
                "W003",
                f'Database "{alias}": role "{access.role}" may not publish in schema "{schema}".',
                f"As the owner of the schema, run: {migrate_command(schema)} --producer "
                f"{shlex.quote(access.role)}",
            )
        )
    return found


def _migrate_hint(alias: str) -> str:
    """The command that migrates, also where Django has recorded migrations that are not there."""
    from django.db.migrations.recorder import MigrationRecorder

    from outbox.store.schema.migration_files import migrations

    recorded = MigrationRecorder(connections[alias]).applied_migrations()
    if (APP_LABEL, str(migrations()[-1])) in recorded:
        return (
            f"Django has recorded the migrations. Run: manage.py outbox --database {alias} migrate"
        )
    return f"Run: {manage_migrate_command(alias)}"


def _error(number: str, message: str, hint: str) -> checks.CheckMessage:
    return checks.Error(message, hint=hint, id=f"{APP_LABEL}.{number}")


def _warning(number: str, message: str, hint: str) -> checks.CheckMessage:
    return checks.Warning(message, hint=hint, id=f"{APP_LABEL}.{number}")

"""`manage.py outbox …`: the command `outbox` on one of the project's databases.

    manage.py outbox status
    manage.py outbox --database events relay

The database's address and the schema are those of the Django settings; everything else is
configured as for `outbox`, with its flags, variables and file.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS, connections

from outbox.django.settings import read_databases, read_schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Django's own parameters of a psycopg connection; the others are libpq's.
_NOT_LIBPQ = ("client_encoding", "prepare_threshold")


class Command(BaseCommand):
    """Forwards its arguments to the command line of the relay."""

    help = "Run a command of outbox, such as status, relay or migrate, on a database."
    requires_system_checks: Sequence[str] = ()

    def add_arguments(self, parser: Any) -> None:
        """Declare the options, also for `call_command("outbox", "status", database="events")`."""
        parser.add_argument("--database", default=None, help="Alias of the database.")
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command with its own options, `--help` too, and end with its exit code."""
        own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        own.add_argument("--database", default=None)
        # manage.py has applied these.
        own.add_argument("--settings")
        own.add_argument("--pythonpath")
        options, arguments = own.parse_known_args(argv[2:])
        try:
            code = _forward(options.database, arguments)
        except CommandError as error:
            self.stderr.write(f"outbox: {error}")
            code = error.returncode
        sys.exit(code)

    def handle(self, *_: Any, database: str | None, arguments: list[str], **__: Any) -> None:
        """Run the command from a program.

        Raises:
            CommandError: it ended with another exit code than 0.
        """
        if code := _forward(database, arguments):
            raise CommandError(f"outbox ended with exit code {code}", returncode=code)


def _forward(database: str | None, arguments: Sequence[str]) -> int:
    from outbox.django.schema import require_postgresql
    from outbox.errors import MissingExtra, UsageError
    from outbox.extras import RELAY, needs_extra

    try:
        with needs_extra(RELAY, "manage.py outbox"):
            from outbox.cli.main import run
    except MissingExtra as error:
        raise CommandError(str(error), returncode=error.exit_code) from error

    aliases = read_databases()
    alias = database or (DEFAULT_DB_ALIAS if DEFAULT_DB_ALIAS in aliases else aliases[0])
    if alias not in aliases:
        raise CommandError(
            f'--database: "{alias}" has no outbox; OUTBOX_DATABASES has: {", ".join(aliases)}',
            returncode=UsageError.exit_code,
        )
    connection = connections[alias]
    try:
        require_postgresql(connection)
    except UsageError as error:
        raise CommandError(str(error), returncode=error.exit_code) from error
    # In the environment, because ps shows flags.
    with _environment(OUTBOX_DSN=dsn_of(connection), OUTBOX_SCHEMA=read_schema()):
        return run(arguments)


def dsn_of(connection: Any) -> str:
    """A database's address as key=value pairs, with the parameters that Django connects with."""
    parameters = {
        name: str(value)
        for name, value in connection.get_connection_params().items()
        if type(value) in (str, int) and name not in _NOT_LIBPQ
    }
    return " ".join(f"{name}={_quoted(value)}" for name, value in parameters.items())


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables for a block, and unset those of files with the same values."""
    names = (*values, *(f"{name}_FILE" for name in values))
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

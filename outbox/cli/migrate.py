"""`outbox migrate`: create or upgrade the schema, and grant privileges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg
import click

from outbox.cli.common import database, json_option, run_connected, settings_options, warn
from outbox.cli.output import echo, emit_document, emit_json
from outbox.core.model.schema_name import migrate_command
from outbox.errors import UsageError
from outbox.setting_sources import read_secret
from outbox.store.connection import current_schema, dsn, migrate
from outbox.store.connection.connect import map_errors
from outbox.store.login_roles import LoginRole, read_new_roles
from outbox.store.privileges import PURPOSES
from outbox.store.retention.partitions import PartitionStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.store.schema.migration_files import Migration

# Detaching a partition waits for transactions that use it; the time-out limits how long
# other sessions queue behind this lock request.
DROP_WAIT = "SET lock_timeout = '5s'"
NAMED_MAX = 3
"""Applied migrations that are printed by name."""


def _purpose_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each purpose."""
    for purpose, may in reversed(list(PURPOSES.items())):
        text = f"Grant a role the right to {may}."
        command = click.option(f"--{purpose}", multiple=True, metavar="ROLE", help=text)(command)
    return command


def _login_roles(
    context: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> list[LoginRole]:
    """Read the address of each PURPOSE=FILE."""
    roles = []
    for text in given:
        purpose, _, path = text.partition("=")
        # The text is not repeated: an address may have been given instead of its file.
        if purpose not in PURPOSES or not path or "://" in path:
            raise UsageError(
                "--create-role: give PURPOSE=FILE, such as relay=/run/secrets/relay-dsn; purposes: "
                + ", ".join(PURPOSES)
            )
        source = f"--create-role {purpose}"
        name, password = dsn.login_in(read_secret(source, path), source=source)
        roles.append(LoginRole(purpose, name, password, source))
    return roles


@click.command(
    epilog="""\b
Examples:
  outbox migrate
  outbox migrate --producer app            the role "app" may publish, nothing else
  outbox migrate --relay app_relay         and "app_relay" may run outbox relay
  outbox migrate --create-role relay=dsn   also creates the role: that of the DSN in the file "dsn"
  outbox migrate --revoke app --reader app the role "app" may only read from now on
  outbox migrate --check || outbox migrate
  outbox migrate --sql > outbox.sql        to apply the SQL by other means
"""
)
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if a migration is pending.")
@click.option(
    "--sql", "as_sql", is_flag=True, help="Print the SQL instead of running it; needs no database."
)
@click.option(
    "--from",
    "from_version",
    type=click.IntRange(min=0),
    default=0,
    metavar="VERSION",
    help="With --sql: only the migrations after this version.",
)
@_purpose_options
@click.option(
    "--create-role",
    "logins",
    multiple=True,
    metavar="PURPOSE=FILE",
    callback=_login_roles,
    help="Create the role of the DSN in FILE, or give it the DSN's password, and grant it a "
    "purpose: producer, relay, operator, api or reader.",
)
@click.option(
    "--revoke",
    multiple=True,
    metavar="ROLE",
    help="Revoke all of these rights from a role, before the grants are made.",
)
@click.option(
    "--payload-bytes-max",
    type=int,
    metavar="N",
    help="Maximum payload size in bytes of JSON text; initially 262144.",
)
@json_option
@settings_options
def command(
    settings: Settings,
    check: bool,
    as_sql: bool,
    from_version: int,
    logins: list[LoginRole],
    revoke: tuple[str, ...],
    payload_bytes_max: int | None,
    as_json: bool,
    **named: tuple[str, ...],
) -> None:
    """Create the schema, or upgrade it to this version.

    The command is idempotent: applied migrations are skipped, and concurrent runs wait
    for each other. Producers wait for it a tenth of a second at most: behind another
    session's lock it tries again for ten seconds, then it names that session and stops.
    If a migration requires that relays stop first, it changes nothing while one runs.
    """
    if check and as_sql:
        raise UsageError("--check and --sql exclude each other")
    roles = [(purpose, role) for purpose in PURPOSES for role in named[purpose]]
    if check and (roles or logins or revoke or payload_bytes_max is not None):
        given = "--revoke" if revoke else "--payload-bytes-max"
        given = "--create-role" if logins else given
        given = f"--{roles[0][0]}" if roles else given
        raise UsageError(f"--check changes nothing; it cannot be combined with {given}")
    if as_sql:
        if as_json:
            raise UsageError("--sql prints SQL; it cannot be combined with --json")
        if logins:
            raise UsageError("--sql has no passwords; it cannot be combined with --create-role")
        script = migrate.sql(
            settings.schema_name,
            after=from_version,
            roles=roles,
            revoked=revoke,
            payload_bytes_max=payload_bytes_max,
        )
        emit_document(script)
    elif from_version:
        raise UsageError("--from requires --sql")
    elif check:
        _check(settings, as_json)
    else:
        _migrate(settings, roles, logins, revoke, payload_bytes_max, as_json)


def _check(settings: Settings, as_json: bool) -> None:
    status = run_connected(
        settings,
        lambda connection: current_schema.status(connection, settings.schema_name),
        current=False,
    )
    pending = [str(migration) for migration in status.pending]
    if as_json:
        emit_json({"schema": status.schema, "version": status.version, "pending": pending})
    elif pending:
        echo(
            f'schema "{status.schema}" is at version {status.version}; '
            f"pending: {', '.join(pending)}; run: {migrate_command(status.schema)}"
        )
    else:
        echo(f'schema "{status.schema}" is up to date, at version {status.version}')
    if pending:
        raise click.exceptions.Exit(1)


def _migrate(
    settings: Settings,
    roles: Sequence[tuple[str, str]],
    logins: Sequence[LoginRole],
    revoked: Sequence[str],
    payload_bytes_max: int | None,
    as_json: bool,
) -> None:
    schema = settings.schema_name
    roles = [*roles, *((login.purpose, login.name) for login in logins)]

    async def apply(
        connection: Connection[Any],
    ) -> tuple[list[Migration], set[str], int, int]:
        with map_errors(schema):
            created = await read_new_roles(connection, logins)
        done = await migrate.migrate(
            connection,
            schema,
            logins=[each for each in logins if each.name in created or each.password is not None],
            roles=roles,
            revoked=revoked,
            payload_bytes_max=payload_bytes_max,
            open_observer=lambda: database(settings, current=False),
        )
        dropped = await _drop_partitions(connection)
        return done, created, dropped, (await current_schema.status(connection, schema)).version

    done, created, dropped, version = run_connected(settings, apply, current=False, long=True)
    applied = [str(migration) for migration in done]
    if as_json:
        emit_json(
            {
                "schema": schema,
                "version": version,
                "applied": applied,
                "roles": [{"purpose": purpose, "role": role} for purpose, role in roles],
                "roles_created": sorted(created),
                "revoked": list(revoked),
                "partitions_dropped": dropped,
                "payload_bytes_max": payload_bytes_max,
            }
        )
        return
    if applied:
        # A new schema has all of them.
        named = [applied[0], "…", applied[-1]] if len(applied) > NAMED_MAX else applied
        echo(f'schema "{schema}" is at version {version}; applied {", ".join(named)}')
    else:
        echo(f'schema "{schema}" is up to date, at version {version}')
    for role in revoked:
        echo(f'role "{role}": all rights revoked')
    for login in logins:
        if login.name in created:
            echo(f'role "{login.name}": created')
        elif login.password is not None:
            echo(f'role "{login.name}": password set')
    for purpose, role in roles:
        echo(f'role "{role}" may {PURPOSES[purpose]}')
    if dropped:
        echo(f"partitions of dropped periods: {dropped} dropped")
    if payload_bytes_max is not None:
        echo(f"payload limit: {payload_bytes_max} bytes")


async def _drop_partitions(connection: Connection[Any]) -> int:
    """Drop the empty partitions that relays, which do not own the tables, had to leave.

    Returns the number of dropped partitions.

    A partition that a long transaction may still read is left for the next run.
    """
    await connection.execute(DROP_WAIT)
    store = PartitionStore(connection)
    try:
        async with store.maintenance_lease() as has_lease:
            if has_lease:
                return await store.drop_owned()
            # A session that ended during maintenance keeps its lease until the lease expires.
            warn("another session maintains the partitions; empty ones are left for the next run")
            return 0
    except asyncpg.LockNotAvailableError:
        warn("an open transaction still uses partitions that are to be dropped; run again")
        return 0

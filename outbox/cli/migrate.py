"""`outbox migrate`: create or upgrade the schema, and grant privileges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg
import click

from outbox.cli.common import database, json_option, run_connected, settings_options, warn
from outbox.cli.output import echo, emit_document, emit_json
from outbox.core.model.schema_name import migrate_command
from outbox.errors import UsageError
from outbox.store.connection import current_schema, migrate
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


@click.command(
    epilog="""\b
Examples:
  outbox migrate
  outbox migrate --producer app            the role "app" may publish, nothing else
  outbox migrate --relay app_relay         and "app_relay" may run outbox relay
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
    if check and (roles or revoke or payload_bytes_max is not None):
        given = "--revoke" if revoke else "--payload-bytes-max"
        given = f"--{roles[0][0]}" if roles else given
        raise UsageError(f"--check changes nothing; it cannot be combined with {given}")
    if as_sql:
        if as_json:
            raise UsageError("--sql prints SQL; it cannot be combined with --json")
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
        _migrate(settings, roles, revoke, payload_bytes_max, as_json)


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
    revoked: Sequence[str],
    payload_bytes_max: int | None,
    as_json: bool,
) -> None:
    schema = settings.schema_name

    async def apply(connection: Connection[Any]) -> tuple[list[Migration], int, int]:
        done = await migrate.migrate(
            connection,
            schema,
            roles=roles,
            revoked=revoked,
            payload_bytes_max=payload_bytes_max,
            open_observer=lambda: database(settings, current=False),
        )
        dropped = await _drop_partitions(connection)
        return done, dropped, (await current_schema.status(connection, schema)).version

    done, dropped, version = run_connected(settings, apply, current=False, long=True)
    applied = [str(migration) for migration in done]
    if as_json:
        emit_json(
            {
                "schema": schema,
                "version": version,
                "applied": applied,
                "roles": [{"purpose": purpose, "role": role} for purpose, role in roles],
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

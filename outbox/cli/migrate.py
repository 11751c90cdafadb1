"""`outbox migrate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg
import click

from outbox.cli.common import database, json_option, run_async, settings_options, warn
from outbox.cli.output import emit_json
from outbox.core.model.schema_name import migrate_command
from outbox.errors import UsageError
from outbox.store.connection import migrate
from outbox.store.partitions import PartitionStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Connection

    from outbox.config import Settings

_MAY = {
    "producer": "may publish",
    "relay": "may run outbox relay",
    "operator": "may change endpoints and the like",
    "reader": "may look at everything but secrets",
}

# Detaching waits for whoever may still look into a partition, and nobody for it.
DROP_WAIT = "SET lock_timeout = '5s'"


@click.command(
    epilog="""\b
Examples:
  outbox migrate
  outbox migrate --producer app            the role "app" may publish, nothing else
  outbox migrate --relay app_relay         and "app_relay" may run outbox relay
  outbox migrate --revoke app --reader app looks from now on, and publishes no more
  outbox migrate --check || outbox migrate
  outbox migrate --sql > outbox.sql        for those who apply SQL by hand
"""
)
@click.option("--check", is_flag=True, help="Change nothing; exit 1 when it is needed.")
@click.option("--sql", "as_sql", is_flag=True, help="Print the SQL instead; needs no database.")
@click.option(
    "--from",
    "from_version",
    type=click.IntRange(min=0),
    default=0,
    metavar="VERSION",
    help="With --sql: what comes after this version.",
)
@click.option("--producer", multiple=True, metavar="ROLE", help="Let a role publish.")
@click.option("--relay", multiple=True, metavar="ROLE", help="Let a role run outbox relay.")
@click.option(
    "--operator", multiple=True, metavar="ROLE", help="Let a role change endpoints and the like."
)
@click.option(
    "--reader", multiple=True, metavar="ROLE", help="Let a role look at everything but secrets."
)
@click.option(
    "--revoke",
    multiple=True,
    metavar="ROLE",
    help="Take all of that away from a role, before the others are given theirs.",
)
@click.option(
    "--payload-bytes-max",
    type=int,
    metavar="N",
    help="Limit on an event's payload as JSON text; 262144 at first.",
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
    """Make the schema, or bring it up to date.

    Runs as often as you like: what is applied is left alone, and of several at
    once one does the work.
    """
    if check and as_sql:
        raise UsageError("say one of --check and --sql, not both")
    roles = [(purpose, role) for purpose in migrate.PURPOSES for role in named[purpose]]
    if check and (roles or revoke or payload_bytes_max is not None):
        given = "--revoke" if revoke else "--payload-bytes-max"
        given = f"--{roles[0][0]}" if roles else given
        raise UsageError(f"--check changes nothing; it does not go with {given}")
    if as_sql:
        if as_json:
            raise UsageError("--sql prints SQL; it does not go with --json")
        script = migrate.sql(
            settings.schema_name,
            after=from_version,
            roles=roles,
            revoked=revoke,
            payload_bytes_max=payload_bytes_max,
        )
        click.echo(script, nl=False)
    elif from_version:
        raise UsageError("--from goes with --sql only")
    elif check:
        run_async(_check(settings, as_json))
    else:
        run_async(_migrate(settings, roles, revoke, payload_bytes_max, as_json))


async def _check(settings: Settings, as_json: bool) -> None:
    async with database(settings, current=False) as connection:
        status = await migrate.status(connection, settings.schema_name)
    pending = [str(migration) for migration in status.pending]
    if as_json:
        emit_json({"schema": status.schema, "version": status.version, "pending": pending})
    elif pending:
        click.echo(
            f'schema "{status.schema}" is at version {status.version}; '
            f"pending: {', '.join(pending)}; run: {migrate_command(status.schema)}"
        )
    else:
        click.echo(f'schema "{status.schema}" is up to date, at version {status.version}')
    if pending:
        raise click.exceptions.Exit(1)


async def _migrate(
    settings: Settings,
    roles: Sequence[tuple[str, str]],
    revoked: Sequence[str],
    payload_bytes_max: int | None,
    as_json: bool,
) -> None:
    schema = settings.schema_name
    async with database(settings, current=False) as connection:
        done = await migrate.migrate(
            connection,
            schema,
            roles=roles,
            revoked=revoked,
            payload_bytes_max=payload_bytes_max,
        )
        dropped = await _drop_partitions(connection)
        version = (await migrate.status(connection, schema)).version
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
        click.echo(f'schema "{schema}" is at version {version}; applied {", ".join(applied)}')
    else:
        click.echo(f'schema "{schema}" is up to date, at version {version}')
    for role in revoked:
        click.echo(f'role "{role}" had what it could do here taken away')
    for purpose, role in roles:
        click.echo(f'role "{role}" {_MAY[purpose]}')
    if dropped:
        click.echo(f"partitions of dropped periods: {dropped} dropped")
    if payload_bytes_max is not None:
        click.echo(f"payload limit: {payload_bytes_max} bytes")


async def _drop_partitions(connection: Connection[Any]) -> int:
    """Drop what relays that own nothing have emptied; how many partitions went.

    What a long transaction may still look into is left to the next time.
    """
    await connection.execute(DROP_WAIT)
    store = PartitionStore(connection)
    try:
        async with store.alone() as alone:
            return await store.drop_owned() if alone else 0
    except asyncpg.LockNotAvailableError:
        warn("a transaction may still look into partitions that are to be dropped; run it again")
        return 0

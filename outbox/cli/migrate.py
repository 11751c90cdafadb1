"""`outbox migrate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import database, json_option, run_async, settings_options
from outbox.cli.output import emit_json
from outbox.errors import UsageError
from outbox.store import migrate
from outbox.store.schema import migrate_command

if TYPE_CHECKING:
    from outbox.config import Settings


@click.command(
    epilog="""\b
Examples:
  outbox migrate
  outbox migrate --producer app            the role "app" may publish, nothing else
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
@click.option("--producer", "producers", multiple=True, metavar="ROLE", help="Let a role publish.")
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
    producers: tuple[str, ...],
    payload_bytes_max: int | None,
    as_json: bool,
) -> None:
    """Make the schema, or bring it up to date.

    Runs as often as you like: what is applied is left alone, and of several at
    once one does the work.
    """
    if check and as_sql:
        raise UsageError("say one of --check and --sql, not both")
    if check and (producers or payload_bytes_max is not None):
        given = "--producer" if producers else "--payload-bytes-max"
        raise UsageError(f"--check changes nothing; it does not go with {given}")
    if as_sql:
        if as_json:
            raise UsageError("--sql prints SQL; it does not go with --json")
        script = migrate.sql(
            settings.schema_name,
            after=from_version,
            producers=producers,
            payload_bytes_max=payload_bytes_max,
        )
        click.echo(script, nl=False)
    elif from_version:
        raise UsageError("--from goes with --sql only")
    elif check:
        run_async(_check(settings, as_json))
    else:
        run_async(_migrate(settings, producers, payload_bytes_max, as_json))


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
    settings: Settings, producers: tuple[str, ...], payload_bytes_max: int | None, as_json: bool
) -> None:
    schema = settings.schema_name
    async with database(settings, current=False) as connection:
        done = await migrate.migrate(
            connection, schema, producers=producers, payload_bytes_max=payload_bytes_max
        )
        version = (await migrate.status(connection, schema)).version
    applied = [str(migration) for migration in done]
    if as_json:
        emit_json(
            {
                "schema": schema,
                "version": version,
                "applied": applied,
                "producers": producers,
                "payload_bytes_max": payload_bytes_max,
            }
        )
        return
    if applied:
        click.echo(f'schema "{schema}" is at version {version}; applied {", ".join(applied)}')
    else:
        click.echo(f'schema "{schema}" is up to date, at version {version}')
    for role in producers:
        click.echo(f'role "{role}" may publish')
    if payload_bytes_max is not None:
        click.echo(f"payload limit: {payload_bytes_max} bytes")

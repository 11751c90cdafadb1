"""`outbox endpoint remove`, which asks what is to become of what is owed."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import actor, database, json_option, run_async, settings_options
from outbox.cli.endpoint.group import command
from outbox.cli.output import count, emit_json
from outbox.errors import UsageError
from outbox.operations import endpoint_removal
from outbox.operations.endpoint_removal import StillOwed

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.operations.endpoint_removal import Removal, Waiting

LOOK_S = 0.5


@command.command(
    epilog="""\b
Examples:
  outbox endpoint remove billing               asks if it is still owed something
  outbox endpoint remove billing --wait        delivers that first
  outbox endpoint remove billing --give-up     never sends it
"""
)
@click.argument("name")
@click.option("--give-up", is_flag=True, help="Never send what it is owed.")
@click.option("--wait", is_flag=True, help="Give it nothing new, and remove it when all is sent.")
@json_option
@settings_options
def remove(settings: Settings, name: str, give_up: bool, wait: bool, as_json: bool) -> None:
    """Remove an endpoint; its name is free again afterwards.

    Deliveries that are given up become one dead letter per lane, a range of
    numbers, kept for the record.  Ctrl-C while it waits is safe: say it again
    to go on waiting, or take it back with `outbox endpoint enable`.
    """
    if give_up and wait:
        raise UsageError("say one of --give-up and --wait, not both")

    async def go() -> None:
        async with database(settings) as connection:
            if wait:
                await _delivered(connection, settings.schema_name, name, quiet=as_json)
            gone = await _removed(connection, settings.schema_name, name, give_up=give_up)
        if as_json:
            emit_json(gone)
        elif gone.state == "removed":
            click.echo(f'removed endpoint "{gone.name}"')
        else:
            click.echo(
                f'removing endpoint "{gone.name}": the relay gives up its '
                f"{count(gone.owed, 'delivery')}; without a running relay, the next one does"
            )

    try:
        run_async(go())
    except KeyboardInterrupt:
        if wait:
            click.echo(
                f'endpoint "{name}" gets nothing new and is sent what it is owed; to go on, say '
                f"this again; to take it back: outbox endpoint enable {name}",
                err=True,
            )
        raise


async def _removed(
    connection: Connection[Any], schema: str, name: str, *, give_up: bool
) -> Removal:
    """Remove it, asking somebody who is there to be asked."""
    try:
        return await endpoint_removal.remove(
            connection, schema, name, actor=actor(), give_up=give_up
        )
    except StillOwed as still:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError(f"{still} (--wait, or --give-up)") from None
        question = f'endpoint "{name}" is owed {count(still.owed, "delivery")}; give up for good?'
        if not click.confirm(question, err=True):
            raise UsageError("nothing was changed; --wait delivers them first") from None
    return await endpoint_removal.remove(connection, schema, name, actor=actor(), give_up=True)


async def _delivered(connection: Connection[Any], schema: str, name: str, *, quiet: bool) -> None:
    """Give it nothing new, and wait until nothing is owed any more."""
    endpoint_id = await endpoint_removal.drain(connection, schema, name, actor=actor())
    told = ""
    while True:
        waiting = await endpoint_removal.waiting(connection, schema, endpoint_id)
        if waiting.subscribed:
            raise UsageError(f'endpoint "{name}" was enabled again meanwhile; it is not removed')
        if not waiting.owed or waiting.state in ("removing", "removed"):
            return
        line = _line(name, waiting)
        if line != told and not quiet:
            click.echo(line, err=True)
        told = line
        await asyncio.sleep(LOOK_S)


def _line(name: str, waiting: Waiting) -> str:
    line = f'endpoint "{name}" is owed {count(waiting.owed, "delivery")}'
    if waiting.state == "paused":
        line += f"; it is paused: outbox endpoint resume {name}"
    elif waiting.blocked:
        line += f"; {count(waiting.blocked, 'lane')} blocked by a dead letter: outbox dead list"
    elif not waiting.relay:
        line += "; no relay is running: outbox relay"
    return line

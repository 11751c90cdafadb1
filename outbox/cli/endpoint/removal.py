"""`outbox endpoint remove`: remove an endpoint, and deliver or dead-letter its backlog."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import actor, print_result, run_connected
from outbox.cli.endpoint.group import command
from outbox.cli.output import echo
from outbox.cli.progress import confirm, require_terminal
from outbox.core.model.text import count
from outbox.errors import UsageError
from outbox.operations.endpoints import removal as endpoint_removal
from outbox.operations.endpoints.removal import StillPending

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.operations.endpoints.removal import DrainStatus, Removal

REMOVAL_POLL_S = 0.5


def show_removal(removal: Removal) -> None:
    if removal.state == "removed":
        echo(f'removed endpoint "{removal.name}"')
    else:
        echo(
            f'removing endpoint "{removal.name}": the relay dead-letters its '
            f"{count(removal.pending, 'delivery')}; if no relay is running, the next one will"
        )


@command.command(
    epilog="""\b
Examples:
  outbox endpoint remove billing               asks if deliveries are pending
  outbox endpoint remove billing --wait        delivers the backlog first
  outbox endpoint remove billing --dead-letter     dead-letters the backlog
"""
)
@click.argument("name")
@click.option("--dead-letter", is_flag=True, help="Dead-letter the pending deliveries.")
@click.option("--wait", is_flag=True, help="Deliver the backlog first, without new events.")
@print_result(show_removal)
def remove(settings: Settings, name: str, dead_letter: bool, wait: bool) -> Removal:
    """Remove an endpoint; its name can be reused afterwards.

    With --dead-letter the pending deliveries become one dead letter per lane, which
    covers a range of sequence numbers. Ctrl-C during --wait is safe: repeat the
    command to continue, or cancel the removal with `outbox endpoint enable`.
    """
    if dead_letter and wait:
        raise UsageError("--dead-letter and --wait exclude each other")

    async def remove_endpoint(connection: Connection[Any]) -> Removal:
        schema = settings.schema_name
        if wait:
            await _wait_until_delivered(connection, schema, name)
        return await _remove_or_confirm(connection, schema, name, dead_letter=dead_letter)

    try:
        return run_connected(settings, remove_endpoint)
    except KeyboardInterrupt:
        if wait:
            echo(
                f'endpoint "{name}" receives no new events, and its backlog is delivered; repeat '
                f"this command to continue, or cancel: outbox endpoint enable {name}",
                err=True,
            )
        raise


async def _remove_or_confirm(
    connection: Connection[Any], schema: str, name: str, *, dead_letter: bool
) -> Removal:
    """Remove an endpoint; on a terminal, ask before dead-lettering its backlog."""
    try:
        return await endpoint_removal.remove_endpoint(
            connection, schema, name, actor=actor(), dead_letter=dead_letter
        )
    except StillPending as still:
        require_terminal(f"{still} (--wait, or --dead-letter)")
        confirm(
            f'endpoint "{name}" has {count(still.pending, "pending delivery")}; dead-letter all?',
            "nothing was changed; --wait delivers the backlog first",
        )
    return await endpoint_removal.remove_endpoint(
        connection, schema, name, actor=actor(), dead_letter=True
    )


async def _wait_until_delivered(connection: Connection[Any], schema: str, name: str) -> None:
    """Unsubscribe the endpoint from new events, and wait until its backlog is delivered."""
    waiting = await endpoint_removal.drain_endpoint(connection, schema, name, actor=actor())
    previous = ""
    while waiting.drains and not waiting.subscribed:
        line = _line(waiting)
        if line != previous:
            echo(line, err=True)
        previous = line
        await asyncio.sleep(REMOVAL_POLL_S)
        waiting = await endpoint_removal.read_drain_status(connection, schema, waiting.id)
    if waiting.subscribed:
        raise UsageError(f'endpoint "{name}" was re-enabled by another command; it is not removed')


def _line(waiting: DrainStatus) -> str:
    name = waiting.name
    line = f'endpoint "{name}" has {count(waiting.pending, "pending delivery")}'
    if waiting.state == "paused":
        line += f"; it is paused: outbox endpoint resume {name}"
    elif waiting.blocked:
        line += f"; {count(waiting.blocked, 'lane')} blocked by a dead letter: outbox dead list"
    elif not waiting.relay:
        line += "; no relay is running: outbox relay"
    return line

"""`outbox erase`: erase payloads and headers, and keep the delivery log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import actor, print_result, run_connected, warn
from outbox.cli.output import echo
from outbox.cli.progress import confirm, progress_bar, require_terminal
from outbox.core.model.text import count
from outbox.operations.events import erase
from outbox.operations.events.erase import ErasureTarget

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.operations.events.erase import ErasureReport


def _show(done: ErasureReport) -> None:
    verb = "would be erased" if done.dry_run else "erased"
    responses = "" if done.responses is None else f", {count(done.responses, 'response')}"
    echo(f"{verb}: {_describe(done)}{responses}")


@click.command(
    epilog="""\b
Examples:
  outbox erase --tenant acme --dry-run     only count
  outbox erase --tenant acme
  outbox erase --key customer-17 --yes --json

Events that are published later are not erased: stop publishing first. Receivers have
to erase their copies themselves.
"""
)
@click.option("--tenant", metavar="T", help="Erase all events of this tenant.")
@click.option("--key", metavar="K", help="Erase all events with this key.")
@click.option("--dry-run", is_flag=True, help="Only count; change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@print_result(_show)
def command(
    settings: Settings, tenant: str | None, key: str | None, dry_run: bool, yes: bool
) -> ErasureReport:
    """Erase the payloads and headers of a tenant's or a key's events permanently.

    Payloads, headers and receivers' responses are erased from the outbox, dead
    letters and the attempt log. The record of which events were sent to which
    endpoint, and when, remains. Pending deliveries are not sent: they become dead
    letters with the reason "erased". The journal records the actor.
    """
    target = ErasureTarget(tenant, key)

    async def erase_events(connection: Connection[Any]) -> ErasureReport:
        schema = settings.schema_name
        if not (dry_run or yes):
            require_terminal("erasing is irreversible; confirm with --yes, or count with --dry-run")
        if dry_run or not yes:
            with progress_bar("counting") as show:
                erasable = await erase.count_erasable(connection, schema, target, on_progress=show)
            if dry_run:
                return erasable
            confirm(f"erase {_describe(erasable)} permanently?")
        with progress_bar("erasing") as show:
            return await erase.erase_events(
                connection, schema, target, actor=actor(), on_progress=show
            )

    done = run_connected(settings, erase_events)
    for name in done.schedules:
        warn(f'the schedule "{name}" still publishes such events; see: outbox schedule')
    return done


def _describe(done: ErasureReport) -> str:
    future = f"{count(done.future_events, 'future event')}, " if done.future_events else ""
    return f"{count(done.events, 'event')}, {future}{count(done.dead_letters, 'dead letter')}"

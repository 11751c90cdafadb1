"""`outbox adopt undo` and `retire`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import actor, duration_s, print_result, run_connected, warn
from outbox.cli.output import echo
from outbox.cli.progress import confirm, progress_bar, require_terminal
from outbox.core.model.text import count
from outbox_adopt.cli.group import command, table_argument
from outbox_adopt.end import retire_adoption, undo_adoption

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.config import Settings
    from outbox_adopt.end import Ended


def _show_undone(ended: Ended) -> None:
    echo(f"{ended.table}: given back to its old poller; start it if it is stopped")
    echo(f"pending again: {count(ended.shown, 'row')}")
    if ended.published:
        echo(f"published, and not pending again: {count(ended.published, 'row')}")


@command.command("undo", epilog="\b\nExample:\n  outbox adopt undo app.events")
@table_argument
@click.option(
    "--wait",
    "wait_s",
    type=duration_s,
    default="5m",
    show_default=True,
    metavar="DURATION",
    help="Maximum wait for the relay's deliveries of published rows.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@print_result(_show_undone)
def undo_command(settings: Settings, table: str, wait_s: float, yes: bool) -> Ended:
    """Give the table back to its old poller, from every phase.

    The trigger is removed. After a cut-over, new rows are held until the relay has
    delivered what it has published; then all held rows are pending again. No row is
    both delivered by the relay and pending.
    """
    if not yes:
        require_terminal("confirm with --yes: the adoption ends, and its ledger is removed")
        confirm(f"give {table} back to its old poller?")

    async def run(connection: Connection[Any]) -> Ended:
        most = 0
        with progress_bar("waiting for deliveries") as show:

            def on_waiting(left: int) -> None:
                nonlocal most
                most = max(most, left)
                show(most - left, most)

            return await undo_adoption(
                connection,
                settings.schema_name,
                table,
                actor=actor(),
                wait_s=wait_s,
                on_waiting=on_waiting,
            )

    ended = run_connected(settings, run, long=True)
    if ended.undelivered:
        left = count(ended.undelivered, "delivery")
        warn(f"{left} of published rows left to the relay; the connector may overtake them")
    return ended


def _show_retired(ended: Ended) -> None:
    echo(f"{ended.table}: retired; its trigger and ledger are removed")
    echo("The table is not changed. To remove it:")
    echo(f"  DROP TABLE {ended.table};")


@command.command("retire", epilog="\b\nExample:\n  outbox adopt retire app.events")
@table_argument
@click.option(
    "--quiet",
    "quiet_s",
    type=duration_s,
    default="10m",
    show_default=True,
    metavar="DURATION",
    help="Time for which the application must not have written to the table.",
)
@print_result(_show_retired)
def retire_command(settings: Settings, table: str, quiet_s: float) -> Ended:
    """End an adoption: the application publishes with outbox, and no longer to the table.

    Rows that are held or rejected must be dealt with first.
    """
    return run_connected(
        settings,
        lambda connection: retire_adoption(
            connection, settings.schema_name, table, actor=actor(), quiet_s=quiet_s
        ),
        long=True,
    )

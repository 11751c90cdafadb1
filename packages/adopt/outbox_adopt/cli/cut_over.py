"""`outbox adopt cut-over`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import click

from outbox.cli.common import actor, duration_s, print_result, run_connected
from outbox.cli.output import echo
from outbox.cli.progress import progress_bar
from outbox.core.model.text import count
from outbox_adopt.cli.begin import show_plan
from outbox_adopt.cli.group import command, table_argument
from outbox_adopt.cut_over import Poller, cut_over

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.config import Settings
    from outbox_adopt.cut_over import CutOver, Progress


def _show(done: CutOver) -> None:
    if done.dry_run:
        show_plan(done.plan)
        echo("nothing was changed")
        return
    echo(f"{done.table}: cut over; the relay delivers")
    echo(f"published in the order of the table: {count(done.published, 'row')}")
    for rows, text in (
        (done.duplicates, "not published, because an earlier one has its idempotency key"),
        (done.sent, "sent by the old poller meanwhile, and not published"),
        (done.rejected, "rejected, and still pending in the old table"),
    ):
        if rows:
            echo(f"{text}: {count(rows, 'row')}")
    echo(f"next: outbox adopt verify {done.table}")


@command.command(
    "cut-over",
    epilog="""\b
The old poller (--poller):
  stopped      it does not run any more
  locks-rows   it may run: it selects rows FOR UPDATE, and commits after it has sent and
               marked (or deleted) them
  marks-later  it may run: it marks rows after it has sent them, whatever their state is by
               then; --settle must be longer than it takes from its read to its mark
  (a table with --publication needs none: the connector sends what was committed before)

\b
Examples:
  outbox adopt cut-over app.events --poller stopped --dry-run
  outbox adopt cut-over app.events --poller marks-later --settle 2m
""",
)
@table_argument
@click.option(
    "--poller",
    type=click.Choice(get_args(Poller)),
    help="What keeps the old poller from sending held rows, too; see below.",
)
@click.option(
    "--settle",
    "settle_s",
    type=duration_s,
    default="60s",
    show_default=True,
    metavar="DURATION",
    help="For marks-later: how long held rows wait for its marks.",
)
@click.option(
    "--wait",
    "wait_s",
    type=duration_s,
    default="5m",
    show_default=True,
    metavar="DURATION",
    help="Maximum wait for rows that the old poller has locked.",
)
@click.option(
    "--accept-rejected", is_flag=True, help="Leave rows of which no event can be made pending."
)
@click.option(
    "--accept-unmatched", is_flag=True, help="Publish events to which no endpoint subscribes."
)
@click.option("--dry-run", is_flag=True, help="Show what would be published; change nothing.")
@print_result(_show)
def cut_over_command(settings: Settings, table: str, **options: Any) -> CutOver:
    """Deliver what is pending, and everything new, with the relay.

    Pending rows are hidden from the old poller (marked as sent, or deleted) and held;
    then they are published in the order of the table, before any new row. The
    application waits for moments only. Run it again after an interruption, or when
    rejected rows were corrected.
    """

    async def run(connection: Connection[Any]) -> CutOver:
        with progress_bar("cutting over") as show:

            def on_progress(progress: Progress) -> None:
                show(round(progress.done), round(progress.total))

            return await cut_over(
                connection,
                settings.schema_name,
                table,
                actor=actor(),
                on_progress=on_progress,
                **options,
            )

    return run_connected(settings, run, long=True)

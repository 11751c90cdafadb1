"""`outbox journal`: changes and state transitions, newest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import limit_option, note_next_page, print_result, run_connected
from outbox.cli.output import emit_table
from outbox.operations import journal
from outbox.operations.criteria import find_endpoint_ids
from outbox.operations.rows import ID_MAX

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.operations.journal import JournalRow
    from outbox.operations.rows import RowPage


def _show(rows: list[JournalRow]) -> None:
    emit_table(
        ["id", "at", "change", "endpoint", "by", "details"],
        [
            (
                each.id,
                each.at,
                each.kind.replace("_", " "),
                each.endpoint,
                each.actor,
                {name: value for name, value in each.data.items() if value is not None} or None,
            )
            for each in rows
        ],
        "no entries",
    )


@click.command(
    epilog="""\b
Examples:
  outbox journal --endpoint shop
  outbox journal --kind "endpoint paused"
  outbox journal --actor ann --json
"""
)
@click.option("--endpoint", metavar="NAME", help="Only entries of this endpoint.")
@click.option("--kind", metavar="TEXT", help="Only changes that begin with this.")
@click.option("--actor", metavar="TEXT", help="Only changes by an actor that contains this.")
@limit_option
@click.option("--after", type=int, metavar="ID", help="Only entries older than this one (paging).")
@print_result(_show)
def command(
    settings: Settings,
    endpoint: str | None,
    kind: str | None,
    actor: str | None,
    limit: int,
    after: int | None,
) -> list[JournalRow]:
    """List changes and state transitions, newest first.

    Each entry names who made the change: a user, a token or a relay.
    """

    async def read(connection: Connection[Any]) -> RowPage[JournalRow]:
        return await journal.list_journal(
            connection,
            settings.schema_name,
            endpoint_ids=await find_endpoint_ids(connection, endpoint),
            kind=kind,
            actor=actor,
            limit=limit,
            before=ID_MAX if after is None else after,
        )

    return note_next_page(run_connected(settings, read), lambda row: row.id)

"""`outbox journal`: list changes and state transitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import click

from outbox.cli.common import (
    before_id_option,
    limit_option,
    note_next_page,
    print_result,
    run_operation,
)
from outbox.cli.filter_options import time_options
from outbox.cli.output import emit_table
from outbox.operations import journal
from outbox.operations.criteria import find_endpoint_ids
from outbox.operations.journal import By, JournalFilter

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.operations.criteria import When
    from outbox.operations.journal import JournalRow
    from outbox.operations.rows import RowPage


def _details(data: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in data.items() if value not in (None, ""))


def _show(rows: RowPage[JournalRow]) -> None:
    emit_table(
        ["id", "at", "kind", "endpoint", "actor", "details"],
        [(r.id, r.at, r.kind, r.endpoint, r.actor, _details(r.data)) for r in rows],
        "no journal entries" if rows.cursor is None else "none among those that were searched",
    )


async def _list_journal(
    connection: Connection[Any],
    schema: str,
    *,
    endpoint: str | None,
    only: JournalFilter,
    limit: int,
    before: int,
) -> RowPage[JournalRow]:
    return await journal.list_journal(
        connection,
        schema,
        endpoint_ids=await find_endpoint_ids(connection, endpoint),
        only=only,
        limit=limit,
        before=before,
    )


@click.command(
    epilog="""\b
Examples:
  outbox journal --endpoint shop --since 1d
  outbox journal --by people
  outbox journal --kind endpoint_paused --json
"""
)
@click.option("--endpoint", metavar="NAME", help="Only entries of this endpoint.")
@click.option("--kind", metavar="KIND", help="Only this kind, such as endpoint_paused.")
@click.option("--actor", metavar="NAME", help="Only entries of this user, token or relay.")
@click.option(
    "--by",
    type=click.Choice(get_args(By)),
    default="all",
    show_default=True,
    help="people: without what relays do by themselves; relays: only that.",
)
@time_options("written")
@limit_option
@before_id_option("--after", "ID", "Only entries older than this one (paging).")
@print_result(_show)
def command(
    settings: Settings,
    endpoint: str | None,
    kind: str | None,
    actor: str | None,
    since: When | None,
    until: When | None,
    by: By,
    limit: int,
    after: int,
) -> RowPage[JournalRow]:
    """List changes and state transitions, newest first.

    With --by, a page ends after 20,000 entries were searched, and says where the next one begins.
    """
    rows = run_operation(
        settings,
        _list_journal,
        endpoint=endpoint,
        only=JournalFilter(kind, actor, since, until, by),
        limit=limit,
        before=after,
    )
    return note_next_page(rows, lambda row: row.id)

"""`outbox status`: relays, endpoints and pending deliveries."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import click

from outbox.cli import summary as view
from outbox.cli.common import json_option, limit_option, run_async, run_operation, settings_options
from outbox.cli.output import emit_json, emit_pairs, emit_table, fold
from outbox.core.model.text import count
from outbox.operations import status

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.status import Overview

NOTES_MAX = 20
INTERVAL_S = 2.0


@click.command(
    epilog="""\b
Examples:
  outbox status
  outbox status --watch --interval 1
  outbox status --json | jq '.endpoints[] | select(.pending > 0)'
"""
)
@click.option("--watch", is_flag=True, help="Refresh until q or Ctrl-C.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.05, 3600),
    metavar="SECONDS",
    help=f"With --watch: refresh interval; default: {INTERVAL_S:g}.",
)
@limit_option
@json_option
@settings_options
def command(
    settings: Settings, limit: int, as_json: bool, watch: bool, interval_s: float | None
) -> None:
    """Show relays, pending deliveries and failing endpoints.

    Endpoints that fail come first, then those with the most pending deliveries.
    """
    if interval_s is not None and not watch:
        raise click.UsageError("--interval requires --watch")
    if watch:
        from outbox.cli.watch import watch as watch_status

        run_async(watch_status(settings, limit, interval_s or INTERVAL_S, emit, as_json=as_json))
        return

    overview = run_operation(settings, status.read_overview, limit=limit)
    if as_json:
        emit_json(overview)
    else:
        emit(overview)


def emit(overview: Overview) -> None:
    emit_pairs(view.pairs(overview))
    if relays := view.relay_rows(overview):
        click.echo()
        emit_table(view.RELAY_COLUMNS, relays, "")
    click.echo()
    emit_table(
        view.ENDPOINT_COLUMNS,
        [view.endpoint_row(endpoint) for endpoint in overview.endpoints],
        view.NO_ENDPOINTS,
    )
    rest = overview.endpoints_total - len(overview.endpoints)
    if rest > 0:
        click.echo(f"and {count(rest, 'endpoint')} more; see: outbox endpoint list")
    notes = list(view.notes(overview))
    if notes:
        click.echo()
    for note in islice(notes, NOTES_MAX):
        for line in fold(note):
            click.echo(line)
    if len(notes) > NOTES_MAX:
        click.echo(f"and {len(notes) - NOTES_MAX} more; see: outbox doctor")

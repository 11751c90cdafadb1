"""`outbox status`: relays, endpoints and pending deliveries."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import click

from outbox.cli import summary as view
from outbox.cli.common import json_option, limit_option, run_operation, settings_options
from outbox.cli.output import echo, emit_json, emit_pairs, emit_table, fold
from outbox.core.model.text import count
from outbox.operations import status

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.status import Overview

NOTES_MAX = 20


@click.command(
    epilog="""\b
Examples:
  outbox status
  watch outbox status
  outbox status --json | jq '.endpoints[] | select(.pending > 0)'
"""
)
@limit_option
@json_option
@settings_options
def command(settings: Settings, limit: int, as_json: bool) -> None:
    """Show relays, pending deliveries and failing endpoints.

    Endpoints that fail come first, then those with the most pending deliveries.
    """
    overview = run_operation(settings, status.read_overview, limit=limit)
    if as_json:
        emit_json(overview)
    else:
        emit(overview)


def emit(overview: Overview) -> None:
    emit_pairs(view.pairs(overview))
    if relays := view.relay_rows(overview):
        echo()
        emit_table(view.RELAY_COLUMNS, relays, "")
    echo()
    emit_table(
        view.ENDPOINT_COLUMNS,
        [view.endpoint_row(endpoint) for endpoint in overview.endpoints],
        view.NO_ENDPOINTS,
    )
    rest = overview.endpoints_total - len(overview.endpoints)
    if rest > 0:
        echo(f"and {count(rest, 'endpoint')} more; see: outbox endpoint list")
    notes = list(view.notes(overview))
    if notes:
        echo()
    for note in islice(notes, NOTES_MAX):
        for line in fold(note):
            echo(line)
    if len(notes) > NOTES_MAX:
        echo(f"and {len(notes) - NOTES_MAX} more; see: outbox doctor")

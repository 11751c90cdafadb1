"""`outbox status`: relays, endpoints and pending deliveries."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import click

from outbox.cli import summary as view
from outbox.cli.common import json_option, limit_option, run_operation, settings_options
from outbox.cli.output import age, echo, emit_json, emit_pairs, emit_table, fold
from outbox.core.model.text import count
from outbox.errors import UsageError
from outbox.operations import lane_backlogs, status

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.lane_backlogs import LaneBacklog
    from outbox.operations.rows import RowPage
    from outbox.operations.status import Overview

NOTES_MAX = 20


@click.command(
    epilog="""\b
Examples:
  outbox status
  watch outbox status
  outbox status --json | jq '.endpoints[] | select(.pending > 0)'
  outbox status shop --lanes
"""
)
@click.argument("endpoint", metavar="[ENDPOINT]", required=False)
@click.option(
    "--lanes",
    is_flag=True,
    help="Show the lanes of ENDPOINT that are behind, the longest backlog first, and by what key.",
)
@limit_option
@json_option
@settings_options
def command(
    settings: Settings, endpoint: str | None, lanes: bool, limit: int, as_json: bool
) -> None:
    """Show relays, pending deliveries and failing endpoints.

    Endpoints that fail come first, then those with the most pending deliveries.
    """
    if lanes != (endpoint is not None):
        raise UsageError(
            "give ENDPOINT together with --lanes; its settings and health: outbox endpoint show"
        )
    if endpoint is not None:
        backlogs = run_operation(settings, lane_backlogs.list_backlogs, endpoint, limit=limit)
        if as_json:
            emit_json(backlogs)
        else:
            _show_lanes(backlogs)
        return
    overview = run_operation(settings, status.read_overview, limit=limit)
    if as_json:
        emit_json(overview)
    else:
        emit(overview)


def _show_lanes(backlogs: RowPage[LaneBacklog]) -> None:
    emit_table(
        ["lane", "pending", "oldest", "state", "sequence", "type", "key", "most frequent key"],
        [
            (
                each.lane,
                each.pending,
                age(each.oldest_s),
                _lane_state(each),
                each.sequence,
                each.type,
                each.key,
                each.most_frequent_key
                and f"{each.most_frequent_key}: {each.of_key} of {each.counted}",
            )
            for each in backlogs
        ],
        "no lane has pending deliveries",
    )
    if backlogs.more:
        echo("more lanes are behind; see more of them: --limit", err=True)


def _lane_state(each: LaneBacklog) -> str:
    """What the first pending delivery of a lane waits for."""
    if each.blocked:
        return "blocked"
    if each.waits:
        return "waits for older lanes"
    if each.attempts:
        return f"fails ({count(each.attempts, 'attempt')})"
    return "pending"


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

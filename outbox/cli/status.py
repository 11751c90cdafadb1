"""`outbox status`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import database, json_option, limit_option, run_async, settings_options
from outbox.cli.output import age, count, emit_json, emit_pairs, emit_table
from outbox.store import status

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.store.status import EndpointStatus, Overview


@click.command(
    epilog="""\b
Examples:
  outbox status
  outbox status --json | jq '.endpoints[] | select(.owed > 0)'
"""
)
@limit_option
@json_option
@settings_options
def command(settings: Settings, limit: int, as_json: bool) -> None:
    """Show what is owed, failing and running.

    Endpoints that are owed most come first.
    """

    async def go() -> None:
        async with database(settings) as connection:
            overview = await status.read(connection, settings.schema_name, limit=limit)
        if as_json:
            emit_json(
                {
                    "schema": settings.schema_name,
                    "cursor": {
                        "batch": overview.cursor.batch,
                        "high": overview.cursor.high,
                        "last_id": overview.cursor.last_id,
                        "lag": overview.cursor.lag,
                        "waiting_s": overview.cursor.waiting_s,
                        "at": overview.cursor.at,
                    },
                    "gaps": {"open": overview.gaps, "ids": overview.gap_ids},
                    "replicas": overview.replicas,
                    "endpoints_total": overview.endpoints_total,
                    "endpoints": overview.endpoints,
                    "dead_letters": overview.dead_letters,
                }
            )
        else:
            _show(settings, overview)

    run_async(go())


def _show(settings: Settings, overview: Overview) -> None:
    cursor = overview.cursor
    alive = sum(replica.alive for replica in overview.replicas)
    waiting = age(cursor.waiting_s)
    open_gaps = count(overview.gaps, "open gap")
    emit_pairs(
        [
            ("schema", settings.schema_name),
            ("relays", f"{alive} alive" if alive else "none alive; start one: outbox relay"),
            (
                "sequenced",
                f"up to id {cursor.high} of {cursor.last_id}"
                + (f", the oldest waits for {waiting}" if waiting else ""),
            ),
            ("gaps", f"{open_gaps}, {count(overview.gap_ids, 'id')}" if overview.gaps else "none"),
            ("dead letters", overview.dead_letters.get("dead", 0)),
            ("endpoints", overview.endpoints_total),
        ]
    )
    click.echo()
    emit_table(
        ["endpoint", "state", "owed", "oldest", "failing", "dead letters", "relay"],
        [
            (
                e.name,
                e.state,
                e.owed,
                age(e.oldest_s),
                _failing(e),
                e.dead_letters,
                e.replica,
            )
            for e in overview.endpoints
        ],
        "no endpoints; add one with: outbox endpoint add NAME URL",
    )
    rest = overview.endpoints_total - len(overview.endpoints)
    if rest > 0:
        click.echo(f"and {count(rest, 'endpoint')} more; see: outbox endpoint list")


def _failing(endpoint: EndpointStatus) -> str | None:
    head = endpoint.failing
    if head is None:
        return None
    answer = head.last_answer or {}
    said = answer.get("status") or answer.get("failure") or "no answer"
    text = f"number {head.sequence}: {said}, {count(head.attempts, 'attempt')}"
    if head.next_attempt_at is not None:
        text += f", next at {head.next_attempt_at.astimezone():%H:%M:%S}"
    return text

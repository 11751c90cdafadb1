"""`outbox once`: list, show and reset idempotency keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import click

from outbox.cli.common import (
    actor,
    limit_option,
    note_next_page,
    print_result,
    run_operation,
)
from outbox.cli.filter_options import time_options
from outbox.cli.group import Group
from outbox.cli.output import echo, emit_pairs, emit_table
from outbox.core.model.text import is_text
from outbox.errors import UsageError
from outbox.operations.events import idempotency_keys

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.criteria import When
    from outbox.operations.events.idempotency_keys import (
        IdempotencyKey,
        IdempotencyKeyRow,
        ResetKey,
    )


def _show_list(rows: list[IdempotencyKeyRow]) -> None:
    emit_table(
        ["key", "state", "event", "claimed", "expires", "resets"],
        [(r.key, r.state, r.event_id, r.claimed_at, r.expires_at, r.resets) for r in rows],
        "no idempotency keys",
    )


def _show(found: IdempotencyKey) -> None:
    emit_pairs(
        [
            ("key", found.key),
            ("state", found.state),
            ("claimed", found.claimed_at),
            ("expires", found.expires_at),
            ("resets", found.resets),
            ("event", found.event_id or "not published"),
            (
                "type",
                found.type or (found.event_id and "unknown: the event is no longer retained"),
            ),
            ("see", found.event_id and found.type and f"outbox trace {found.event_id}"),
        ]
    )


def _show_reset(done: ResetKey) -> None:
    if done.reset:
        echo(f'reset "{done.key}": its next event will be published')
    else:
        echo(f'"{done.key}" was not taken')


@click.group("once", cls=Group)
def command() -> None:
    """List, show and reset idempotency keys.

    For an idempotency key (--once) only the first event is published, until the key
    expires (30 days by default) or is reset.
    """


@command.command(
    "list",
    epilog="""\b
Examples:
  outbox once list --prefix plan:
  outbox once list --state claimed-without-event --until 1d
  outbox once list --since 2026-05-01 --limit 10 --after plan:7 --json
""",
)
@click.option("--prefix", metavar="TEXT", default="", help="Only keys with this prefix.")
@time_options("claimed")
@click.option(
    "--state",
    type=click.Choice(idempotency_keys.STATES),
    help="claimed-without-event: the key was claimed, but no event was published.",
)
@limit_option
@click.option("--after", metavar="KEY", default="", help="Only keys after this one (paging).")
@print_result(_show_list)
def list_(
    settings: Settings,
    prefix: str,
    since: When | None,
    until: When | None,
    state: str | None,
    limit: int,
    after: str,
) -> list[IdempotencyKeyRow]:
    """List idempotency keys in key order."""
    for name, text in (("--prefix", prefix), ("--after", after)):
        if not is_text(text):
            raise UsageError(f"{name}: not Unicode text")

    rows = run_operation(
        settings,
        idempotency_keys.list_keys,
        prefix=prefix,
        since=since,
        until=until,
        state=cast("idempotency_keys.IdempotencyKeyState | None", state),
        limit=limit,
        after=after,
    )
    return note_next_page(rows, lambda row: row.key)


@command.command(
    epilog="""\b
Example:
  outbox once show plan:7
"""
)
@click.argument("key")
@print_result(_show)
def show(settings: Settings, key: str) -> IdempotencyKey:
    """Show the event and the expiry of an idempotency key."""
    return run_operation(settings, idempotency_keys.get_key, key)


@command.command(
    epilog="""\b
Example:
  outbox once reset plan:7
"""
)
@click.argument("key")
@print_result(_show_reset)
def reset(settings: Settings, key: str) -> ResetKey:
    """Release an idempotency key, so that its next event is published."""
    return run_operation(settings, idempotency_keys.reset_key, key, actor=actor())

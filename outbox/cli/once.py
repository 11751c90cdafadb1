"""`outbox once`: list, show and reset idempotency keys."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, cast

import click

from outbox.cli.common import (
    actor,
    first_page,
    json_option,
    limit_option,
    run_operation,
    settings_options,
)
from outbox.cli.main import Group
from outbox.cli.output import emit_json, emit_pairs, emit_table
from outbox.core.model import duration
from outbox.core.model.text import is_text
from outbox.errors import UsageError
from outbox.operations import idempotency_keys

if TYPE_CHECKING:
    from outbox.config import Settings


def _parse_time(text: str) -> datetime:
    """Parse a time (`2026-05-01`, `2026-05-01T12:00Z`) or an age (`2h`).

    Raises:
        click.BadParameter: the text is neither.
    """
    try:
        return datetime.now(UTC) - timedelta(seconds=duration.parse(text))
    except OverflowError:
        raise click.BadParameter(f'"{text}" is before the year 1') from None
    except UsageError:
        pass
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f'"{text[:40]}" is neither a time such as 2026-05-01T12:00Z nor an age such as 2h or 7d'
        ) from None


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
@click.option(
    "--since",
    type=_parse_time,
    metavar="TIME",
    help="Only keys claimed at or after this time: 2h (ago), 2026-05-01T12:00Z.",
)
@click.option(
    "--until", type=_parse_time, metavar="TIME", help="Only keys claimed before this time."
)
@click.option(
    "--state",
    type=click.Choice(idempotency_keys.STATES),
    help="claimed-without-event: the key was claimed, but no event was published.",
)
@limit_option
@click.option("--after", metavar="KEY", default="", help="Only keys after this one (paging).")
@json_option
@settings_options
def list_(
    settings: Settings,
    prefix: str,
    since: datetime | None,
    until: datetime | None,
    state: str | None,
    limit: int,
    after: str,
    as_json: bool,
) -> None:
    """List idempotency keys in key order."""
    for name, text in (("--prefix", prefix), ("--after", after)):
        _require_text(name, text)

    rows = run_operation(
        settings,
        idempotency_keys.list_keys,
        prefix=prefix,
        since=since,
        until=until,
        state=cast("idempotency_keys.IdempotencyKeyState | None", state),
        limit=limit + 1,
        after=after,
    )
    rows = first_page(rows, limit, lambda row: row.key)
    if as_json:
        emit_json(rows)
        return
    emit_table(
        ["key", "state", "event", "claimed", "expires", "resets"],
        [(r.key, r.state, r.event_id, r.claimed_at, r.expires_at, r.resets) for r in rows],
        "no idempotency keys",
    )


@command.command(
    epilog="""\b
Example:
  outbox once show plan:7
"""
)
@click.argument("key")
@json_option
@settings_options
def show(settings: Settings, key: str, as_json: bool) -> None:
    """Show the event and the expiry of an idempotency key."""
    found = run_operation(settings, idempotency_keys.get_key, key)
    if as_json:
        emit_json(found)
        return
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


@command.command(
    epilog="""\b
Example:
  outbox once reset plan:7
"""
)
@click.argument("key")
@json_option
@settings_options
def reset(settings: Settings, key: str, as_json: bool) -> None:
    """Release an idempotency key, so that its next event is published."""
    was_held = run_operation(settings, idempotency_keys.reset_key, key, actor=actor())
    if as_json:
        emit_json({"key": key, "reset": was_held})
    elif was_held:
        click.echo(f'reset "{key}": its next event will be published')
    else:
        click.echo(f'"{key}" was not taken')


def _require_text(name: str, text: str) -> None:
    if not is_text(text):
        raise UsageError(f"{name}: not Unicode text")

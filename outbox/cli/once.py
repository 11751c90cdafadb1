"""`outbox once`: list, show, reset."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, cast

import click

from outbox.cli.common import (
    actor,
    database,
    json_option,
    limit_option,
    run_async,
    settings_options,
    tell_more,
)
from outbox.cli.main import Group
from outbox.cli.output import emit_json, emit_pairs, emit_table
from outbox.core.model import duration
from outbox.core.model.text import is_text
from outbox.errors import UsageError
from outbox.operations import idempotency_keys
from outbox.operations.views.merge import flat

if TYPE_CHECKING:
    from outbox.config import Settings


def _moment(text: str) -> datetime:
    """A time stamp, or how long ago: `2026-05-01`, `2026-05-01T12:00Z`, `2h`.

    Raises:
        click.BadParameter: it is neither.
    """
    try:
        return datetime.now(UTC) - timedelta(seconds=duration.parse(text))
    except OverflowError:
        raise click.BadParameter(f'"{text}" is before there were years') from None
    except UsageError:
        pass
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f'"{text[:40]}" is neither a time such as 2026-05-01T12:00Z nor how long ago: 2h, 7d'
        ) from None


@click.group("once", cls=Group)
def command() -> None:
    """List, show and reset once keys.

    An event that is published with a once key is the only one for that key until it
    expires, 30 days later where nobody chose another time, or is reset.
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
@click.option("--prefix", metavar="TEXT", default="", help="Only keys that begin like this.")
@click.option(
    "--since", type=_moment, metavar="TIME", help="Claimed then or later; 2h: within two hours."
)
@click.option(
    "--until", type=_moment, metavar="TIME", help="Claimed before; 2h: two hours ago or more."
)
@click.option(
    "--state",
    type=click.Choice(idempotency_keys.STATES),
    help="claimed-without-event: what it was claimed for was not published.",
)
@limit_option
@click.option("--after", metavar="KEY", default="", help="Only keys behind this one.")
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
    """List once keys by key."""
    for name, text in (("--prefix", prefix), ("--after", after)):
        _hold_to_text(name, text)

    async def go() -> None:
        async with database(settings) as connection:
            rows = await idempotency_keys.page(
                connection,
                settings.schema_name,
                prefix=prefix,
                since=since,
                until=until,
                state=cast("idempotency_keys.State | None", state),
                limit=limit + 1,
                after=after,
            )
        rows, more = rows[:limit], len(rows) > limit
        if more:
            tell_more(rows[-1].key)
        if as_json:
            emit_json(rows)
            return
        emit_table(
            ["key", "state", "event", "claimed", "expires", "resets"],
            [(r.key, r.state, r.event_id, r.claimed_at, r.expires_at, r.resets) for r in rows],
            "no once keys",
        )

    run_async(go())


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
    """Show what a once key stands for, and until when."""

    async def go() -> None:
        async with database(settings) as connection:
            found = await idempotency_keys.get(connection, settings.schema_name, key)
        row = found.row
        if as_json:
            emit_json(flat(row) | {"type": found.type})
            return
        emit_pairs(
            [
                ("key", row.key),
                ("state", row.state),
                ("claimed", row.claimed_at),
                ("expires", row.expires_at),
                ("resets", row.resets),
                ("event", row.event_id or "none was published"),
                ("type", found.type or (row.event_id and "not known: the event is not there")),
                ("see", row.event_id and found.type and f"outbox trace {row.event_id}"),
            ]
        )

    run_async(go())


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
    """Free a once key, so that its next event is published again."""

    async def go() -> None:
        async with database(settings) as connection:
            was_held = await idempotency_keys.reset(
                connection, settings.schema_name, key, actor=actor()
            )
        if as_json:
            emit_json({"key": key, "reset": was_held})
        elif was_held:
            click.echo(f'reset "{key}": its next event is published')
        else:
            click.echo(f'"{key}" was free already')

    run_async(go())


def _hold_to_text(name: str, text: str) -> None:
    if not is_text(text):
        raise UsageError(f"{name}: not Unicode text")

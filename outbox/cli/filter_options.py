"""Options that select events and dead letters."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from outbox.core.model import duration
from outbox.errors import UsageError
from outbox.operations.criteria import REASONS
from outbox.operations.rows import parse_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.operations.criteria import When

    Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def dead_id(text: str) -> int:
    """Parse the ID of a dead letter.

    Raises:
        click.BadParameter: the text is no positive 64-bit integer.
    """
    if (found := parse_id(text)) is None:
        raise click.BadParameter(f'"{text}" is not the ID of a dead letter')
    return found


def parse_when(_: click.Context, __: click.Parameter, text: str | None) -> When | None:
    """Parse an ISO 8601 time (local time unless it has an offset) or an age such as `2h`.

    Raises:
        click.BadParameter: the text is neither.
    """
    if text is None:
        return None
    try:
        return timedelta(seconds=duration.parse(text))
    except UsageError:
        pass
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f'"{text[:40]}" is neither a time such as 2026-01-31T12:00Z nor an age such as 2h or 3d'
        ) from None


def time_options(what: str) -> Decorator:
    """The options `--since` and `--until`.

    Args:
        what: the participle for the help text, such as "published".
    """
    since = f"Only those {what} at or after this time: 2h (ago), 3d, 2026-01-31T12:00Z."
    until = f"Only those {what} before this time."
    return _all_of(
        click.option("--since", metavar="TIME", callback=parse_when, help=since),
        click.option("--until", metavar="TIME", callback=parse_when, help=until),
    )


def _all_of(*options: Decorator) -> Decorator:
    def add(callback: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            callback = option(callback)
        return callback

    return add


type_option = click.option(
    "--type",
    "types",
    metavar="PATTERN",
    multiple=True,
    help='Only events of this type, such as "order.*"; repeatable.',
)
filter_options = _all_of(
    click.option("--endpoint", metavar="NAME", help="Only dead letters of this endpoint."),
    type_option,
    click.option("--tenant", metavar="NAME", help="Only dead letters of this tenant."),
    click.option(
        "--reason",
        metavar="REASON",
        type=click.Choice(REASONS),
        help=f"Only dead letters with this reason: {', '.join(REASONS)}.",
    ),
    time_options("dead-lettered"),
)
"""Filter dead letters; the command receives fields of `Criteria`."""

selection_options = _all_of(
    click.argument("ids", metavar="[ID]...", type=dead_id, nargs=-1),
    click.option("--all", "everything", is_flag=True, help="Select all dead letters."),
    click.option("--dry-run", is_flag=True, help="Only count them; change nothing."),
)
"""Select dead letters by ID, or all of them; and --dry-run."""

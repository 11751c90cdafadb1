"""Points in time on the command line: absolute, or relative to now."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from outbox.core.model import duration
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

When: TypeAlias = datetime | timedelta
"""An absolute time, or an age relative to the database's clock."""


def parse(_: click.Context, __: click.Parameter, text: str | None) -> When | None:
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


def moment(when: When | None, now: datetime) -> datetime | None:
    """The absolute time."""
    return now - when if isinstance(when, timedelta) else when


def options(what: str, *, required: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """The options `--since` and `--until`.

    Args:
        what: the participle for the help text, such as "published".
    """

    def add(callback: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option(
                "--until",
                metavar="TIME",
                callback=parse,
                help=f"Only those {what} before this time.",
            ),
            click.option(
                "--since",
                metavar="TIME",
                callback=parse,
                required=required,
                help=f"Only those {what} at or after this time: 2h (ago), 3d, 2026-01-31T12:00Z.",
            ),
        ):
            callback = option(callback)
        return callback

    return add

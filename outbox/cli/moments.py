"""Times on the command line: moments, or how long ago."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from outbox.core.model import duration
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

When: TypeAlias = datetime | timedelta
"""A moment; or how long ago it is, by the database's clock."""


def parse(_: click.Context, __: click.Parameter, text: str | None) -> When | None:
    """A moment in ISO 8601, in local time unless it says otherwise, or a time such as `2h`.

    Raises:
        click.BadParameter: it is neither.
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
            f'"{text[:40]}" is neither a moment such as 2026-01-31T12:00Z '
            "nor a time ago such as 2h or 3d"
        ) from None


def moment(when: When | None, now: datetime) -> datetime | None:
    """The moment that was meant."""
    return now - when if isinstance(when, timedelta) else when


def options(what: str, *, required: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """`--since` and `--until`.

    Args:
        what: happened then.
    """

    def add(callback: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option(
                "--until", metavar="TIME", callback=parse, help=f"Only those {what} before this."
            ),
            click.option(
                "--since",
                metavar="TIME",
                callback=parse,
                required=required,
                help=f"Only those {what} at or after this: 2h, 3d, 2026-01-31T12:00Z.",
            ),
        ):
            callback = option(callback)
        return callback

    return add

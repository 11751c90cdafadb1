"""Options that select dead letters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from outbox.cli import moments
from outbox.operations import dead_letter_filter
from outbox.operations.dead_letter_filter import DeadLetterFilter, DeadLetterSelection

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

ID_MAX = 2**63 - 1


def dead_id(text: str) -> int:
    """Parse the ID of a dead letter.

    Raises:
        click.BadParameter: the text is no positive 64-bit integer.
    """
    if not re.fullmatch("[0-9]{1,19}", text) or not 1 <= int(text) <= ID_MAX:
        raise click.BadParameter(f'"{text}" is not the ID of a dead letter')
    return int(text)


def filter_options() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options that filter dead letters; the command receives them as `chosen`."""
    reasons = ", ".join(dead_letter_filter.REASONS)

    def add(callback: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            moments.options("dead-lettered"),
            click.option(
                "--reason",
                metavar="REASON",
                type=click.Choice(dead_letter_filter.REASONS),
                help=f"Only dead letters with this reason: {reasons}.",
            ),
            click.option("--tenant", metavar="NAME", help="Only dead letters of this tenant."),
            click.option(
                "--type",
                "types",
                metavar="PATTERN",
                multiple=True,
                help='Only events of this type, such as "order.*"; repeatable.',
            ),
            click.option("--endpoint", metavar="NAME", help="Only dead letters of this endpoint."),
        ):
            callback = option(callback)
        return callback

    return add


def selection_options(callback: Callable[..., Any]) -> Callable[..., Any]:
    """Select dead letters by ID, or all of them; and --dry-run."""
    for option in (
        click.option("--dry-run", is_flag=True, help="Only count them; change nothing."),
        click.option("--all", "everything", is_flag=True, help="Select all dead letters."),
        click.argument("ids", metavar="[ID]...", type=dead_id, nargs=-1),
    ):
        callback = option(callback)
    return callback


def build_filter(now: datetime, chosen: dict[str, Any]) -> DeadLetterFilter:
    """The filter that the options describe, with relative times resolved against `now`."""
    return DeadLetterFilter(
        chosen["endpoint"],
        chosen["types"],
        chosen["tenant"],
        chosen["reason"],
        moments.moment(chosen["since"], now),
        moments.moment(chosen["until"], now),
    )


def require_selection(ids: tuple[int, ...], everything: bool, chosen: dict[str, Any]) -> None:
    """Reject a command without IDs, filter or --all, before connecting to the database."""
    DeadLetterSelection(
        ids,
        DeadLetterFilter(endpoint="any") if any(chosen.values()) else DeadLetterFilter(),
        everything,
    )

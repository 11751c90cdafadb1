"""The options that say which dead letters a command is about."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from outbox.cli import moments
from outbox.operations import dead_letter_filter
from outbox.operations.dead_letter_filter import Filter, Selection

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

ID_MAX = 2**63 - 1


def dead_id(text: str) -> int:
    """The number of a dead letter."""
    if not re.fullmatch("[0-9]{1,19}", text) or not 1 <= int(text) <= ID_MAX:
        raise click.BadParameter(f'"{text}" is not the number of a dead letter')
    return int(text)


def filter_options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Which ones, by what they have in common; the command gets them as `chosen`.

    Args:
        names: of the option for the reason; where a decision has one of its own,
            that is called so.
    """
    reasons = ", ".join(dead_letter_filter.REASONS)

    def add(callback: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            moments.options("given up"),
            click.option(
                *(names or ("--reason", "--given-up")),
                "given_up",
                metavar="REASON",
                type=click.Choice(dead_letter_filter.REASONS),
                help=f"Only those given up for this: {reasons}.",
            ),
            click.option("--tenant", metavar="NAME", help="Only of this tenant."),
            click.option(
                "--type",
                "types",
                metavar="PATTERN",
                multiple=True,
                help='Only of these types, such as "order.*"; may be given several times.',
            ),
            click.option("--endpoint", metavar="NAME", help="Only of this endpoint."),
        ):
            callback = option(callback)
        return callback

    return add


def selection_options(callback: Callable[..., Any]) -> Callable[..., Any]:
    """By number, or all of them; and whether it is meant."""
    for option in (
        click.option("--dry-run", is_flag=True, help="Only say how many there are."),
        click.option("--all", "everything", is_flag=True, help="All dead letters."),
        click.argument("ids", metavar="[ID]...", type=dead_id, nargs=-1),
    ):
        callback = option(callback)
    return callback


def of(now: datetime, chosen: dict[str, Any]) -> Filter:
    """What the options said."""
    return Filter(
        chosen["endpoint"],
        chosen["types"],
        chosen["tenant"],
        chosen["given_up"],
        moments.moment(chosen["since"], now),
        moments.moment(chosen["until"], now),
    )


def require_some(ids: tuple[int, ...], everything: bool, chosen: dict[str, Any]) -> None:
    """Refuse a sweep without a word for it, before anybody is connected to."""
    Selection(ids, Filter(endpoint="any") if any(chosen.values()) else Filter(), everything)

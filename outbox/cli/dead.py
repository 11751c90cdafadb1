"""`outbox dead`: list, show, replay, discard."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

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
from outbox.cli.output import cell, count, emit_json, emit_pairs, emit_table
from outbox.store import dead, replays
from outbox.store.replays import Selection

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.config import Settings
    from outbox.store.dead import DeadLetter, DeadRow, ReplayRow
    from outbox.store.replays import Outcome

ID_MAX = 2**63 - 1

_SKIPPED = {
    "erased": "erased",
    "disabled": "of disabled endpoints",
    "removed": "of removed endpoints",
    "replaying": "replaying already",
    "discarded": "discarded",
}


def _dead_id(text: str) -> int:
    if not re.fullmatch("[0-9]{1,19}", text) or not 1 <= int(text) <= ID_MAX:
        raise click.BadParameter(f'"{text}" is not the number of a dead letter')
    return int(text)


def _numbers(row: DeadRow) -> str:
    if row.to_sequence == row.sequence:
        return str(row.sequence)
    return f"{row.sequence}-{row.to_sequence}"


def _state(row: DeadRow) -> str:
    return row.state if row.again is None else f"dead again as {row.again}"


_COLUMNS: tuple[tuple[str, Callable[[DeadRow], Any]], ...] = (
    ("id", lambda row: row.id),
    ("state", _state),
    ("endpoint", lambda row: row.endpoint),
    ("lane", lambda row: row.lane),
    ("number", _numbers),
    ("type", lambda row: row.type),
    ("reason", lambda row: row.reason),
    ("status", lambda row: row.status),
    ("attempts", lambda row: row.attempts),
    ("at", lambda row: row.at),
)


@click.group("dead", cls=Group)
def command() -> None:
    """List, show, replay and discard dead letters.

    A dead letter is a delivery that was given up: refused by its receiver, out
    of attempts, expired, or owed to an endpoint that was disabled or removed;
    such ones are together, as a range of numbers for each lane.
    """


def _selection_options(callback: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--all", "everything", is_flag=True, help="All dead letters."),
        click.option("--endpoint", metavar="NAME", help="All of this endpoint."),
        click.argument("ids", metavar="[ID]...", type=_dead_id, nargs=-1),
    ):
        callback = option(callback)
    return callback


@command.command(
    "list",
    epilog="""\b
Examples:
  outbox dead list --endpoint billing
  outbox dead list --limit 10 --after 42 --json
""",
)
@click.option("--endpoint", metavar="NAME", help="Only of this endpoint.")
@click.option(
    "--state",
    type=click.Choice([*dead.STATES, "all"]),
    default="dead",
    show_default=True,
    help="Sent again: replaying, then replayed or dead_again; discarded: set aside.",
)
@limit_option
@click.option("--after", type=click.IntRange(0, ID_MAX), default=0, help="Only ids above this.")
@json_option
@settings_options
def list_(
    settings: Settings, endpoint: str | None, state: str, limit: int, after: int, as_json: bool
) -> None:
    """List dead letters, oldest first."""
    states = dead.STATES if state == "all" else tuple(s for s in dead.STATES if s == state)

    async def go() -> None:
        async with database(settings) as connection:
            rows = await dead.page(
                connection,
                settings.schema_name,
                endpoint=endpoint,
                states=states,
                limit=limit + 1,
                after=after,
            )
        rows, more = rows[:limit], len(rows) > limit
        if more:
            tell_more(rows[-1].id)
        if as_json:
            emit_json(rows)
            return
        # Where all are in the same state, a column of it tells nothing.
        columns = [c for c in _COLUMNS if state in ("all", "dead_again") or c[0] != "state"]
        emit_table(
            [name for name, _ in columns],
            [[value(row) for _, value in columns] for row in rows],
            "no dead letters",
        )

    run_async(go())


@command.command(
    epilog="""\b
Example:
  outbox dead show 42 --json
"""
)
@click.argument("dead_id", metavar="ID", type=_dead_id)
@json_option
@settings_options
def show(settings: Settings, dead_id: int, as_json: bool) -> None:
    """Show a dead letter with its event and the last answer."""

    async def go() -> None:
        async with database(settings) as connection:
            letter = await dead.get(connection, settings.schema_name, dead_id)
        if as_json:
            emit_json(_as_json(letter))
        else:
            _show(letter)

    run_async(go())


@command.command(
    epilog="""\b
Examples:
  outbox dead replay 42 43
  outbox dead replay --endpoint billing
"""
)
@_selection_options
@json_option
@settings_options
def replay(
    settings: Settings, ids: tuple[int, ...], endpoint: str | None, everything: bool, as_json: bool
) -> None:
    """Send dead letters again, at the end of their lanes.

    Each is a new delivery with a number of its own and the same X-Delivery; a
    range becomes as many as it holds.
    """
    selection = Selection(ids, endpoint, everything)

    async def go() -> None:
        async with database(settings) as connection:
            outcome = await replays.replay(
                connection, settings.schema_name, selection, actor=actor()
            )
        _tell("replaying", outcome, as_json)

    run_async(go())


@command.command(
    epilog="""\b
Example:
  outbox dead discard 42 --reason "the customer left"
"""
)
@_selection_options
@click.option("--reason", metavar="TEXT", help="Kept in the journal, beside who did it.")
@json_option
@settings_options
def discard(
    settings: Settings,
    ids: tuple[int, ...],
    endpoint: str | None,
    everything: bool,
    reason: str | None,
    as_json: bool,
) -> None:
    """Set dead letters aside for good."""
    selection = Selection(ids, endpoint, everything)

    async def go() -> None:
        async with database(settings) as connection:
            outcome = await replays.discard(
                connection, settings.schema_name, selection, actor=actor(), reason=reason
            )
        _tell("discarded", outcome, as_json)

    run_async(go())


def _tell(verb: str, outcome: Outcome, as_json: bool) -> None:
    if as_json:
        emit_json({verb: outcome.done, "skipped": outcome.skipped})
        return
    click.echo(f"{verb} {count(outcome.done, 'dead letter')}")
    if outcome.skipped:
        left = ", ".join(f"{n} {_SKIPPED[why]}" for why, n in outcome.skipped.items())
        click.echo(f"left alone: {left}")


def _as_json(letter: DeadLetter) -> dict[str, Any]:
    row = letter.row
    flat = {name: getattr(row, name) for name in row.__slots__}
    rest = {name: getattr(letter, name) for name in letter.__slots__ if name != "row"}
    return flat | rest


def _show(letter: DeadLetter) -> None:
    row = letter.row
    emit_pairs(
        [
            ("id", row.id),
            ("state", _state(row)),
            ("endpoint", row.endpoint),
            ("lane", row.lane),
            ("number", _numbers(row)),
            ("reason", row.reason),
            ("attempts", row.attempts),
            ("given up", row.at),
            ("event", row.event),
            ("type", row.type),
            ("tenant", letter.tenant),
            ("key", letter.key),
            ("published", letter.published_at),
            ("expires", letter.expires_at),
            ("headers", letter.headers),
            ("payload", letter.payload),
            ("last answer", letter.last_answer),
            *(("sent again", _again(row, again)) for again in letter.replays),
        ]
    )


def _again(row: DeadRow, again: ReplayRow) -> str:
    numbers = row.to_sequence - row.sequence + 1
    if not again.taken:
        where = "not yet"
    elif again.lane:
        where = f"as number {again.sequence} of lane {again.lane}"
    else:
        where = f"{again.taken} of {count(numbers, 'number')}"
    return f"{where}, asked for at {cell(again.asked_at)}"

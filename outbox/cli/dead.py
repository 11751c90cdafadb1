"""`outbox dead`: list, count, show, replay, discard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli import filter_options, progress
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
from outbox.operations import dead_letter_filter, dead_letters, replays
from outbox.operations import discard as discards
from outbox.operations.dead_letter_filter import Selection
from outbox.operations.replays import Outcome
from outbox.operations.views import dead_letters as views

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.config import Settings
    from outbox.operations.dead_letters import DeadLetter, DeadRow, ReplayRow


_SKIPPED = {
    "erased": "erased",
    "disabled": "of disabled endpoints",
    "removed": "of removed endpoints",
    "replaying": "replaying already",
    "discarded": "discarded",
}


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
    """List, count, show, replay and discard dead letters.

    A dead letter is a delivery that was given up: refused by its receiver, out
    of attempts, expired, or owed to an endpoint that was disabled or removed;
    such ones are together, as a range of numbers for each lane.
    """


@command.command(
    "list",
    epilog="""\b
Examples:
  outbox dead list --endpoint billing
  outbox dead list --reason exhausted --since 3d --type "order.*"
  outbox dead list --limit 10 --after 42 --json
""",
)
@filter_options.filter_options()
@click.option(
    "--state",
    type=click.Choice([*dead_letters.STATES, "all"]),
    default="dead",
    show_default=True,
    help="Sent again: replaying, then replayed or dead_again; discarded: set aside.",
)
@limit_option
@click.option(
    "--after", type=click.IntRange(0, filter_options.ID_MAX), default=0, help="Only ids above this."
)
@json_option
@settings_options
def list_(
    settings: Settings, state: str, limit: int, after: int, as_json: bool, **chosen: Any
) -> None:
    """List dead letters, oldest first."""
    states = (
        dead_letters.STATES
        if state == "all"
        else tuple(s for s in dead_letters.STATES if s == state)
    )

    async def go() -> None:
        async with database(settings) as connection:
            rows = await dead_letters.page(
                connection,
                settings.schema_name,
                only=filter_options.of(await dead_letter_filter.now(connection), chosen),
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
    "count",
    epilog="""\b
Examples:
  outbox dead count
  outbox dead count --since 1d --json
""",
)
@filter_options.filter_options()
@json_option
@settings_options
def count_(settings: Settings, as_json: bool, **chosen: Any) -> None:
    """Count dead letters by endpoint, reason and state."""

    async def go() -> list[dead_letters.Count]:
        async with database(settings) as connection:
            only = filter_options.of(await dead_letter_filter.now(connection), chosen)
            return await dead_letters.counts(connection, settings.schema_name, only=only)

    found = views.counts(run_async(go()))
    if as_json:
        emit_json(found)
        return
    rows: dict[tuple[str, str], dict[str, int]] = {}
    for each in found["counts"]:
        by_state = rows.setdefault(
            (each.endpoint, each.reason), dict.fromkeys(dead_letters.STATES, 0)
        )
        by_state[each.state] += each.letters
    table = [[*which, *by_state.values()] for which, by_state in rows.items()]
    if len(table) > 1:
        table.append(["all", "", *found["total"].values()])
    names = [state.replace("_", " ") for state in dead_letters.STATES]
    emit_table(["endpoint", "reason", *names], table, "no dead letters")


@command.command(
    epilog="""\b
Example:
  outbox dead show 42 --json
"""
)
@click.argument("dead_id", metavar="ID", type=filter_options.dead_id)
@json_option
@settings_options
def show(settings: Settings, dead_id: int, as_json: bool) -> None:
    """Show a dead letter with its event and the last answer."""

    async def go() -> None:
        async with database(settings) as connection:
            letter = await dead_letters.get(connection, settings.schema_name, dead_id)
        if as_json:
            emit_json(views.letter(letter))
        else:
            _show(letter)

    run_async(go())


@command.command(
    epilog="""\b
Examples:
  outbox dead replay 42 43
  outbox dead replay --endpoint billing --since 2h --dry-run
  outbox dead replay --reason exhausted --type "order.*" --rate 50

How far it is, and to abort it: outbox replay list | show | abort
"""
)
@filter_options.filter_options()
@filter_options.selection_options
@progress.rate_option
@progress.wait_option
@json_option
@settings_options
def replay(
    settings: Settings,
    ids: tuple[int, ...],
    everything: bool,
    dry_run: bool,
    rate_per_s: float | None,
    wait: bool | None,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Send dead letters again, at the end of their lanes.

    Each is a new delivery with a number of its own and the same X-Delivery, and
    its attempts start again; a range becomes as many as it holds. They go no
    faster than live events allow.
    """
    filter_options.require_some(ids, everything, chosen)

    async def go() -> None:
        schema = settings.schema_name
        async with database(settings) as connection:
            only = filter_options.of(await dead_letter_filter.now(connection), chosen)
            which = Selection(ids, only, everything)
            if dry_run:
                _, outcome = await replays.plan(connection, schema, which)
                _tell_plan("replaying", outcome, as_json)
                return
            outcome = await replays.replay(
                connection, schema, which, actor=actor(), rate_per_s=rate_per_s
            )
            if not as_json:
                _tell("replaying", outcome, as_json)
            job = None
            if outcome.job is not None:
                # What is named by number is few, and nobody need watch it.
                stay = False if wait is None and ids else wait
                job = await progress.follow(
                    connection, schema, outcome.job, wait=stay, as_json=as_json
                )
            if job is not None:
                progress.tell(job, as_json=as_json)
            elif as_json:
                _tell("replaying", outcome, as_json)

    run_async(go())


@command.command(
    epilog="""\b
Examples:
  outbox dead discard 42 --reason "the customer left"
  outbox dead discard --type "cart.*" --until 30d --dry-run
"""
)
@filter_options.filter_options("--given-up")
@filter_options.selection_options
@click.option("--reason", metavar="TEXT", help="Kept in the journal, beside who did it.")
@json_option
@settings_options
def discard(
    settings: Settings,
    ids: tuple[int, ...],
    everything: bool,
    dry_run: bool,
    reason: str | None,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Set dead letters aside for good."""
    filter_options.require_some(ids, everything, chosen)

    async def go() -> None:
        schema = settings.schema_name
        async with database(settings) as connection:
            which = Selection(
                ids, filter_options.of(await dead_letter_filter.now(connection), chosen), everything
            )
            if dry_run:
                _tell_plan(
                    "discarded",
                    Outcome(await discards.count(connection, schema, which), {}),
                    as_json,
                )
                return
            outcome = await discards.discard(
                connection, schema, which, actor=actor(), reason=reason
            )
        _tell("discarded", outcome, as_json)

    run_async(go())


def _tell_plan(verb: str, outcome: Outcome, as_json: bool) -> None:
    if as_json:
        emit_json(views.planned(verb, outcome))
        return
    what = "sent again" if verb == "replaying" else verb
    click.echo(f"would be {what}: {count(outcome.done, 'dead letter')}; nothing was done")
    _tell_skipped(outcome)
    if outcome.by_endpoint and len(outcome.by_endpoint) > 1:
        emit_table(["endpoint", "dead letters"], list(outcome.by_endpoint.items()), "")


def _tell(verb: str, outcome: Outcome, as_json: bool) -> None:
    if as_json:
        emit_json(views.done(verb, outcome))
        return
    job = "" if outcome.job is None else f" (replay job {outcome.job})"
    click.echo(f"{verb} {count(outcome.done, 'dead letter')}{job}")
    _tell_skipped(outcome)


def _tell_skipped(outcome: Outcome) -> None:
    if outcome.skipped:
        left = ", ".join(f"{n} {_SKIPPED[why]}" for why, n in outcome.skipped.items())
        click.echo(f"left alone: {left}")


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

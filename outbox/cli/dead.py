"""`outbox dead`: list, count, show, replay, discard and make dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli import progress
from outbox.cli.common import (
    actor,
    after_id_option,
    comment_option,
    json_option,
    limit_option,
    note_next_page,
    print_result,
    run_operation,
    settings_options,
)
from outbox.cli.filter_options import dead_id, filter_options, selection_options
from outbox.cli.group import Group
from outbox.cli.output import cell, describe_payload, echo, emit_pairs, emit_table
from outbox.core.model.text import count
from outbox.operations.criteria import Criteria, DeadLetterSelection
from outbox.operations.dead_letters import discard as discards
from outbox.operations.dead_letters import queries as dead_letters
from outbox.operations.dead_letters import replay as replays
from outbox.operations.dead_letters import skip as skips
from outbox.operations.rows import ID_MAX

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.operations.dead_letters.discard import DiscardReport
    from outbox.operations.dead_letters.queries import (
        DeadLetter,
        DeadLetterCounts,
        DeadLetterRow,
        ReplayRow,
    )
    from outbox.operations.dead_letters.replay import ReplayReport
    from outbox.operations.dead_letters.skip import SkippedDelivery


_SKIPPED = {
    "erased": "erased",
    "disabled": "of disabled endpoints",
    "removed": "of removed endpoints",
}


def _sequences(row: DeadLetterRow) -> str:
    if row.to_sequence == row.sequence:
        return str(row.sequence)
    return f"{row.sequence}-{row.to_sequence}"


def _state(row: DeadLetterRow) -> str:
    return row.state if row.again is None else f"dead again as {row.again}"


_COLUMNS = [
    "id", "state", "endpoint", "lane", "sequence", "type", "reason", "status", "attempts", "at"
]  # fmt: skip
_FORMATTED = {"state": _state, "sequence": _sequences}


def _value(row: DeadLetterRow, column: str) -> Any:
    return _FORMATTED[column](row) if column in _FORMATTED else getattr(row, column)


def _show_list(rows: list[DeadLetterRow]) -> None:
    # Omit the state column when all rows have the same state.
    differ = any(_state(row) != rows[0].state for row in rows)
    columns = [each for each in _COLUMNS if differ or each != "state"]
    emit_table(
        columns, [[_value(row, each) for each in columns] for row in rows], "no dead letters"
    )


def _show_counts(report: DeadLetterCounts) -> None:
    rows: dict[tuple[str, str], dict[str, int]] = {}
    for each in report.counts:
        by_state = rows.setdefault(
            (each.endpoint, each.reason), dict.fromkeys(dead_letters.STATES, 0)
        )
        by_state[each.state] += each.dead_letters
    table = [[*which, *by_state.values()] for which, by_state in rows.items()]
    if len(table) > 1:
        table.append(["all", "", *report.total.values()])
    names = [state.replace("_", " ") for state in dead_letters.STATES]
    emit_table(["endpoint", "reason", *names], table, "no dead letters")


def _show_skipped(skipped: SkippedDelivery) -> None:
    which = f"sequence {skipped.sequence} of lane {skipped.lane}"
    if skipped.dead_letter is not None:
        behind = f"; {count(skipped.pending, 'delivery')} waited behind it"
        letter = skipped.dead_letter
        echo(f"skipped {which}{behind if skipped.pending else ''}")
        echo(f"it is dead letter {letter}; to send it again: outbox dead replay {letter}")
    elif skipped.relay is None:
        echo(f"{which} will be skipped when a relay runs; none has the endpoint now")
    else:
        echo(
            f"{which} will be skipped by relay {skipped.relay}; if a request is in flight, it "
            "completes first"
        )


def _show_discarded(report: DiscardReport) -> None:
    if report.dry_run:
        _print_plan("discard", report.discarded)
    else:
        echo(f"discarded {count(report.discarded, 'dead letter')}")


def _print_plan(verb: str, dead_letters: int) -> None:
    echo(f"would {verb} {count(dead_letters, 'dead letter')}; nothing was changed")


def _print_replay(report: ReplayReport) -> None:
    if report.dry_run:
        _print_plan("replay", report.replaying)
    else:
        job = "" if report.job is None else f" (replay job {report.job})"
        echo(f"replaying {count(report.replaying, 'dead letter')}{job}")
    if report.skipped:
        skipped = ", ".join(f"{n} {_SKIPPED[reason]}" for reason, n in report.skipped.items())
        echo(f"skipped: {skipped}")
    if report.dry_run and len(report.by_endpoint) > 1:
        emit_table(["endpoint", "dead letters"], list(report.by_endpoint.items()), "")


def _show(letter: DeadLetter) -> None:
    emit_pairs(
        [
            ("id", letter.id),
            ("state", _state(letter)),
            ("endpoint", letter.endpoint),
            ("lane", letter.lane),
            ("sequence", _sequences(letter)),
            ("reason", letter.reason),
            ("attempts", letter.attempts),
            ("dead-lettered", letter.at),
            ("event", letter.event),
            ("type", letter.type),
            ("tenant", letter.tenant),
            ("key", letter.key),
            ("published", letter.published_at),
            ("expires", letter.expires_at),
            ("headers", letter.headers),
            (
                "payload",
                letter.payload
                if letter.content_type is None
                else describe_payload(letter.payload_bytes, letter.content_type),
            ),
            ("last response", letter.last_response),
            *(("replayed", _describe_replay(letter, again)) for again in letter.replays),
        ]
    )


def _describe_replay(row: DeadLetterRow, again: ReplayRow) -> str:
    sequences = row.to_sequence - row.sequence + 1
    if not again.taken:
        where = "not yet"
    elif again.lane:
        where = f"as sequence {again.sequence} of lane {again.lane}"
    else:
        where = f"{again.taken} of {count(sequences, 'delivery')}"
    return f"{where}, requested at {cell(again.requested_at)}"


@click.group("dead", cls=Group)
def command() -> None:
    """List, count, show, replay and discard dead letters, or skip a delivery.

    A dead letter is a delivery that is no longer attempted: its receiver refused
    it, its retries are exhausted, it expired, an operator skipped it, or its
    endpoint was disabled or removed. Disabling or removing an endpoint turns its
    pending deliveries into one dead letter per lane, which covers a range of
    sequence numbers.
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
@filter_options
@click.option(
    "--state",
    type=click.Choice([*dead_letters.STATES, "all"]),
    default="dead",
    show_default=True,
    help="A replay changes dead to replaying, then to replayed or dead_again.",
)
@limit_option
@after_id_option
@print_result(_show_list)
def list_(
    settings: Settings, state: str, limit: int, after: int, **chosen: Any
) -> list[DeadLetterRow]:
    """List dead letters, oldest first."""
    rows = run_operation(
        settings,
        dead_letters.list_dead_letters,
        only=Criteria(**chosen),
        states=[each for each in dead_letters.STATES if state in (each, "all")],
        limit=limit,
        after=after,
    )
    return note_next_page(rows, lambda row: row.id)


@command.command(
    "count",
    epilog="""\b
Examples:
  outbox dead count
  outbox dead count --since 1d --json
""",
)
@filter_options
@print_result(_show_counts)
def count_(settings: Settings, **chosen: Any) -> DeadLetterCounts:
    """Count dead letters by endpoint, reason and state."""
    return run_operation(settings, dead_letters.count_by_state, only=Criteria(**chosen))


@command.command(
    epilog="""\b
Example:
  outbox dead show 42 --json
"""
)
@click.argument("dead_id", metavar="ID", type=dead_id)
@print_result(_show)
def show(settings: Settings, dead_id: int) -> DeadLetter:
    """Show a dead letter with its event and the last response of the receiver."""
    return run_operation(settings, dead_letters.get_dead_letter, dead_id)


@command.command(
    epilog="""\b
Examples:
  outbox dead replay 42 43
  outbox dead replay --endpoint billing --since 2h --dry-run
  outbox dead replay --reason exhausted --type "order.*" --rate 50

To follow or abort the replay: outbox replay list | show | abort
"""
)
@filter_options
@selection_options
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
    """Replay dead letters at the end of their lanes.

    Each becomes a new delivery with its own sequence number and the same
    X-Delivery, and its attempts start again; a range becomes one delivery per
    sequence number. Live events have priority over replays.
    """
    which = DeadLetterSelection(ids, Criteria(**chosen), everything)

    async def start(connection: Connection[Any]) -> tuple[ReplayReport, int | None]:
        report = await replays.start_replay(
            connection,
            settings.schema_name,
            which,
            actor=actor(),
            rate_per_s=rate_per_s,
            dry_run=dry_run,
        )
        return report, report.job

    # Dead letters selected by ID are few, so do not wait by default.
    wait = False if wait is None and ids else wait
    progress.run_replay(settings, start, _print_replay, wait=wait, as_json=as_json)


@command.command(
    epilog="""\b
Examples:
  outbox dead discard 42 --comment "the customer left"
  outbox dead discard --type "cart.*" --until 30d --dry-run
"""
)
@filter_options
@selection_options
@comment_option
@print_result(_show_discarded)
def discard(
    settings: Settings,
    ids: tuple[int, ...],
    everything: bool,
    dry_run: bool,
    comment: str | None,
    **chosen: Any,
) -> DiscardReport:
    """Discard dead letters permanently."""
    return run_operation(
        settings,
        discards.discard_dead_letters,
        DeadLetterSelection(ids, Criteria(**chosen), everything),
        actor=actor(),
        comment=comment,
        dry_run=dry_run,
    )


@command.command(
    epilog="""\b
Example:
  outbox dead skip billing --lane 5f0c9d2e71a4-1-3 --sequence 210

outbox trace EVENT prints this command for an event that fails; so does outbox
status after five requests.
"""
)
@click.argument("endpoint", metavar="ENDPOINT")
@click.option("--lane", required=True, metavar="LANE", help="Name of the lane, as in X-Lane.")
@click.option(
    "--sequence",
    required=True,
    metavar="NUMBER",
    type=click.IntRange(1, ID_MAX),
    help="Sequence number that the lane waits for.",
)
@comment_option
@print_result(_show_skipped)
def skip(
    settings: Settings, endpoint: str, lane: str, sequence: int, comment: str | None
) -> SkippedDelivery:
    """Skip the delivery that a lane is stuck on, so that the lane goes on.

    It becomes a dead letter, which can be replayed later. A request in flight
    completes first. If the lane waits for another delivery by now, nothing is
    skipped and the exit code is 1.
    """
    return run_operation(
        settings,
        skips.skip_delivery,
        endpoint,
        lane,
        sequence,
        actor=actor(),
        comment=comment,
    )

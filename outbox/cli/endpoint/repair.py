"""`outbox endpoint refill` and `adopt`: let the held lanes of a broker go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import actor, comment_option, print_result, run_connected, run_operation
from outbox.cli.endpoint.group import command
from outbox.cli.output import echo
from outbox.cli.progress import confirm, require_terminal
from outbox.core.brokers.repair import RepairKind
from outbox.core.model.text import count
from outbox.operations.endpoints.repair import request_adoption, request_refill

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.operations.endpoints.repair import RepairedLane, RequestedRepair


def _show(done: RequestedRepair, *, err: bool = False) -> None:
    verb = "fills again" if done.repair is RepairKind.REFILL else "adopts"
    tense = "would be requested: the" if done.dry_run else "the"
    seen = "" if done.dry_run else "; outbox status shows when its lanes go on"
    lines = [
        f'{tense} owner of endpoint "{done.endpoint}" {verb} {count(len(done.lanes), "stream")}'
        f"{seen}",
        *(f"  {each.lane} ({each.held}): {_describe(each)}" for each in done.lanes),
    ]
    if done.new_lanes:
        lines.append("new lanes begin, and go on when these are drained")
    echo(*lines, err=err)


def _describe(lane: RepairedLane) -> str:
    pending = count(lane.pending, "pending delivery")
    match lane.action:
        case "refill":
            return f"up to sequence {lane.to_sequence}"
        case "continue":
            return f"it goes on where the stream stands, with {pending}; what is lost stays lost"
        case "take_over":
            return (
                f"its stream is taken over; {pending}, which become dead letters if the stream's "
                "last message is not this lane's"
            )
        case "dead_letter":
            return f"{pending} dead-lettered; to replay: outbox dead replay"


@command.command(
    epilog="""\b
Example:
  outbox endpoint refill audit --comment "restored from the backup of Monday"
"""
)
@click.argument("name")
@comment_option
@print_result(_show)
def refill(settings: Settings, name: str, comment: str | None) -> RequestedRepair:
    """Append again what the streams of a broker have lost.

    A stream that was deleted, evicted or restored from a backup stands below what it had
    acknowledged, and its lane is held. This lets the relay append the missing deliveries with
    their own sequence numbers, as far as they are kept (30 days by default), and go on. Erased
    events are left out. The progress of the lanes does not change.
    """
    return run_operation(settings, request_refill, name, actor=actor(), comment=comment)


@command.command(
    epilog="""\b
Examples:
  outbox endpoint adopt audit --dry-run       shows what would happen
  outbox endpoint adopt audit --comment "moved to another cluster"
  outbox dead replay --endpoint audit --reason adopted
"""
)
@click.argument("name")
@comment_option
@click.option("--dry-run", is_flag=True, help="Only show what would happen; change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@print_result(_show)
def adopt(
    settings: Settings, name: str, comment: str | None, dry_run: bool, yes: bool
) -> RequestedRepair:
    """Go on with the streams of a broker as they are, although they do not match.

    For the held lanes of an endpoint: the relay takes a stream over from a later owner or from
    another database, whose appends are refused from then on; it accepts what a stream has lost;
    and where a stream has sequences that are not this database's, the lane's pending deliveries
    become dead letters ("adopted"), and new lanes begin. Stop other relays that append to these
    streams first. What a lane does is decided when the relay opens it.
    """

    async def adopt_streams(connection: Connection[Any]) -> RequestedRepair:
        schema = settings.schema_name
        if not (dry_run or yes):
            require_terminal(
                "adopting streams accepts what they lack; confirm with --yes, or see what would "
                "happen with --dry-run"
            )
        if dry_run or not yes:
            planned = await request_adoption(
                connection, schema, name, actor=actor(), comment=comment, dry_run=True
            )
            if dry_run:
                return planned
            _show(planned, err=True)
            confirm(f"adopt {count(len(planned.lanes), 'stream')}?")
        return await request_adoption(connection, schema, name, actor=actor(), comment=comment)

    return run_connected(settings, adopt_streams)

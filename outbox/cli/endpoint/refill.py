"""`outbox endpoint refill`: append again what a broker's streams have lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import actor, comment_option, print_result, run_operation
from outbox.cli.endpoint.group import command
from outbox.core.model.text import count, safe
from outbox.operations.refill import request_refill

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.refill import RequestedRefill


def _show(done: RequestedRefill) -> None:
    click.echo(
        safe(
            f'the owner of endpoint "{done.endpoint}" fills {count(len(done.lanes), "stream")} '
            "again; outbox status shows when its lanes go on"
        )
    )
    for each in done.lanes:
        click.echo(safe(f"  {each.lane}, up to sequence {each.to_sequence}"))


@command.command(
    epilog="""\b
Example:
  outbox endpoint refill audit --comment "restored from the backup of Monday"
"""
)
@click.argument("name")
@comment_option
@print_result(_show)
def refill(settings: Settings, name: str, comment: str | None) -> RequestedRefill:
    """Append again what the streams of a broker have lost.

    A stream that was deleted, evicted or restored from a backup stands below what it had
    acknowledged, and its lane is held. This lets the relay append the missing deliveries with
    their own sequence numbers, as far as they are kept (30 days by default), and go on. Erased
    events are left out. The progress of the lanes does not change.
    """
    return run_operation(settings, request_refill, name, actor=actor(), comment=comment)

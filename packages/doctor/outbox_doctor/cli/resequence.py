"""`outbox resequence`: sequence committed events that were skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import actor, print_result, run_connected
from outbox.cli.output import echo
from outbox.core.model.text import count
from outbox_doctor.maintenance.resequence import Resequenced, resequence

if TYPE_CHECKING:
    from outbox.config import Settings


def _show(done: Resequenced) -> None:
    if not done.batches:
        echo("no committed event was skipped")
    elif not done.events:
        does = "would be corrected" if done.dry_run else "corrected"
        batches = f"{done.batches} batch{'es' * (done.batches > 1)}"
        echo(f"{batches} {does}: the skipped events have deliveries already")
    else:
        verb = "would be sequenced" if done.dry_run else "will be sequenced with the next batches"
        ids = ", ".join(map(str, done.first_ids))
        more = ", …" if done.events > len(done.first_ids) else ""
        echo(f"{count(done.events, 'skipped event')} {verb}: {ids}{more}")
        if not done.dry_run:
            echo("running relays register again; requests in flight may be repeated")


@click.command(
    epilog="""\b
Examples:
  outbox resequence --dry-run
  outbox resequence
"""
)
@click.option("--dry-run", is_flag=True, help="Print what would be sequenced; change nothing.")
@print_result(_show)
def command(settings: Settings, dry_run: bool) -> Resequenced:
    """Sequence committed events that were skipped.

    The relay skips an id that no transaction can still commit. An event with such an
    id appears only if the sequence of outbox.id was altered, or if the event was
    inserted with an explicit id; `outbox doctor` and the relay's log report it. The
    next batches sequence these events, after newer ones. Relays may keep running: their
    registrations end, and they register again within a second. Requests that are in
    flight then may be repeated; the skipped events are sent once. An event that has
    deliveries is not sequenced again.
    """
    return run_connected(
        settings,
        lambda connection: resequence(
            connection, settings.schema_name, actor=actor(), dry_run=dry_run
        ),
        long=True,
    )

"""`outbox adopt plan` and `start`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import actor, print_result, run_connected
from outbox.cli.output import echo, emit_pairs, emit_table
from outbox.core.model.text import count
from outbox_adopt.cli.group import command, table_argument
from outbox_adopt.cli.mapping_options import mapping_options
from outbox_adopt.plan import plan_adoption
from outbox_adopt.start import start_adoption

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox_adopt.mapping import SourceMapping
    from outbox_adopt.plan import AdoptionPlan
    from outbox_adopt.start import Started


def show_plan(plan: AdoptionPlan) -> None:
    """Print a plan as text."""
    pending = "not shown by the table" if plan.pending is None else plan.pending
    emit_pairs(
        [
            ("table", plan.table),
            ("rows", plan.rows),
            ("pending", pending),
            ("neither pending nor sent", f"{plan.neither}; left alone" if plan.neither else 0),
            ("events", plan.events),
            ("keys", plan.keys),
            ("without a key", f"{plan.without_key}; in no order" if plan.without_key else 0),
            ("duplicates", plan.duplicates),
            ("rejected", plan.rejected),
        ]
    )
    echo()
    emit_table(
        ["name", "event type", "rows"],
        [(each.name, each.type, each.rows) for each in plan.types],
        "no rows to convert",
    )
    for each in plan.faults:
        ids = ", ".join(each.ids)
        echo(f"rejected: {count(each.rows, 'row')}, such as {ids}: {each.fault}")
    for name in plan.collisions:
        echo(f"collision: several names become {name}; give each one: --type-name OLD=NEW")
    for name in plan.unmatched:
        echo(f"undelivered: no endpoint subscribes to {name}")
    for name in plan.receives_shadow:
        echo(f"dual run: the endpoint {name} gets the events shadow.*")
    for example in plan.examples:
        key = "" if example.key is None else f", key {example.key}"
        echo(f"row {example.source_id}: {example.type}{key}: {example.payload}")


@command.command(
    "plan",
    epilog="""\b
Examples:
  outbox adopt plan app.events --type event_type --key order_id --sent-column sent_at
  outbox adopt plan app.events --file mapping.yaml
  outbox adopt plan app.outbox --layout debezium --publication dbz_publication

\b
mapping.yaml:
  type: event_type
  type_names: {"Order Created": order.created}
  key: [kind, order_id]
  payload: body
  sent_column: status
  pending_value: new
  sent_value: done
""",
)
@table_argument
@mapping_options
@print_result(show_plan, failed=lambda plan: plan.rejected or plan.collisions)
def plan_command(settings: Settings, table: str, mapping: SourceMapping) -> AdoptionPlan:
    """Show what an adoption would make of a table's rows; change nothing.

    Types are cleaned: ":" and "/" become ".", and every run of other characters that a
    type cannot have becomes "_". Exit code 1 means that rows would be rejected, or
    that several names become one event type.
    """
    return run_connected(
        settings,
        lambda connection: plan_adoption(connection, settings.schema_name, table, mapping),
        long=True,
    )


def _show_started(started: Started) -> None:
    did = "its mapping was changed" if started.changed else "begun"
    echo(f"{started.table}: dual run {did}; new rows are published as shadow.*")
    plan = started.plan
    if plan.rejected:
        echo(f"{count(plan.rejected, 'pending row')} would be rejected; see: outbox adopt plan")
    echo(f"next: outbox adopt verify {started.table}, then outbox adopt cut-over")


@command.command(
    "start",
    epilog="""\b
Example:
  outbox adopt start app.events --type event_type --key order_id --sent-column sent_at

The options are those of `outbox adopt plan`. In the dual run the command can be run again,
with another mapping.
""",
)
@table_argument
@mapping_options
@click.option("--accept-collisions", is_flag=True, help="Let several names become one event type.")
@click.option(
    "--accept-subscribers",
    is_flag=True,
    help="Let endpoints get the events of the dual run, besides those of the old poller.",
)
@print_result(_show_started)
def start_command(
    settings: Settings,
    table: str,
    mapping: SourceMapping,
    accept_collisions: bool,
    accept_subscribers: bool,
) -> Started:
    """Begin the dual run: publish an event of each new row as shadow.TYPE.

    The old poller goes on. A trigger publishes in the application's transaction, so
    both have the same rows. An endpoint with the type shadow.** gets these events. A
    row of which no event can be made is rejected: it is listed by verify, and the
    application does not notice. Creating the trigger waits for open transactions that
    have written to the table, for a tenth of a second at a time.
    """
    return run_connected(
        settings,
        lambda connection: start_adoption(
            connection,
            settings.schema_name,
            table,
            mapping,
            actor=actor(),
            accept_collisions=accept_collisions,
            accept_subscribers=accept_subscribers,
        ),
        long=True,
    )

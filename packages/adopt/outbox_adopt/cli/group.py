"""The command group `outbox adopt`."""

from __future__ import annotations

import click

from outbox.cli.group import Group


@click.group(
    "adopt",
    cls=Group,
    epilog="""\b
Phases:
  plan        show the events of the rows; change nothing
  start       dual run: a trigger publishes events as shadow.*; the old poller delivers
  cut-over    pending rows and all new ones are delivered by the relay
  verify      compare both tables
  retire      remove the trigger, when the application publishes with outbox
  undo        the way back, from every phase

\b
From another sender of webhooks (outbox endpoint import):
  compare     what it and outbox send for the same events
""",
)
def command() -> None:
    """Move in from another outbox table or sender, step by step and with a way back.

    The application writes to its table as before, until it is changed to publish with
    outbox. One role owns that table and the outbox schema, and the commands connect as
    it. They can be interrupted and run again.
    """


table_argument = click.argument("table", metavar="SCHEMA.TABLE")

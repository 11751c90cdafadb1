"""`outbox erase`: what events said is gone, what happened stays."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from outbox.cli.common import (
    actor,
    database,
    json_option,
    run_async,
    settings_options,
    warn,
)
from outbox.cli.output import count, emit_json
from outbox.errors import UsageError
from outbox.operations import erase
from outbox.operations.erase import Whose
from outbox.operations.views.erase import erased

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.config import Settings
    from outbox.operations.erase import Erased


@click.command(
    epilog="""\b
Examples:
  outbox erase --tenant acme --dry-run     how much that would be
  outbox erase --tenant acme
  outbox erase --key customer-17 --yes --json

Events that are published from now on are not erased: stop publishing first.  Copies
that receivers have are theirs to erase.
"""
)
@click.option("--tenant", metavar="T", help="Of all events of this tenant.")
@click.option("--key", metavar="K", help="Of all events with this key.")
@click.option("--dry-run", is_flag=True, help="Only count.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@settings_options
def command(
    settings: Settings, tenant: str | None, key: str | None, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Erase payloads and headers of a tenant's or a key's events, everywhere.

    In the outbox, in dead letters, and in what is kept of receivers' answers.  Which
    events there were, and to whom they went and when, stays.  What is still owed is
    not sent: it becomes a dead letter with the reason "erased".  It cannot be taken
    back.  The journal keeps who did it.
    """
    whose = Whose(tenant, key)

    async def go() -> Erased:
        async with database(settings) as connection:
            schema = settings.schema_name

            if not (dry_run or yes):
                _must_be_there()
            if dry_run or not yes:
                with _progress("looking") as show:
                    would = await erase.count(connection, schema, whose, on_progress=show)
                if dry_run:
                    return would
                _ask(would)
            with _progress("erasing") as show:
                return await erase.erase(connection, schema, whose, actor=actor(), on_progress=show)

    done = run_async(go())
    for name in done.schedules:
        warn(f'the schedule "{name}" goes on publishing such events; see: outbox schedule')
    if as_json:
        emit_json(erased(done, dry_run=dry_run))
        return
    verb = "would be erased" if dry_run else "erased"
    answers = "" if dry_run else f", {count(done.answers, 'answer')}"
    click.echo(f"{verb}: {_what(done)}{answers}")


def _what(done: Erased) -> str:
    future = f"{count(done.future_events, 'future event')}, " if done.future_events else ""
    return f"{count(done.events, 'event')}, {future}{count(done.dead_letters, 'dead letter')}"


def _must_be_there() -> None:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("it cannot be taken back; say --yes to do it, or --dry-run to count")


def _ask(would: Erased) -> None:
    if not click.confirm(f"erase what {_what(would)} say, for good?", err=True):
        raise UsageError("nothing was changed")


@contextmanager
def _progress(what: str) -> Iterator[Callable[[Erased], None]]:
    """A bar on stderr, where somebody looks at it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def show(done: Erased) -> None:
            total = max(done.of_about, done.looked_at)
            bar.update(task, total=total, completed=done.looked_at)

        yield show

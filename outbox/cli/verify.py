"""`outbox verify`: the promises, asked of the database."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import actor, database, json_option, run_async, settings_options
from outbox.cli.output import count, emit_json, emit_table
from outbox.core.model.text import safe
from outbox.errors import UsageError
from outbox.operations.verify.promises import CHECKS, EXAMPLES_MAX
from outbox.operations.verify.repair import ADVICE, mend, plan
from outbox.operations.views.verify import audited

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from outbox.config import Settings
    from outbox.operations.verify.repair import Mended
    from outbox.operations.views.verify import Audit


@click.command(
    epilog="""\b
Examples:
  outbox verify
  outbox verify --json | jq .violations
  outbox verify --repair --dry-run
  outbox verify --repair --yes

Exit code 1 says that a promise is broken. It reads everything that is kept, in
one snapshot, while relays and producers go on working.

--repair mends what the other tables tell for certain how it has to be: counters,
checkpoints, owners, gaps, and what is left of something that ended. Each repair is
in the journal. Relays may go on running; they register anew. Then it looks again:
exit code 0 says that nothing is broken any more.
"""
)
@click.option("--repair", "repairs", is_flag=True, help="Mend what can be; asks before it does.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Tell what --repair would do, and do nothing.")
@json_option
@settings_options
def command(settings: Settings, repairs: bool, yes: bool, dry_run: bool, as_json: bool) -> None:
    """Prove from the tables that nothing is lost, doubled or out of order."""
    if (yes or dry_run) and not repairs:
        raise UsageError("--yes and --dry-run go with --repair")
    if repairs and not (yes or dry_run or _is_asked()):
        raise UsageError("--repair changes the database: say --yes, or --dry-run to see how")

    async def look() -> tuple[Audit, list[Mended]]:
        async with database(settings) as connection:
            found = await audited(connection, settings.schema_name)
            return found, await plan(connection, settings.schema_name) if repairs else []

    async def do() -> tuple[list[Mended], Audit]:
        async with database(settings) as connection:
            done = await mend(connection, settings.schema_name, actor=actor())
            return done, await audited(connection, settings.schema_name)

    with _spinner(as_json):
        found, planned = run_async(look())
    done: list[Mended] = []
    if planned and not dry_run:
        if not yes:
            _list("this can be mended", planned, err=True)
            if not click.confirm(f"mend {count(len(planned), 'damage')}?", err=True):
                raise UsageError("nothing was changed")
        with _spinner(as_json):
            done, found = run_async(do())
    if as_json:
        emit_json(found.as_json() | _repairs_as_json(repairs, planned, done, dry_run=dry_run))
    else:
        if repairs and not planned:
            click.echo("there is nothing to mend\n")
        elif dry_run:
            _list("this would be mended", planned)
        elif done:
            _list("mended", done)
        _show(found)
    if found.violations:
        raise click.exceptions.Exit(1)


def _is_asked() -> bool:
    """Whether somebody is there to be asked."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def _repairs_as_json(
    repairs: bool, planned: list[Mended], done: list[Mended], *, dry_run: bool
) -> dict[str, Any]:
    if not repairs:
        return {}
    return {"would_repair": planned} if dry_run else {"repaired": done}


def _list(title: str, repairs: list[Mended], *, err: bool = False) -> None:
    click.echo(f"{title}:", err=err)
    for does, same in groupby(repairs, key=lambda mended: mended.does):
        told = [mended.what for mended in same]
        for what in told[:EXAMPLES_MAX]:
            click.echo(f"  {safe(what)}", err=err)
        if len(told) > EXAMPLES_MAX:
            click.echo(f"  and {len(told) - EXAMPLES_MAX} more", err=err)
        click.echo(f"    → {does}", err=err)
    click.echo(err=err)


def _spinner(as_json: bool) -> AbstractContextManager[Any]:
    if as_json or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(f"asking {count(len(CHECKS), 'question')} …")


def _show(found: Audit) -> None:
    emit_table(
        ["check", "promise", "exceptions"],
        [(f.check.name, f.check.promise, f.violations) for f in found.findings],
        "",
    )
    for finding in found.findings:
        for example in finding.examples:
            click.echo(f"  {finding.check.name}: {safe(example)}")
        if finding.violations:
            click.echo(f"    → {ADVICE[finding.check.name]}")
    looked_at = ", ".join(
        count(n, noun.removesuffix("s").replace("_", " ")) for noun, n in found.about.items()
    )
    violations = found.violations
    verdict = "every promise holds" if not violations else count(violations, "exception")
    click.echo(f"\n{verdict}; looked at {looked_at} in {found.seconds:.1f} s")

"""`outbox verify`: check the delivery guarantees in the database."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import actor, database, json_option, run_async, settings_options
from outbox.cli.output import count, emit_json, emit_table
from outbox.core.model.text import safe
from outbox.errors import UsageError
from outbox.operations.verify.audit import run_audit
from outbox.operations.verify.guarantees import CHECKS, EXAMPLES_MAX
from outbox.operations.verify.repair import apply_repairs, plan_repairs

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from outbox.config import Settings
    from outbox.operations.verify.audit import VerifyReport
    from outbox.operations.verify.repair import AppliedRepair


@click.command(
    epilog="""\b
Examples:
  outbox verify
  outbox verify --json | jq .violations
  outbox verify --repair --dry-run
  outbox verify --repair --yes

Exit code 1 means that a guarantee is violated. The command reads all retained rows in
one snapshot; relays and producers may keep running.

--repair corrects state that can be derived from other tables: counters, checkpoints,
owners, gaps, and leftovers of completed operations. Each repair is recorded in the
journal. Relays may keep running; they register again. A second check follows: exit
code 0 means that no violation is left.
"""
)
@click.option(
    "--repair", "repairs", is_flag=True, help="Repair derivable state; asks for confirmation."
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Print what --repair would do; change nothing.")
@json_option
@settings_options
def command(settings: Settings, repairs: bool, yes: bool, dry_run: bool, as_json: bool) -> None:
    """Check the tables for lost, duplicate and misordered events."""
    if (yes or dry_run) and not repairs:
        raise UsageError("--yes and --dry-run require --repair")
    if repairs and not (yes or dry_run or _can_confirm()):
        raise UsageError(
            "--repair changes the database: confirm with --yes, or preview with --dry-run"
        )

    async def audit_and_plan() -> tuple[VerifyReport, list[AppliedRepair]]:
        async with database(settings, long=True) as connection:
            audit = await run_audit(connection, settings.schema_name)
            return audit, await plan_repairs(connection, settings.schema_name) if repairs else []

    async def repair_and_audit() -> tuple[list[AppliedRepair], VerifyReport]:
        async with database(settings, long=True) as connection:
            done = await apply_repairs(connection, settings.schema_name, actor=actor())
            return done, await run_audit(connection, settings.schema_name)

    with _spinner(as_json):
        audit, planned = run_async(audit_and_plan())
    done: list[AppliedRepair] = []
    if planned and not dry_run:
        if not yes:
            _list("repairs", planned, err=True)
            if not click.confirm(f"apply {count(len(planned), 'repair')}?", err=True):
                raise UsageError("nothing was changed")
        with _spinner(as_json):
            done, audit = run_async(repair_and_audit())
    if as_json:
        emit_json(asdict(audit) | _repairs_as_json(repairs, planned, done, dry_run=dry_run))
    else:
        if repairs and not planned:
            click.echo("nothing to repair\n")
        elif dry_run:
            _list("would repair", planned)
        elif done:
            _list("repaired", done)
        _show(audit)
    if audit.violations:
        raise click.exceptions.Exit(1)


def _can_confirm() -> bool:
    """Whether stdin and stderr are a terminal, so that the user can confirm."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def _repairs_as_json(
    repairs: bool, planned: list[AppliedRepair], done: list[AppliedRepair], *, dry_run: bool
) -> dict[str, Any]:
    if not repairs:
        return {}
    return {"would_repair": planned} if dry_run else {"repaired": done}


def _list(title: str, repairs: list[AppliedRepair], *, err: bool = False) -> None:
    click.echo(f"{title}:", err=err)
    for does, same in groupby(repairs, key=lambda repair: repair.action):
        subjects = [repair.what for repair in same]
        for what in subjects[:EXAMPLES_MAX]:
            click.echo(f"  {safe(what)}", err=err)
        if len(subjects) > EXAMPLES_MAX:
            click.echo(f"  and {len(subjects) - EXAMPLES_MAX} more", err=err)
        click.echo(f"    → {does}", err=err)
    click.echo(err=err)


def _spinner(as_json: bool) -> AbstractContextManager[Any]:
    if as_json or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(f"running {count(len(CHECKS), 'check')} …")


def _show(audit: VerifyReport) -> None:
    emit_table(
        ["check", "guarantee", "violations"],
        [(check.name, check.guarantee, check.violations) for check in audit.checks],
        "",
    )
    for check in audit.checks:
        for example in check.examples:
            click.echo(f"  {check.name}: {safe(example)}")
        if check.action is not None:
            click.echo(f"    → {check.action}")
    checked = ", ".join(
        count(n, noun.removesuffix("s").replace("_", " ")) for noun, n in audit.counts.items()
    )
    violations = audit.violations
    summary = "no violations" if not violations else count(violations, "violation")
    click.echo(f"\n{summary}; checked {checked} in {audit.seconds:.1f} s")

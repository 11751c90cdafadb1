"""`outbox verify`: check the delivery guarantees in the database."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import print_result, run_connected
from outbox.cli.output import echo, emit_table
from outbox.core.model.text import count, singular
from outbox_doctor.verify.audit import run_audit
from outbox_doctor.verify.guarantees import CHECKS

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from outbox.config import Settings
    from outbox_doctor.verify.audit import VerifyReport


def _show(audit: VerifyReport) -> None:
    emit_table(
        ["check", "guarantee", "violations"],
        [(check.name, check.guarantee, check.violations) for check in audit.checks],
        "",
    )
    for check in audit.checks:
        for example in check.examples:
            echo(f"  {check.name}: {example}")
        if check.action is not None:
            echo(f"    → {check.action}")
    checked = ", ".join(
        count(n, singular(nouns).replace("_", " ")) for nouns, n in audit.counts.items()
    )
    violations = audit.violations
    summary = "no violations" if not violations else count(violations, "violation")
    echo("", f"{summary}; checked {checked} in {audit.seconds:.1f} s")


@click.command(
    epilog="""\b
Examples:
  outbox verify
  outbox verify --json | jq .violations

Exit code 1 means that a guarantee is violated. The command reads all retained rows in
one snapshot; relays and producers may keep running.
"""
)
@print_result(_show, failed=lambda report: report.violations)
def command(settings: Settings) -> VerifyReport:
    """Check the tables for lost, duplicate and misordered events."""
    with _spinner():
        return run_connected(
            settings, lambda connection: run_audit(connection, settings.schema_name), long=True
        )


def _spinner() -> AbstractContextManager[Any]:
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(f"running {count(len(CHECKS), 'check')} …")

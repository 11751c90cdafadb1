"""`outbox doctor`: check preconditions and health."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import print_result, run_connected
from outbox.cli.output import echo, fold, style
from outbox.core.model.text import count
from outbox_doctor.check import DoctorContext, DoctorFinding, DoctorReport, Severity
from outbox_doctor.examination import examine

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.config import Settings

_COLOURS = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "red"}
_MARK_CHARS = max(map(len, Severity))


def _summary(problems: int, warnings: int) -> str:
    if not problems and not warnings:
        return "no problems found"
    return ", ".join(
        count(n, noun) for n, noun in ((problems, "problem"), (warnings, "warning")) if n
    )


def _show(report: DoctorReport) -> None:
    """Print each finding and its recommended action, wrapped at spaces on a terminal."""
    name_chars = max(len(finding.check) for finding in report.findings)
    for number, (subject, group) in enumerate(groupby(report.findings, key=lambda f: f.subject)):
        if number:
            echo()
        echo(style(subject.capitalize(), bold=True))
        previous = ""
        for finding in group:
            # Print the name of a check at its first finding only.
            name = "" if finding.check == previous else finding.check
            previous = finding.check
            _print_finding(finding, name.ljust(name_chars))
    echo("", _summary(report.problems, report.warnings))


def _print_finding(finding: DoctorFinding, name: str) -> None:
    mark = finding.severity.ljust(_MARK_CHARS)
    margin = " " * (2 + len(mark) + 2 + len(name) + 2)
    first, *others = fold(finding.message, len(margin))
    echo(f"  {style(mark, fg=_COLOURS[finding.severity])}  {name}  {first}")
    for line in others:
        echo(f"{margin}{line}")
    if finding.action is not None:
        first, *others = fold(f"→ {finding.action}", len(margin) + 2)
        for line in (first, *(f"  {line}" for line in others)):
            echo(f"{margin}{line}")


@click.command(
    epilog="""\b
Examples:
  outbox doctor
  outbox doctor --json | jq '.findings[] | select(.severity != "ok")'
  outbox doctor --no-probe                     read-only

Exit code 1 means at least one problem; warnings do not count. Every query has a
time-out of a few seconds, so a monitoring system can run the command: with --no-probe,
as a role that was granted `outbox migrate --reader ROLE` and `GRANT pg_monitor TO ROLE`.
The probe needs an operator's role. It publishes one event of type outbox.probe, which
only endpoints receive that list exactly this type.
"""
)
@click.option(
    "--probe/--no-probe",
    "probing",
    default=True,
    show_default=True,
    help="Publish a test event, and measure how long sequencing takes.",
)
@print_result(_show, failed=lambda report: report.problems)
def command(settings: Settings, probing: bool) -> DoctorReport:
    """Check preconditions and live health, and suggest what to do."""

    async def run_checks(connection: Connection[Any]) -> DoctorReport:
        return await examine(DoctorContext.from_settings(connection, settings, probing=probing))

    return run_connected(settings, run_checks, current=False)

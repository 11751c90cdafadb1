"""`outbox doctor`."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import click

from outbox.cli.common import database, json_option, run_async, settings_options
from outbox.cli.output import count, emit_json, fold, style
from outbox.destinations.http.endpoint_validation import policy_of
from outbox.operations.doctor import Finding, Look, Severity, examine
from outbox.operations.views.doctor import examined

if TYPE_CHECKING:
    from outbox.config import Settings

_COLOURS = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "red"}
_MARK_CHARS = max(map(len, Severity))


@click.command(
    epilog="""\b
Examples:
  outbox doctor
  outbox doctor --json | jq '.findings[] | select(.severity != "ok")'
  outbox doctor --no-probe                     only read

Exit code 1 says that there is a problem; warnings are none. It asks nothing for
more than some seconds, so it may be run by a monitor: with --no-probe, as a role
that sees everything by `outbox migrate --reader ROLE` and `GRANT pg_monitor TO ROLE`.
The probe, for operators, publishes one event of the type outbox.probe, which only
endpoints get that name all of it in their types.
"""
)
@click.option(
    "--probe/--no-probe",
    "probing",
    default=True,
    show_default=True,
    help="Send an event through the database, and time it.",
)
@json_option
@settings_options
def command(settings: Settings, probing: bool, as_json: bool) -> None:
    """Look at preconditions and live health, and say what to do."""

    policy = policy_of(settings)

    async def go() -> list[Finding]:
        async with database(settings, current=False) as connection:
            look = Look(
                connection,
                settings.schema_name,
                listening=settings.notify and not settings.pooled,
                pooled=settings.pooled,
                probing=probing,
                refusal=policy.refusal_of_url,
                allow_networks=settings.allow_networks,
                keep=settings.keep,
            )
            return [finding async for finding in examine(look)]

    findings = run_async(go())
    told = examined(settings.schema_name, findings)
    problems, warnings = told["problems"], told["warnings"]
    if as_json:
        emit_json(told)
    else:
        _show(findings)
        click.echo(f"\n{_verdict(problems, warnings)}")
    if problems:
        raise click.exceptions.Exit(1)


def _verdict(problems: int, warnings: int) -> str:
    if not problems and not warnings:
        return "everything is as it should be"
    return ", ".join(
        count(n, noun) for n, noun in ((problems, "problem"), (warnings, "warning")) if n
    )


def _show(findings: list[Finding]) -> None:
    """One line a finding, and one for what to do; on a terminal folded at spaces."""
    name_chars = max(len(finding.check) for finding in findings)
    for number, (subject, group) in enumerate(groupby(findings, key=lambda f: f.subject)):
        click.echo(("\n" if number else "") + style(subject.capitalize(), bold=True))
        told = ""
        for finding in group:
            # A check's name stands at the first of its findings.
            name = "" if finding.check == told else finding.check
            told = finding.check
            _tell(finding, name.ljust(name_chars))


def _tell(finding: Finding, name: str) -> None:
    mark = finding.severity.ljust(_MARK_CHARS)
    margin = " " * (2 + len(mark) + 2 + len(name) + 2)
    first, *others = fold(finding.says, len(margin))
    click.echo(f"  {style(mark, fg=_COLOURS[finding.severity])}  {name}  {first}")
    for line in others:
        click.echo(f"{margin}{line}")
    if finding.do is not None:
        first, *others = fold(f"→ {finding.do}", len(margin) + 2)
        for line in (first, *(f"  {line}" for line in others)):
            click.echo(f"{margin}{line}")

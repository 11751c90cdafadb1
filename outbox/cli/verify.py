"""`outbox verify`: the promises, asked of the database."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import database, json_option, run_async, settings_options
from outbox.cli.output import count, emit_json, emit_table, safe
from outbox.store.audit import CHECKS, audit, counts
from outbox.store.connect import map_errors

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from outbox.config import Settings
    from outbox.store.audit import Finding


@click.command(
    epilog="""\b
Examples:
  outbox verify
  outbox verify --json | jq .violations

Exit code 1 says that a promise is broken. It reads everything that is kept, in
one snapshot, while relays and producers go on working.
"""
)
@json_option
@settings_options
def command(settings: Settings, as_json: bool) -> None:
    """Prove from the tables that nothing is lost, doubled or out of order."""
    findings: list[Finding] = []

    async def go() -> dict[str, int]:
        async with database(settings) as connection:
            with map_errors(settings.schema_name):
                about = await counts(connection)
                async for finding in audit(connection):
                    findings.append(finding)  # noqa: PERF401 (the spinner moves on between)
        return about

    started = time.monotonic()
    with _spinner(as_json):
        about = run_async(go())
    seconds = round(time.monotonic() - started, 3)
    violations = sum(finding.violations for finding in findings)
    if as_json:
        emit_json(
            {
                "violations": violations,
                "checks": [
                    {
                        "name": f.check.name,
                        "promise": f.check.promise,
                        "violations": f.violations,
                        "examples": f.examples,
                    }
                    for f in findings
                ],
                "counts": about,
                "seconds": seconds,
            }
        )
    else:
        _show(findings, about, violations, seconds)
    if violations:
        raise click.exceptions.Exit(1)


def _spinner(as_json: bool) -> AbstractContextManager[Any]:
    if as_json or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(f"asking {count(len(CHECKS), 'question')} …")


def _show(findings: list[Finding], about: dict[str, int], violations: int, seconds: float) -> None:
    emit_table(
        ["check", "promise", "exceptions"],
        [(f.check.name, f.check.promise, f.violations) for f in findings],
        "",
    )
    for finding in findings:
        for example in finding.examples:
            click.echo(f"  {finding.check.name}: {safe(example)}")
    looked_at = ", ".join(
        count(n, noun.removesuffix("s").replace("_", " ")) for noun, n in about.items()
    )
    verdict = "every promise holds" if not violations else count(violations, "exception")
    click.echo(f"\n{verdict}; looked at {looked_at} in {seconds:.1f} s")

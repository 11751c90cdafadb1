"""`outbox demo`: a complete example on a temporary PostgreSQL."""

from __future__ import annotations

import random
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

import outbox
from outbox.cli.common import json_option, run_async, run_until_signal
from outbox.cli.output import echo, emit_json, style

if TYPE_CHECKING:
    from outbox_devtools.chaos.run import ChaosReport


@click.command(
    epilog="""\b
Examples:
  outbox demo
  outbox demo --events 20000
  outbox demo --json | tail -1 | jq .missing

Needs no database: the command starts a temporary PostgreSQL server and removes it
afterwards. The server is in an extra of the package: pip install "outbox-relay[demo]".

Exit code 1 means that an event was missing or out of order.
"""
)
@click.option(
    "--events",
    type=click.IntRange(10, 1_000_000),
    default=1000,
    show_default=True,
    help="Number of committed events.",
)
@click.option("--seed", type=int, help="Random seed, to repeat an earlier run.")
@click.option("--pg", "major", type=int, help="PostgreSQL major version; default: the newest.")
@json_option
def command(events: int, seed: int | None, major: int | None, as_json: bool) -> None:
    """Run a complete example on a temporary database.

    A shop publishes events in transactions, some of which roll back. A relay delivers
    them to three receivers that fail at random, and is killed with kill -9. Then the
    published events are compared with the received ones.
    """
    from outbox_devtools.demo import run_demo

    def log(line: str) -> None:
        echo(line, err=True)

    log("starting PostgreSQL, three receivers and a relay …")
    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    report = run_async(run_until_signal(run_demo(events, chosen, major, log)))
    if as_json:
        _emit(report)
    else:
        _show(report)
    if not report.result.good:
        raise click.exceptions.Exit(1)


def _emit(report: ChaosReport) -> None:
    result = report.result
    findings = {name: found.count for name, found in result.findings.items()}
    emit_json(
        {
            "published": result.committed,
            "delivered": result.deliveries,
            "duplicates": result.duplicates,
            "out_of_order": findings["inverted"],
            "missing": findings["lost"],
            "dead_lettered": result.dead,
            "seconds": round(report.faults_s + report.settle_s, 1),
            "expected": result.expected,
            "rolled_back": report.rolled_back,
            "rolled_back_but_delivered": findings["phantoms"],
            "violations": findings["verify"],
            "relay_kills": report.faults.get("kill", 0),
            "postgres": report.versions["postgres"],
            "seed": report.plan.seed,
        }
    )


def _show(report: ChaosReport) -> None:
    result = report.result
    counts = [
        ("published", result.committed, f"and {report.rolled_back} rolled back"),
        ("expected", result.expected, "deliveries to 3 endpoints"),
        ("delivered", result.deliveries, "each processed once"),
        ("dead-lettered", result.dead, "refused by the receiver, kept for replay"),
        (
            "duplicates",
            result.duplicates,
            "same X-Delivery and sequence, dropped by the receiver",
        ),
    ]
    violations = [
        ("missing", "lost", "neither delivered nor dead-lettered"),
        ("out of order", "inverted", "within a lane or a key"),
        ("phantoms", "phantoms", "rolled back, but delivered"),
        ("violations", "verify", "found by outbox verify"),
    ]
    echo()
    for name, value, meaning in counts:
        echo(f"    {name:<16} {value:>9,}   {style(meaning, dim=True)}")
    for name, check, meaning in violations:
        found = result.findings[check].count
        mark = style("✗", fg="red") if found else style("✓", fg="green")
        echo(f"  {mark} {name:<16} {found:>9,}   {style(meaning, dim=True)}")
    kills, seconds = report.faults.get("kill", 0), report.faults_s + report.settle_s
    killed = f"{kills} kill -9 of the relay" if kills else "no kill"
    echo(
        "",
        f"PostgreSQL {report.versions['postgres']}, {killed}, {seconds:.1f} s, "
        f"seed {report.plan.seed}",
    )
    if result.good:
        us = _own_name()
        echo(
            "",
            "Next, with your database:",
            "  export OUTBOX_DSN=postgresql://localhost/app",
            f"  {us} migrate",
            f"  {us} endpoint add billing https://example.com/hooks --type 'order.*'",
            f"  {us} relay",
            "An application that publishes or receives installs one package:",
            f"  pip install {_checkout() or 'outbox-relay'}",
        )


def _own_name() -> str:
    """How this user can run another command of ours."""
    if shutil.which("outbox"):
        return "outbox"
    # From a checkout, run.py has started this; otherwise, an environment that is not activated.
    return sys.argv[0] if _checkout() is None else "python3 run.py outbox"


def _checkout() -> str | None:
    """The directory of the checkout that this runs from; None: an installed package."""
    directory = Path(outbox.__file__).parents[1]
    return shlex.quote(str(directory)) if (directory / "run.py").exists() else None

"""`outbox demo`: a complete example on a temporary PostgreSQL."""

from __future__ import annotations

import random
import shutil
import sys
from typing import TYPE_CHECKING

import click

from outbox.cli.common import json_option, run_async, run_until_signal
from outbox.cli.output import emit_json, style

if TYPE_CHECKING:
    from outbox.devtools.demo.run import DemoReport


@click.command(
    epilog="""\b
Examples:
  outbox demo
  outbox demo --events 20000
  outbox demo --json | tail -1 | jq .missing

Needs no database: the command starts a temporary PostgreSQL server and removes it
afterwards. Exit code 1 means that an event was missing or out of order.
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
    from outbox.devtools.demo.run import run_demo

    live = sys.stdout.isatty() and not as_json

    def log(line: str) -> None:
        click.echo(line, err=True)

    log("starting PostgreSQL, three receivers and a relay …")
    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    result = run_async(run_until_signal(run_demo(events, chosen, major, live=live, log=log)))
    if as_json:
        _emit(result)
    else:
        _show(result)
    if not result.checks.good:
        raise click.exceptions.Exit(1)


def _emit(result: DemoReport) -> None:
    proof = result.checks
    emit_json(
        {
            "published": proof.published,
            "delivered": proof.delivered,
            "duplicates": proof.duplicates,
            "out_of_order": proof.out_of_order,
            "missing": proof.missing,
            "dead_lettered": proof.dead_lettered,
            "seconds": result.seconds,
            "expected": proof.expected,
            "rolled_back": proof.rolled_back,
            "rolled_back_but_delivered": proof.phantoms,
            "violations": proof.violations,
            "relay_kills": result.kills,
            "postgres": result.postgres,
            "seed": result.seed,
        }
    )


def _show(result: DemoReport) -> None:
    proof = result.checks
    rows: list[tuple[str, int | float, str, bool | None]] = [
        ("published", proof.published, f"and {proof.rolled_back} rolled back", None),
        ("expected", proof.expected, "deliveries to 3 endpoints", None),
        ("delivered", proof.delivered, "each processed once", None),
        ("dead-lettered", proof.dead_lettered, "rejected by the receiver, kept for replay", None),
        (
            "duplicates",
            proof.duplicates,
            "same X-Delivery and sequence, dropped by the receiver",
            None,
        ),
        ("missing", proof.missing, "neither delivered nor dead-lettered", not proof.missing),
        ("out of order", proof.out_of_order, "within a lane or a key", not proof.out_of_order),
        ("phantoms", proof.phantoms, "rolled back, but delivered", not proof.phantoms),
        (
            "violations",
            proof.violations,
            "found by outbox verify",
            not proof.violations,
        ),
    ]
    click.echo()
    for name, value, meaning, good in rows:
        mark = " " if good is None else style("✓", fg="green") if good else style("✗", fg="red")
        click.echo(f"  {mark} {name:<16} {value:>9,}   {style(meaning, dim=True)}")
    killed = f"{result.kills} kill -9 of the relay" if result.kills else "no kill"
    click.echo(
        f"\nPostgreSQL {result.postgres}, {killed}, {result.seconds:.1f} s, seed {result.seed}"
    )
    if proof.good:
        # With run.py the command is not on PATH.
        outbox = "outbox" if shutil.which("outbox") else "python3 run.py outbox"
        click.echo(
            "\nNext, with your database:\n"
            "  export OUTBOX_DSN=postgresql://localhost/app\n"
            f"  {outbox} migrate\n"
            f"  {outbox} endpoint add billing https://example.com/hooks --type 'order.*'\n"
            f"  {outbox} relay"
        )

"""`outbox prove`: relays under every fault, on the user's own database."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from outbox.cli.common import json_option, run_async, until_told, warn
from outbox.cli.output import emit_json, emit_table, style
from outbox.config import load
from outbox.core.model.text import safe
from outbox.devtools.chaos.plan import KINDS, Plan, choose
from outbox.errors import CannotRun, UsageError

if TYPE_CHECKING:
    from outbox.devtools.chaos.run import Report

SEED_MAX = 1_000_000_000


def _kinds() -> str:
    lines = []
    group = ""
    for kind in KINDS.values():
        if kind.group != group:
            group = kind.group
            lines.append(f"  {group}")
        lines.append(f"    {kind.name:<17} {kind.what}")
    return "\n".join(lines)


@click.command(
    epilog=f"""\b
Faults:
{_kinds()}

\b
Examples:
  outbox prove --embedded                    needs no database of yours
  outbox prove --dsn postgresql://localhost/app --minutes 10
  outbox prove --embedded --faults kill,freeze,restart --seed 17
  outbox prove --embedded --receiver http://127.0.0.1:8080/hooks --rate 50
  outbox prove --embedded --json | jq .lost

On your database nothing is touched but the schema outbox_prove_SEED, which is
made and dropped again, and the sessions of the run's own relays. Behind Ctrl-C
and SIGTERM everything is taken down as well.

Exit code 1 says that something was lost, inverted or not explained, 3 that it
could not run.
"""
)
@click.option(
    "--minutes",
    type=click.FloatRange(0.1, 60),
    default=1.0,
    show_default=True,
    help="How long faults and producers go on.",
)
@click.option(
    "--replicas", type=click.IntRange(1, 16), default=3, show_default=True, help="How many relays."
)
@click.option(
    "--rate",
    type=click.FloatRange(1, 20_000),
    default=1000,
    show_default=True,
    help="Events committed per second.",
)
@click.option(
    "--endpoints",
    type=click.IntRange(1, 2000),
    default=200,
    show_default=True,
    help="How many endpoints; each event is for one of them.",
)
@click.option(
    "--fault-every",
    "fault_every_s",
    type=click.FloatRange(0.2, 3600),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="A fault begins so often.",
)
@click.option(
    "--lease",
    "lease_s",
    type=click.FloatRange(1, 300),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="The relays' lease.",
)
@click.option("--faults", metavar="A,B,…", help='Only these; "none" for none. Default: all.')
@click.option(
    "--receiver",
    metavar="URL",
    help="Pass every delivery on to it, signed with "
    "OUTBOX_SECRET if that is set, and answer as it does.",
)
@click.option(
    "--embedded",
    is_flag=True,
    help="On a PostgreSQL of its own, which is also restarted as after a crash.",
)
@click.option(
    "--seed", type=click.IntRange(0, SEED_MAX), help="Repeat the faults of an earlier run."
)
@click.option("--keep", is_flag=True, help="Leave the schema, to look at it.")
@click.option("--config", metavar="FILE", help="Settings; default: ./outbox.toml.")
@click.option(
    "--dsn", metavar="DSN", help="The database; better set as OUTBOX_DSN, which ps hides."
)
@json_option
def command(
    minutes: float,
    replicas: int,
    rate: float,
    endpoints: int,
    fault_every_s: float,
    lease_s: float,
    faults: str | None,
    receiver: str | None,
    embedded: bool,
    seed: int | None,
    keep: bool,
    config: str | None,
    dsn: str | None,
    as_json: bool,
) -> None:
    """Prove it on your own database: nothing lost, nothing out of order.

    Relays deliver to receivers that fail, while they are killed, frozen and cut
    off from the database. Afterwards everything that was committed is held
    against everything that came, and every copy has to have a cause.
    """
    from outbox.core.delivery.signature import parse_secret
    from outbox.devtools.chaos.proxy_dsn import require_detour
    from outbox.devtools.chaos.run import run
    from outbox.store.connection import dsn as addresses

    if embedded and dsn is not None:
        raise UsageError("--dsn and --embedded are two databases; say one")
    if embedded and keep:
        raise UsageError("--keep: an embedded database is removed with all that is in it")
    plan = Plan(
        minutes=minutes,
        replicas=replicas,
        rate=rate,
        endpoints=endpoints,
        fault_every_s=fault_every_s,
        lease_s=lease_s,
        kinds=() if faults == "none" else choose(faults, own_server=embedded),
        receiver=_url(receiver),
        seed=random.SystemRandom().randrange(SEED_MAX) if seed is None else seed,
    )
    settings = load({"dsn": dsn}, config=config)
    address = None
    if not embedded:
        if not settings.dsn_source:
            raise CannotRun(
                "no database was named: use --dsn or OUTBOX_DSN, "
                "or --embedded for one that is started for this"
            )
        if settings.pooled:
            raise CannotRun(
                "OUTBOX_POOLED is set: give a direct connection, because a proxy that pools "
                "transactions does not know the schema that this makes"
            )
        address = addresses.of(settings)
        require_detour(address)
        for warning in address.warnings:
            warn(warning)

    def tell(line: str) -> None:
        click.echo(safe(line), err=True)

    tell(_announcement(plan, str(address) if address else "an embedded PostgreSQL"))
    secret = parse_secret(settings.secret.get_secret_value()) if settings.secret else None
    live = sys.stdout.isatty() and not as_json
    report = run_async(
        until_told(run(plan, address, secret=secret, keep=keep, live=live, tell=tell))
    )
    if as_json:
        _emit(report)
    else:
        _show(report)
    if not report.judgement.good:
        raise click.exceptions.Exit(1)


def _url(receiver: str | None) -> str | None:
    if receiver is None:
        return None
    try:
        parts = urlsplit(receiver)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UsageError("--receiver: must be a URL such as http://127.0.0.1:8080/hooks")
    return receiver


def _announcement(plan: Plan, where: str) -> str:
    """What is going to be done, before it is."""
    faults = len(plan.schedule())
    return (
        f"on {where}, in a schema of its own ({plan.schema}): for {plan.seconds:.0f} s some "
        f"{plan.events:,} events to {plan.endpoints} endpoints by {plan.replicas} relays, "
        f"{faults} faults, seed {plan.seed}; then at most {plan.settle_s:.0f} s to settle"
    )


def _emit(report: Report) -> None:
    judgement, plan = report.judgement, report.plan
    emit_json(
        {
            "proven": judgement.good,
            **{name: note.count for name, note in judgement.findings.items()},
            "examples": {
                name: note.examples for name, note in judgement.findings.items() if note.count
            },
            "committed": judgement.committed,
            "rolled_back": report.rolled_back,
            "delivered": judgement.deliveries,
            "dead_lettered": judgement.dead,
            "requests": report.requests,
            "copies": judgement.copies,
            "events_per_s": report.events_per_s,
            "faults": report.faults,
            "orders_skipped": report.skipped,
            "take_overs": judgement.take_overs,
            "hand_overs": judgement.hand_overs,
            "longest_pause_s": round(judgement.longest_pause_s, 2),
            "recovery_s": {
                kind: {"median": round(middle, 2), "max": round(worst, 2)}
                for kind, (middle, worst) in judgement.recovery_s.items()
            },
            "settle_s": report.settle_s,
            "stalled_s": report.stalled_s,
            "replicas": plan.replicas,
            "endpoints": plan.endpoints,
            "rate": plan.rate,
            "minutes": plan.minutes,
            "lease_s": plan.lease_s,
            "seed": plan.seed,
            "versions": report.versions,
            "logs": report.logs or None,
        }
    )


def _show(report: Report) -> None:
    from outbox.devtools.chaos.checker import CHECKS

    judgement, plan = report.judgement, report.plan
    click.echo()
    recovery = judgement.recovery_s
    rows = [
        (kind, n, *(f"{each:.1f} s" for each in recovery.get(kind, ())))
        if kind in recovery
        else (kind, n, None, None)
        for kind, n in report.faults.items()
    ]
    emit_table(["fault", "times", "recovery", "longest"], rows, "no faults")
    click.echo()
    copies = [(cause, n) for cause, n in judgement.copies.items()]
    emit_table(["copies because of", "times"], copies, "no copies")
    click.echo()
    about = [
        (
            "committed",
            judgement.committed,
            f"{report.events_per_s:,.0f} per second, and {report.rolled_back:,} rolled back",
        ),
        ("delivered", judgement.deliveries, f"in {report.requests:,} requests"),
        ("dead letters", judgement.dead, "refused for good, kept with their reason"),
        ("take-overs", judgement.take_overs, "endpoints taken from a relay that was gone"),
        ("hand-overs", judgement.hand_overs, "endpoints that a relay handed on"),
    ]
    for name, value, meaning in about:
        click.echo(f"    {name:<13} {value:>9,}   {style(meaning, dim=True)}")
    click.echo(
        f"    {'longest pause':<13} {judgement.longest_pause_s:>7.1f} s   "
        + style("of a lane that owed something", dim=True)
    )
    click.echo(
        f"    {'settled':<13} {report.settle_s:>7.1f} s   "
        + style("after the last fault", dim=True)
    )
    if report.stalled_s:
        click.echo(
            f"    {'held up':<13} {report.stalled_s:>7.1f} s   "
            + style("at most: this process had no time, and its answers were late", dim=True)
        )
    for name, meaning in CHECKS.items():
        note = judgement.findings[name]
        mark = style("✗", fg="red") if note.count else style("✓", fg="green")
        click.echo(f"  {mark} {name:<13} {note.count:>9,}   {style(meaning, dim=True)}")
        for example in note.examples:
            click.echo(f"      {safe(example)}")
    versions = report.versions
    click.echo(
        f"\noutbox {versions['outbox']}, PostgreSQL {versions['postgres']}, "
        f"{plan.replicas} relays, lease {plan.lease_s:g} s, {plan.endpoints} endpoints, "
        f"{report.storm_s:.0f} s, seed {plan.seed}"
    )
    if report.logs:
        click.echo(f"the relays' logs are in {report.logs}")
    faults = sum(report.faults.values())
    verdict = (
        f"proven: {judgement.committed:,} events under {faults} faults, "
        "nothing lost, nothing out of order, every copy explained"
        if judgement.good
        else "not proven: "
        + ", ".join(
            f"{name} {note.count:,}" for name, note in judgement.findings.items() if note.count
        )
    )
    click.echo(style(verdict, fg="green" if judgement.good else "red", bold=True))

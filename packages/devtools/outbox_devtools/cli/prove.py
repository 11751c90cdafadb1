"""`outbox prove`: fault-injection test on the user's own database."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from outbox.cli.common import json_option, run_async, run_until_signal, warn
from outbox.cli.output import echo, emit_json, emit_table, style
from outbox.config import load
from outbox.errors import CannotRun, UsageError
from outbox_devtools.chaos.plan import CHECKS, FAULT_KINDS, ChaosPlan, select_faults

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox_devtools.chaos.run import ChaosReport

SEED_MAX = 1_000_000_000


def _kinds() -> str:
    lines = []
    group = ""
    for kind in FAULT_KINDS.values():
        if kind.group != group:
            group = kind.group
            lines.append(f"  {group}")
        lines.append(f"    {kind.name:<17} {kind.description}")
    return "\n".join(lines)


@click.command(
    epilog=f"""\b
Faults:
{_kinds()}

\b
Examples:
  outbox prove --embedded                    use a temporary PostgreSQL
  outbox prove --dsn postgresql://localhost/app --minutes 10
  outbox prove --embedded --faults kill,freeze,restart --seed 17
  outbox prove --embedded --receiver http://127.0.0.1:8080/hooks --rate 50
  outbox prove --embedded --json | jq .lost

In your database the command uses only the schema outbox_prove_SEED, which it creates
and drops, and the sessions of its own relays. Ctrl-C and SIGTERM clean up as well.

Exit code 1 means that an event was lost, out of order, overdue or duplicated without a
cause; 3 that the test could not run.
"""
)
@click.option(
    "--minutes",
    type=click.FloatRange(0.1, 60),
    default=1.0,
    show_default=True,
    help="Duration of the faults and the load.",
)
@click.option(
    "--replicas", type=click.IntRange(1, 16), default=3, show_default=True, help="Number of relays."
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
    help="Number of endpoints; each event goes to one of them.",
)
@click.option(
    "--fault-every",
    "fault_every_s",
    type=click.FloatRange(0.2, 3600),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="Interval between faults.",
)
@click.option(
    "--lease",
    "lease_s",
    type=click.FloatRange(1, 300),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Lease time-out of the relays.",
)
@click.option("--faults", metavar="A,B,…", help='Only these faults, or "none". Default: all.')
@click.option(
    "--receiver",
    metavar="URL",
    help="Forward every delivery to this receiver, signed with OUTBOX_SECRET if it is set, and "
    "return its response.",
)
@click.option(
    "--embedded",
    is_flag=True,
    help="Use a temporary PostgreSQL, which is also crashed and restarted.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, SEED_MAX),
    help="Random seed, to repeat the faults of an earlier run.",
)
@click.option("--keep", is_flag=True, help="Keep the schema for inspection.")
@click.option("--config", metavar="FILE", help="Settings file; default: ./outbox.toml.")
@click.option(
    "--dsn", metavar="DSN", help="Database DSN; prefer OUTBOX_DSN, because ps shows flags."
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
    """Run relays under injected faults, and check that no event is lost or misordered.

    Relays deliver to failing receivers while they are killed, frozen and disconnected
    from the database, and while commands of operators hang. Afterwards all committed
    events are compared with all received requests, every duplicate must have a known
    cause, and every endpoint must have recovered in time.
    """
    from outbox.core.messages.signature import parse_secret
    from outbox.store.connection import dsn as addresses
    from outbox_devtools.chaos.proxy_dsn import require_proxyable
    from outbox_devtools.chaos.run import RunProgress, run_chaos

    if embedded and dsn is not None:
        raise UsageError("--dsn and --embedded exclude each other")
    if embedded and keep:
        raise UsageError("--keep has no effect with --embedded: the temporary database is removed")
    plan = ChaosPlan(
        minutes=minutes,
        replicas=replicas,
        rate=rate,
        endpoints=endpoints,
        fault_every_s=fault_every_s,
        lease_s=lease_s,
        kinds=() if faults == "none" else select_faults(faults, own_server=embedded),
        receiver=_url(receiver),
        seed=random.SystemRandom().randrange(SEED_MAX) if seed is None else seed,
    )
    settings = load({"dsn": dsn}, config=config)
    address = None
    if not embedded:
        if not settings.dsn_source:
            raise CannotRun(
                "no database: set --dsn or OUTBOX_DSN, or use --embedded for a temporary one"
            )
        if settings.pooled:
            raise CannotRun(
                "OUTBOX_POOLED is set: this command needs a direct connection, because a "
                "transaction pooler cannot use the schema that it creates"
            )
        address = addresses.from_settings(settings)
        require_proxyable(address)
        for warning in address.warnings:
            warn(warning)

    def log(line: str) -> None:
        echo(line, err=True)

    log(_announcement(plan, str(address) if address else "an embedded PostgreSQL"))
    secret = parse_secret(settings.secret.get_secret_value()) if settings.secret else None
    run = run_chaos(plan, address, RunProgress(log), secret=secret, keep=keep)
    report = run_async(run_until_signal(run))
    if as_json:
        _emit(report)
    else:
        _show(report)
    if not report.result.good:
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


def _announcement(plan: ChaosPlan, where: str) -> str:
    """A one-line summary of the plan."""
    faults = len(plan.schedule())
    return (
        f"on {where}, in the schema {plan.schema}: for {plan.seconds:.0f} s some "
        f"{plan.events:,} events to {plan.endpoints} endpoints by {plan.replicas} relays, "
        f"{faults} faults, seed {plan.seed}; then at most {plan.settle_s:.0f} s to settle"
    )


def _emit(report: ChaosReport) -> None:
    result, plan = report.result, report.plan
    emit_json(
        {
            "proven": result.good,
            **{name: note.count for name, note in result.findings.items()},
            "examples": {
                name: note.examples for name, note in result.findings.items() if note.count
            },
            "committed": result.committed,
            "rolled_back": report.rolled_back,
            "delivered": result.deliveries,
            "dead_lettered": result.dead,
            "requests": report.requests,
            "copies": result.copies,
            "events_per_s": report.events_per_s,
            "faults": report.faults,
            "faults_skipped": report.skipped,
            "take_overs": result.take_overs,
            "hand_overs": result.hand_overs,
            "longest_pause_s": round(result.recovery.longest_pause_s, 2),
            "undisturbed_pause_s": round(result.recovery.undisturbed_s, 2),
            "recovery_s": _rounded(result.recovery.endpoints_s),
            "recovery_of_others_s": _rounded(result.recovery.others_s),
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


def _rounded(times: Mapping[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    return {
        kind: {"median": round(middle, 2), "max": round(worst, 2)}
        for kind, (middle, worst) in times.items()
    }


def _show(report: ChaosReport) -> None:
    from outbox_devtools.chaos.recovery import ENDPOINT_LEASES, LEADER_LEASES

    result, plan = report.result, report.plan
    echo()
    recovery = result.recovery
    rows = []
    for kind, n in report.faults.items():
        times = [*recovery.endpoints_s.get(kind, (None, None)), None]
        if kind in recovery.others_s:
            times[2] = recovery.others_s[kind][1]
        rows.append((kind, n, *(None if s is None else f"{s:.1f} s" for s in times)))
    emit_table(["fault", "times", "recovery", "longest", "others"], rows, "no faults")
    echo(
        style(
            "recovery: median and longest time until an endpoint of the relay delivers again, "
            f"within {ENDPOINT_LEASES * plan.lease_s:g} s;",
            dim=True,
        ),
        style(
            "others: all other endpoints, if the "
            f"relay led, within {LEADER_LEASES * plan.lease_s:g} s. Faults of receivers and "
            "commands of operators: from their end.",
            dim=True,
        ),
    )
    echo()
    copies = [(cause, n) for cause, n in result.copies.items()]
    emit_table(["copies because of", "times"], copies, "no copies")
    echo()
    about = [
        (
            "committed",
            result.committed,
            f"{report.events_per_s:,.0f} per second, and {report.rolled_back:,} rolled back",
        ),
        ("delivered", result.deliveries, f"in {report.requests:,} requests"),
        ("dead letters", result.dead, "refused permanently, kept with the reason"),
        ("take-overs", result.take_overs, "endpoints acquired after a relay's lease expired"),
        ("hand-overs", result.hand_overs, "endpoints released to another relay"),
        ("not injected", report.skipped, "faults that had nothing to hit, or no database"),
    ]
    for name, value, meaning in about:
        echo(f"    {name:<13} {value:>9,}   {style(meaning, dim=True)}")
    echo(
        f"    {'longest pause':<13} {recovery.longest_pause_s:>7.1f} s   "
        + style("of a lane with pending deliveries", dim=True)
    )
    echo(
        f"    {'undisturbed':<13} {recovery.undisturbed_s:>7.1f} s   "
        + style("the part of a pause after the bounds of all faults", dim=True)
    )
    echo(
        f"    {'settled':<13} {report.settle_s:>7.1f} s   "
        + style("after the last fault", dim=True)
    )
    if report.stalled_s:
        echo(
            f"    {'held up':<13} {report.stalled_s:>7.1f} s   "
            + style("at most, because this process was not scheduled in time", dim=True)
        )
    for name, meaning in CHECKS.items():
        note = result.findings[name]
        mark = style("✗", fg="red") if note.count else style("✓", fg="green")
        echo(f"  {mark} {name:<13} {note.count:>9,}   {style(meaning, dim=True)}")
        for example in note.examples:
            echo(f"      {example}")
    versions = report.versions
    echo(
        "",
        f"outbox {versions['outbox']}, PostgreSQL {versions['postgres']}, "
        f"{plan.replicas} relays, lease {plan.lease_s:g} s, {plan.endpoints} endpoints, "
        f"{report.faults_s:.0f} s, seed {plan.seed}",
    )
    if report.logs:
        echo(f"the relays' logs are in {report.logs}")
    faults = sum(report.faults.values())
    summary = (
        f"proven: {result.committed:,} events under {faults} faults, "
        "nothing lost, nothing out of order, every copy explained"
        if result.good
        else "not proven: "
        + ", ".join(
            f"{name} {note.count:,}" for name, note in result.findings.items() if note.count
        )
    )
    echo(style(summary, fg="green" if result.good else "red", bold=True))

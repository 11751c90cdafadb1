"""`python3 run.py bench`: measure, and write one table and one picture."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import orjson

from benchmarks import (
    api,
    brokers,
    commands,
    commits,
    cursors,
    deliveries,
    failover,
    feeding,
    flood,
    formats,
    horizon,
    hostile,
    kept,
    latency,
    majors,
    memory,
    million,
    outage,
    pages,
    profile,
    publishing,
    reads,
    receiving,
    replays,
    replicas,
    shares,
    watched,
)
from benchmarks.connections import exchanges, keepalive
from benchmarks.cost import section as cost
from benchmarks.peers import section as peers
from benchmarks.picture import draw
from benchmarks.report import compared, machine, table, target, target_result
from benchmarks.scale import fair
from benchmarks.scale import section as scale
from benchmarks.stage import stage
from outbox.errors import OutboxError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from benchmarks.figures import Row

RESULTS = Path(__file__).with_name("results")
QUICK_RESULTS = Path(__file__).parents[1] / "build" / "bench"
SECTIONS: dict[str, Callable[..., Awaitable[list[Row]]]] = {
    "deliveries": deliveries.measure,
    "formats": formats.measure,
    "brokers": brokers.measure,
    "peers": peers.measure,
    "cost": cost.measure,
    "watched": watched.measure,
    "api": api.measure,
    "commits": commits.measure,
    "publishing": publishing.measure,
    "majors": majors.measure,
    "latency": latency.measure,
    "replays": replays.measure,
    "feeding": feeding.measure,
    "memory": memory.measure,
    "million": million.measure,
    "outage": outage.measure,
    "replicas": replicas.measure,
    "failover": failover.measure,
    "cursors": cursors.measure,
    "commands": commands.measure,
    "pages": pages.measure,
    "reads": reads.measure,
    "horizon": horizon.measure,
    "receiving": receiving.measure,
    "hostile": hostile.measure,
    "keepalive": keepalive.measure,
    "exchanges": exchanges.measure,
    "scale": scale.measure,
    "fair": fair.measure,
    "shares": shares.measure,
    "flood": flood.measure,
}
ROUNDS, QUICK_ROUNDS = 5, 1
INTERRUPTED = 130


def _sections(_: click.Context, __: click.Parameter, value: str | None) -> list[str]:
    names = list(SECTIONS) if value is None else [name.strip() for name in value.split(",")]
    for name in names:
        if name not in SECTIONS:
            raise click.BadParameter(f"there is no {name!r}; choose from {', '.join(SECTIONS)}")
    return names


@click.command(
    epilog="""\b
Exit codes: 0 all measured targets are met, 1 a target is missed, 2 wrong
usage, 3 the benchmark could not run, 130 interrupted.
"""
)
@click.option("--quick", is_flag=True, help="Short: small numbers, one round, as a smoke test.")
@click.option("--full", is_flag=True, help=f"Full: {million.FULL_DELIVERIES:,} in `million`.")
@click.option(
    "--only", callback=_sections, metavar="NAMES", help=f"Of {','.join(SECTIONS)}; default: all."
)
@click.option("--rounds", type=click.IntRange(1, 100), help=f"Default: {ROUNDS}.")
@click.option(
    "--deliveries",
    type=click.IntRange(10_000, 100_000_000),
    help=f"In the section `million`; default: {million.DELIVERIES:,}.",
)
@click.option(
    "--dsn",
    help="An empty database of a PostgreSQL server to put under load; the role creates "
    "further databases, and drops them. Default: an embedded server.",
)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of table and pictures, which also keeps earlier sections. Default: "
    "benchmarks/results; with --quick build/bench, without earlier sections.",
)
@click.option(
    "--profile",
    "profiled",
    is_flag=True,
    help="Instead, draw a flame graph of a relay's CPU time into profile.svg.",
)
def main(
    quick: bool,
    full: bool,
    only: list[str],
    rounds: int | None,
    deliveries: int | None,
    dsn: str | None,
    as_json: bool,
    out: Path | None,
    profiled: bool,
) -> None:
    """Benchmark the relay against its building blocks and other queues.

    Starts its own PostgreSQL, receivers, clients and relays on this machine,
    and ends all of them. Takes two to three hours; with --quick some minutes,
    with --full half an hour more. Each section is written when it ends, so
    that an interrupted run keeps the completed sections.

    PostgreSQL is the newest embedded one by default. OUTBOX_PG_BIN is the
    directory of another installation's programs, --dsn a running server.

    The section "peers" fetches PgQueuer, procrastinate, graphile-worker and pg-boss, and a
    Node for the latter two, in pinned versions into build/ the first time. An unavailable
    contestant is not measured, and the table gives the reason. If nginx is installed, it is the
    receiver.
    """
    if quick and full:
        raise click.UsageError("--quick and --full: choose one")
    if full:
        deliveries = deliveries or million.FULL_DELIVERIES
    out = out or (QUICK_RESULTS if quick else RESULTS)
    rounds = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    try:
        if profiled:
            out.mkdir(parents=True, exist_ok=True)
            (out / "profile.svg").write_text(asyncio.run(_profile(quick=quick)), "utf-8")
            return
        sections = {} if quick else kept.read(out)
        rows: list[Row] = []

        def keep(name: str, measured: kept.Measured, files: dict[str, str]) -> None:
            sections[name] = measured
            rows.extend(measured.rows)
            _write(out, sections, files, quick=quick)

        measuring = _measure(only, rounds, keep, quick=quick, dsn=dsn, deliveries=deliveries)
        asyncio.run(measuring)
    except OutboxError as error:
        click.echo(f"bench: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        click.echo(f"bench: interrupted; every section that ended is in {out}", err=True)
        sys.exit(INTERRUPTED)
    if as_json:
        facts = sections[only[-1]].facts
        report = {"machine": facts, "rounds": rounds, "rows": [row.as_json() for row in rows]}
        click.echo(orjson.dumps(report).decode())
    else:
        _print_rows(rows)
    sys.exit(any(row.met is False for row in rows))


async def _measure(
    only: Sequence[str],
    rounds: int,
    keep: Callable[[str, kept.Measured, dict[str, str]], None],
    *,
    quick: bool,
    dsn: str | None,
    deliveries: int | None,
) -> None:
    """Measure each section and store it when it ends, because a run of hours may be interrupted."""
    say = partial(click.echo, err=True)
    async with stage(say, dsn=dsn, deliveries=deliveries) as set_up:
        for name in only:
            rows = await SECTIONS[name](set_up, rounds, quick=quick)
            measured = kept.Measured(tuple(rows), machine(set_up.server_description), rounds)
            keep(name, measured, set_up.files)


def _write(
    out: Path, sections: Mapping[str, kept.Measured], files: Mapping[str, str], *, quick: bool
) -> None:
    """Write table and pictures of all stored and new measurements."""
    out.mkdir(parents=True, exist_ok=True)
    sections = {name: sections[name] for name in SECTIONS if name in sections}
    if not quick:
        kept.write(out, sections)
    (out / "results.md").write_text(table(sections, quick=quick), "utf-8")
    whole = draw([row for each in sections.values() for row in each.rows])
    for name, text in {"results.svg": whole, **files}.items():
        (out / name).write_text(text, "utf-8")


async def _profile(*, quick: bool) -> str:
    async with stage(lambda line: click.echo(line, err=True)) as set_up:
        tree, requests = await profile.measure(set_up, quick=quick)
        return profile.draw(tree, machine(set_up.server_description), requests)


def _print_rows(rows: Sequence[Row]) -> None:
    for row in rows:
        text = f"{row.section}, {row.name}, compared with {row.baseline_name}: "
        if row.missing_reason:
            click.echo(f"{text}not measured: {row.missing_reason}")
            continue
        text += compared(row)
        if row.target is not None:
            text += f"; {target(row)}: {target_result(row).strip('*')}"
        click.echo(text)


if __name__ == "__main__":
    main()

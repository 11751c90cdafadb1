"""The report: one table, and what it was measured on."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import psutil

from benchmarks.commits import find_pgbench
from benchmarks.peers import contestants as peers
from benchmarks.stage import cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from benchmarks.figures import Row, Samples
    from benchmarks.kept import Measured

PACKAGES = ("aiohttp", "asyncpg", "orjson", "uvloop")

TITLES = {
    "deliveries": (
        "Deliveries per second",
        "One relay process draining a backlog over the lanes of one endpoint, beside the bare "
        "aiohttp client sending the same POSTs to the same receiver, as many at a time as there "
        "are lanes.",
    ),
    "peers": (
        "Deliveries per second beside others",
        "Each works off a backlog that was put in before it began, all into one receiver. {peers}",
    ),
    "peers-latency": (
        "Commit to receiver beside others",
        "Milliseconds from sending COMMIT to the request's arrival at the benchmark's own "
        "receiver; one producer for all, with what each one's own client sends, in a transaction "
        "with a domain write. Everybody is asked the same as above, but for:{peers}",
    ),
    "watched": (
        "Deliveries per second while it is watched",
        "Metrics scraped each second, metrics and traces pushed by OTLP, one event of a hundred "
        "traced, the page open, all on this machine; beside the same relay without any of it, in "
        "turns.",
    ),
    "commits": (
        "Commits per second",
        "A producer's transactions, each with a small domain write, with {client}; the relay "
        "sequences. Data on disk, fsync on.",
    ),
    "majors": (
        "Commits per second on each PostgreSQL",
        "The same with sixteen writers, on every major version, each in a server of its own that "
        "is embedded.",
    ),
    "latency": (
        "Commit to receiver",
        "Milliseconds from sending COMMIT to the request's arrival, 8 lanes, beside the sum of a "
        "commit, a notification (COMMIT to callback) and a bare POST; the latter two at once, at "
        "the same rate.",
    ),
    "replays": (
        "Live events beside a replay",
        "Milliseconds from sending COMMIT to the request's arrival while 100,000 dead letters of "
        "the same endpoint are sent again, 8 lanes, beside the same without a replay.",
    ),
    "memory": (
        "Memory",
        "Highest resident size of the relay process, more than that of one with nothing to do.",
    ),
    "million": (
        "Millions of deliveries",
        "One relay, one endpoint of 64 lanes; events are written while they are delivered, with a "
        "bounded backlog. When all are there, some more in turns with as many in a new database, "
        "which has a relay of its own; the last fifth beside the first; the relay's resident size "
        "after the last tenth beside that after the first, and the tables: what is only added to, "
        "when everything was kept long enough, which retention is told to be at once, beside what "
        "it was before; and what is written over, which autovacuum keeps small.",
    ),
    "outage": (
        "After an outage",
        "A receiver answers 503 for 30 s, in which 50,000 events gather; then it is well and takes "
        "20 ms for each. The highest rate is of a tenth of a second, all the while; the time to "
        "recover is from the outage's end to the last delivery; "
        "[outage.svg](outage.svg) shows both. The relay (64 lanes) stands beside clients of the "
        "benchmark's own, because no setting makes the relay retry like that: 64 at a time over "
        "the same transport, each delivery retried by itself, from memory and in no order, after "
        "5 s again and again; after 5 s and then twice as long each time, up to a minute; and "
        "with full jitter on that, which is the relay's policy here, too.",
    ),
    "failover": (
        "Fail-over",
        "Seconds from kill -9 of one of three relays to the first delivery of its lanes by "
        "another, and to the last one's, beside the lease; twenty kills at moments of chance.",
    ),
    "replicas": (
        "What several replicas cost",
        "CPU seconds for 1,000 deliveries to 200 endpoints, of the relay processes and of the "
        "PostgreSQL backends that serve them, beside a single replica's. And the statements that "
        "an idle replica asks for, counted at a proxy, beside its renewal of the lease.",
    ),
    "commands": (
        "Commands",
        "A whole process, from its start to its end, on a million events, ten thousand endpoints "
        "and a hundred thousand dead letters, beside the same command where there is hardly "
        "anything.",
    ),
    "pages": (
        "The page",
        "Milliseconds from the navigation until a view shows what it is for, in chromium, on a "
        "million events, ten thousand endpoints and a hundred thousand dead letters, beside a "
        "database with hardly anything.",
    ),
    "receiving": (
        "Receiving: requests per second",
        "FastAPI with the adapter and an inbox in PostgreSQL, each event verified and processed "
        "once, beside FastAPI that does one INSERT for each request and looks at nothing.",
    ),
    "horizon": (
        "A pinned horizon",
        "500 events a second through one relay, when another session's transaction has been open "
        "for ten minutes of that and keeps every dead row; in turns with a database where there "
        "is none.",
    ),
    "hostile": (
        "Hostile receivers",
        "Milliseconds from sending COMMIT to a good receiver, 8 lanes, 100 events a second, while "
        "the same relay delivers to two hundred endpoints that drip, flood, hang, reset, and send "
        "bombs and forgeries; in turns with a relay without them. And the relay's resident size.",
    ),
    "fair": (
        "Fairness",
        "Milliseconds from sending COMMIT to a quiet endpoint's receiver, 4 lanes, 100 events a "
        "second, while the same relay delivers a flood of events; in turns with nothing else.",
    ),
    "scale": (
        "Scale",
        "CPU seconds for 1,000 deliveries where there is a lot, of the relay and of the PostgreSQL "
        "backends that serve it, beside the same where there is little, in turns.",
    ),
}
"""Of every section: what it is called, and what it says."""
PEERS = {"peers": peers.told, "peers-latency": peers.told_of_latency}
"""What these say of each contestant."""


def machine(postgres: str) -> dict[str, str]:
    """What the figures were measured on; nothing that names the machine."""
    packages = {name: _version(name) for name in PACKAGES}
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cores": str(cores()),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "system": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        "PostgreSQL": postgres,
        **{name: found for name, found in packages.items() if found},
    }


def table(sections: Mapping[str, Measured], *, quick: bool) -> str:
    """Markdown: every figure beside the one that it is compared with."""
    lines = ["# What was measured", ""]
    if quick:
        lines += ["A quick run, with small numbers: it shows that everything works, no more.", ""]
    lines += [
        "Made by `python3 run.py bench`, the contestants in turns; medians, lowest and highest in "
        "brackets. The ratios mean something elsewhere; the absolute figures are the machine's.",
        "",
        *_made(sections),
        "",
        "| what | outbox | beside | | ratio | target | |",
        "|---|--:|---|--:|--:|---|---|",
    ]
    section, rows = "", [row for each in sections.values() for row in each.rows]
    for row in rows:
        if row.section != section:
            section = row.section
            lines.append(f"| **{TITLES[section][0]}** | | | | | | |")
        lines.append(
            f"| {row.name} | {_spread(row.ours, row.unit)} "
            f"| {row.beside_name} | {_beside(row)} "
            f"| {compared(row)} | {target(row)} | {verdict(row)} |"
        )
    lines.append("")
    for each in dict.fromkeys(row.section for row in rows):
        title, what = TITLES[each]
        client = "pgbench (prepared statements)" if find_pgbench() else "asyncpg, a process a core"
        told = PEERS[each]() if each in PEERS else ""
        lines += [f"**{title}.** {what.format(client=client, peers=told)}", ""]
    return "\n".join(lines)


def _made(sections: Mapping[str, Measured]) -> Iterator[str]:
    """When, on what and in how many rounds: the sections that have it in common together."""
    alike: dict[tuple[int, tuple[tuple[str, str], ...]], list[str]] = {}
    for name, each in sections.items():
        alike.setdefault((each.rounds, tuple(each.facts.items())), []).append(name)
    for (rounds, facts), names in alike.items():
        told = "; ".join(f"{name} {value}" for name, value in facts)
        many = "one round" if rounds == 1 else f"{rounds} rounds"
        yield f"- {', '.join(names)} ({many}): {told}."


def compared(row: Row) -> str:
    """The ratio or the difference, with its spread; empty if there is nothing beside it."""
    if row.why_not:
        return ""
    found = row.compared
    if row.relation == "difference":
        return f"+{found.median:.0f} {row.unit}"
    if len(found.values) == 1:
        return f"{found.median:.2f}"
    return f"{found.median:.2f} ({found.low:.2f}-{found.high:.2f})"


def target(row: Row) -> str:
    """What has to be reached; empty if nothing has."""
    if row.target is None:
        return ""
    unit = f" {row.unit} more" if row.relation == "difference" else ""
    return f"{row.target.bound} {row.target.value:g}{unit}"


def verdict(row: Row) -> str:
    """In a word."""
    return {None: "", True: "met", False: "**missed**"}[row.met]


def figure(value: float, unit: str) -> str:
    """A figure with as many digits as mean something."""
    text = f"{value:,.0f}" if value >= 100 or unit == "MB" else f"{value:.2f}"
    return f"{text}{unit}" if unit.startswith("/") else f"{text} {unit}"


def _beside(row: Row) -> str:
    return f"not measured: {row.why_not}" if row.why_not else _spread(row.beside, row.unit)


def _spread(samples: Samples, unit: str) -> str:
    if not samples.values:
        return ""
    if len(samples.values) == 1:
        return figure(samples.median, unit)
    bare = [figure(value, unit).removesuffix(unit).strip() for value in (samples.low, samples.high)]
    return f"{figure(samples.median, unit)} ({'-'.join(bare)})"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

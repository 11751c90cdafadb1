"""The report: one table, and the machine that was measured."""

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
        "One relay process draining a backlog, over the lanes of one endpoint if nothing else is "
        "said, compared with the bare aiohttp client sending the same POSTs to the same receiver, "
        "with as many connections as there are lanes.",
    ),
    "peers": (
        "Deliveries per second, compared with other systems",
        "Each system delivers a backlog that was written before it started, into one "
        "receiver. {peers}",
    ),
    "peers-latency": (
        "Commit to receiver, compared with other systems",
        "Milliseconds from sending COMMIT to the request's arrival at the benchmark's own "
        "receiver; one producer for all, with the enqueue statement of each client, in a "
        "transaction with a domain write. The modes are those above, except for:{peers}",
    ),
    "cost": (
        "What each delivery costs",
        "CPU time of all of PostgreSQL's processes and of who delivers, and bytes of WAL; "
        "[cost.md](cost.md) also has bytes on disk, rows and fsyncs. A queue without fan-out gets "
        "a job for each delivery. The floor is a loop that reads by id and inserts a row for each "
        "delivery; it loses events, so nobody can use it.",
    ),
    "formats": (
        "Deliveries per second by format",
        "The same backlog in each message format, compared with the envelope, alternating.",
    ),
    "brokers": (
        "Messages per second into brokers",
        "A backlog appended to streams of Valkey and NATS JetStream, servers on this machine, "
        "compared with a bare loop of the client library in the same safe form: each append names "
        "the message before it.",
    ),
    "watched": (
        "Deliveries per second with monitoring",
        "Metrics scraped each second, metrics and traces pushed by OTLP, one event in a hundred "
        "traced, the web page open, all on this machine; compared with the same relay without "
        "monitoring, alternating.",
    ),
    "api": (
        "Deliveries beside clients of the API",
        "A backlog is delivered over 4 lanes of each of 4 endpoints, while clients list 50 events "
        "at a time, each as fast as it reads the responses and its token's rate allows; compared "
        "with the same relay and no client, alternating. CPU seconds are for 1,000 deliveries; "
        "PostgreSQL's are those of the whole server. And the imported modules and the resident "
        "size of an idle relay.",
    ),
    "shares": (
        "The API beside a hostile tenant",
        "One tenant repeats costly requests with 30 or 60 clients, while another tenant and the "
        "operator repeat one request each; p99 of their times, with the hostile tenant compared "
        "with none, and with a process that only computes. The installation has 61,440 lanes, all "
        "of the hostile tenant, and 500,000 events.",
    ),
    "flood": (
        "Events beside tenants that flood",
        "A tenant publishes four events a second through the API, while one or ten others, with "
        "100 endpoints each, send requests of 1,000 events without a pause; the time from its "
        "request to its receiver, compared with the same alone, and beside a process that only "
        "computes.",
    ),
    "commits": (
        "Commits per second",
        "A producer's transactions, each with a small domain write, with {client}; the relay "
        "sequences. Data on disk, fsync on.",
    ),
    "publishing": (
        "Events published per second",
        "Through each driver on one connection, in transactions of one event or of a hundred by "
        "`publish_many`, compared with the driver's own INSERT of one row in a transaction; no "
        "relay. SQLAlchemy's AsyncSession is on asyncpg, its others and Django on psycopg. Data on "
        "disk, fsync on.",
    ),
    "majors": (
        "Commits per second on each PostgreSQL",
        "The same with sixteen writers, on every major version, each in an embedded server of its "
        "own.",
    ),
    "latency": (
        "Commit to receiver",
        "Milliseconds from sending COMMIT to the request's arrival, 8 lanes, compared with the sum "
        "of a commit, a notification (COMMIT to callback) and a bare POST; the latter two "
        "concurrently, at the same rate.",
    ),
    "replays": (
        "Live events beside a replay",
        "Milliseconds from sending COMMIT to the request's arrival while 100,000 dead letters of "
        "the same endpoint are replayed, 8 lanes, compared with no replay.",
    ),
    "feeding": (
        "Live events beside a feed",
        "Milliseconds from sending COMMIT to the request's arrival while endpoints that begin at "
        "the oldest event are fed a million earlier ones, compared with no feed; what is fed "
        "meanwhile, and while nothing is live; and after how long an endpoint subscribes.",
    ),
    "memory": (
        "Memory",
        "Peak resident size of the relay process, minus that of an idle relay.",
    ),
    "million": (
        "Millions of deliveries",
        "One relay, one endpoint of 64 lanes; events are written while they are delivered, with a "
        "bounded backlog. Afterwards, further deliveries alternate with as many in a new database "
        "with its own relay; the last fifth is compared with the first; the relay's resident size "
        "after the last tenth with that after the first; the append-only tables after retention "
        "(with a period length of zero) with their size before; and the updated tables, which "
        "autovacuum keeps small, with a bound.",
    ),
    "outage": (
        "After an outage",
        "A receiver responds 503 for 30 s while 50,000 events are published; then it takes 20 ms "
        "per request. The highest rate is that of a tenth of a second over the whole run; the "
        "time to recover is from the end of the outage to the last delivery; "
        "[outage.svg](outage.svg) shows both. The relay (64 lanes) is compared with clients of the "
        "benchmark, because no setting makes the relay retry like them: 64 at a time over the same "
        "transport, each delivery retried individually, from memory and unordered, at a fixed "
        "interval of 5 s; with exponential back-off from 5 s to a minute; and with full jitter on "
        "that, which is the relay's retry policy here, too. The relay runs a second time with an "
        "operator who pauses the endpoint after a third of the outage and resumes it after two "
        "thirds.",
    ),
    "failover": (
        "Failover",
        "Seconds from kill -9 of one of three relays to the first delivery of its lanes by "
        "another relay, and to the last one, compared with the lease; twenty kills at random "
        "times.",
    ),
    "replicas": (
        "What several replicas cost",
        "CPU seconds for 1,000 deliveries to 200 endpoints, of the relay processes and of the "
        "PostgreSQL backends that serve them, compared with a single replica. And the statements "
        "of an idle replica, counted at a proxy, compared with its lease renewals.",
    ),
    "commands": (
        "Commands",
        "A whole process, from its start to its end, on a million events, ten thousand endpoints "
        "and a hundred thousand dead letters, compared with the same command on an almost empty "
        "database.",
    ),
    "reads": (
        "Reads on ten million deliveries",
        "Milliseconds on a warm connection, medians of 20 in each round, compared with a bound of "
        "100 ms. Forty endpoints of eight lanes; four fifths of the deliveries are of a drain, the "
        "rest of a steady load. A search that matches nothing ends after 20,000 deliveries.",
    ),
    "pages": (
        "The page",
        "Milliseconds from the navigation until a view shows its content, in chromium, on a "
        "million events, ten thousand endpoints and a hundred thousand dead letters, compared with "
        "an almost empty database.",
    ),
    "receiving": (
        "Receiving: requests per second",
        "FastAPI with the adapter and an inbox in PostgreSQL, each event verified and processed "
        "once, compared with FastAPI and one INSERT per request without verification.",
    ),
    "cursors": (
        "Events that ways of tailing a table lose or invert",
        "24 writers in transactions that take an id early, stay open, or roll back; three readers "
        "tail the same table. By the greatest id: what is above the last id. By the horizon: what "
        "is older than each open transaction, in the order of the transactions. Out of order: "
        "after a later event of the same key, whose row the writers lock.",
    ),
    "horizon": (
        "A pinned horizon",
        "500 events a second through one relay, after another session's transaction has been open "
        "for ten minutes and prevents the removal of dead rows; alternating with a database "
        "without such a transaction.",
    ),
    "hostile": (
        "Hostile receivers and clients",
        "Milliseconds from sending COMMIT to a good receiver, 8 lanes, 100 events a second, while "
        "the same relay delivers to two hundred endpoints that drip, flood, hang, reset, and send "
        "compression bombs and forgeries; six hundred clients send half-requests, dripping bodies "
        "and costly bodies to its listeners; and a role without rights sends 20,000 notifications "
        "a second on its channels. Alternating with a relay without them. The response time of "
        "`/healthz` on a new connection, the relay's resident size, and deliveries per second of a "
        "backlog with the notifications alone.",
    ),
    "keepalive": (
        "Requests that meet the close of an idle connection",
        "Servers of other projects close connections that were idle for a second; 1,200 requests "
        "to each are timed around that moment, over 60 connections of the relay's transport. A "
        "failed one would count as an attempt and wait for the back-off. One that is sent again on "
        "a new connection does not, and receivers recognize it.",
    ),
    "exchanges": (
        "Exchanges",
        "Requests in sequence, with the relay's transport, to servers that send head and body "
        "apart, compared with 5 ms for each: a delayed acknowledgement takes 40 ms. And "
        "the median request on a new TLS connection that resumes a session, compared with one that "
        "makes a full handshake, alternating.",
    ),
    "fair": (
        "Fairness",
        "Milliseconds from sending COMMIT to a quiet endpoint's receiver, 4 lanes, 100 events a "
        "second, while the same relay delivers a flood of events; alternating with no other load.",
    ),
    "scale": (
        "Scale",
        "CPU seconds for 1,000 deliveries with a lot of data, of the relay and of the PostgreSQL "
        "backends that serve it, compared with little data, alternating. Connections belong to one "
        "endpoint, so where all of 10,000 endpoints get something, each delivery opens one; the "
        "same holds for each of 100,000 lanes.",
    ),
}
"""The title and the text of every section."""
PEERS = {"peers": peers.descriptions, "peers-latency": peers.latency_description}
"""Sections with a text for each contestant."""


def machine(postgres: str) -> dict[str, str]:
    """Describe the machine, without anything that identifies it."""
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
    """Return the Markdown table: every figure with its comparison."""
    lines = ["# What was measured", ""]
    if quick:
        lines += ["A quick run, with small numbers: it shows that everything works, no more.", ""]
    lines += [
        "Made by `python3 run.py bench`, the contestants in turns; medians, lowest and highest in "
        "brackets. Ratios are comparable between machines; absolute figures are of this machine.",
        "",
        *_made(sections),
        "",
        "| what | outbox | baseline | | ratio | target | |",
        "|---|--:|---|--:|--:|---|---|",
    ]
    section, rows = "", [row for each in sections.values() for row in each.rows]
    for row in rows:
        if row.section != section:
            section = row.section
            lines.append(f"| **{TITLES[section][0]}** | | | | | | |")
        lines.append(
            f"| {row.name} | {spread(row.ours, row.unit)} "
            f"| {row.baseline_name} | {_baseline(row)} "
            f"| {compared(row)} | {target(row)} | {target_result(row)} |"
        )
    lines.append("")
    for each in dict.fromkeys(row.section for row in rows):
        title, what = TITLES[each]
        client = "pgbench (prepared statements)" if find_pgbench() else "asyncpg, a process a core"
        described = PEERS[each]() if each in PEERS else ""
        lines += [f"**{title}.** {what.format(client=client, peers=described)}", ""]
    return "\n".join(lines)


def _made(sections: Mapping[str, Measured]) -> Iterator[str]:
    """Describe date, machine and rounds, grouped by the sections that share them."""
    alike: dict[tuple[int, tuple[tuple[str, str], ...]], list[str]] = {}
    for name, each in sections.items():
        alike.setdefault((each.rounds, tuple(each.facts.items())), []).append(name)
    for (rounds, facts), names in alike.items():
        described = "; ".join(f"{name} {value}" for name, value in facts)
        many = "one round" if rounds == 1 else f"{rounds} rounds"
        yield f"- {', '.join(names)} ({many}): {described}."


def compared(row: Row) -> str:
    """Return the ratio or the difference, with its spread; empty without a comparison."""
    if row.missing_reason:
        return ""
    found = row.compared
    if row.relation == "difference":
        return f"+{found.median:.0f} {row.unit}"
    if len(found.values) == 1:
        return f"{found.median:.2f}"
    return f"{found.median:.2f} ({found.low:.2f}-{found.high:.2f})"


def target(row: Row) -> str:
    """Return the target; empty without one."""
    if row.target is None:
        return ""
    unit = f" {row.unit} more" if row.relation == "difference" else ""
    return f"{row.target.bound} {row.target.value:g}{unit}"


def target_result(row: Row) -> str:
    """Whether the target is met, in one word."""
    return {None: "", True: "met", False: "**missed**"}[row.met]


def figure(value: float, unit: str) -> str:
    """Format a figure with its significant digits."""
    text = f"{value:,.0f}" if value >= 100 or unit == "MB" else f"{value:.2f}"
    return f"{text}{unit}" if unit.startswith("/") else f"{text} {unit}".rstrip()


def _baseline(row: Row) -> str:
    return (
        f"not measured: {row.missing_reason}"
        if row.missing_reason
        else spread(row.baseline, row.unit)
    )


def spread(samples: Samples, unit: str) -> str:
    """Format the median, with the lowest and the highest in brackets."""
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

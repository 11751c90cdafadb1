"""The contestants, their modes, and what each one does and does not do."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from benchmarks.client import sample
from benchmarks.figures import Target
from benchmarks.peers.counting import receiver_name
from benchmarks.peers.installing import NODE, node_and_packages, pins, python_packages
from benchmarks.stage import program

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from benchmarks.stage import Child
    from tests.support.postgres import Database

HERE = Path(__file__).parent
PAYLOAD_BYTES = 200
BODY = sample(PAYLOAD_BYTES)[1].decode()
"""The body of one of our deliveries, which the others store and send, too."""
NUMBER = "12345"
"""The placeholder for the event's number in the body."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A queue, and a program that works it off by POSTs.

    Attributes:
        program: its script in this directory; .py for Python, .cjs for Node.
        jobs: the size of a backlog that takes some seconds.
        draining: its mode for the backlog measurement.
        at_once: its mode for the latency measurement.
        asked: the description of what it does, and what it does not do.
        soon: the description of the differences for latency.
        packages: its packages; the version of the first one is shown.
        target: the required ratio of our deliveries per second to its own.
    """

    title: str
    program: str
    jobs: int
    draining: Mapping[str, Any]
    at_once: Mapping[str, Any]
    asked: str
    soon: str
    packages: tuple[str, ...] = ()
    target: Target | None = None

    @property
    def name(self) -> str:
        """The name in the table."""
        return f"{self.title} {pins()[self.packages[0]]}" if self.packages else self.title

    def prepared(self) -> tuple[list[str], dict[str, str]]:
        """Install everything, and return the command and its environment.

        Raises:
            CannotRun: A package is unavailable.
        """
        path = HERE / self.program
        if path.suffix == ".cjs":
            node, packages = node_and_packages()
            return [str(node), str(path)], {"NODE_PATH": str(packages)}
        words = [sys.executable, "-m", "benchmarks.peers", path.stem]
        if not self.packages:
            return words, {}
        paths = [str(python_packages(self.packages)), os.environ.get("PYTHONPATH", "")]
        return words, {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@dataclass(slots=True)
class Working:
    """A contestant's process, which has written its backlog."""

    process: Child
    statement: str = ""
    values: list[Any] = field(default_factory=list)

    def begin(self) -> None:
        """Start to work off the backlog."""
        self.process.send_command(begin=True)


@asynccontextmanager
async def ready(
    contestant: Contestant,
    database: Database,
    url: str,
    *,
    jobs: int,
    mode: Mapping[str, Any],
) -> AsyncIterator[Working]:
    """Run the contestant's process for a block, until it is ready.

    Raises:
        CannotRun: A package is unavailable, or the process ended.
    """
    argv, env = await asyncio.to_thread(contestant.prepared)  # It may have to fetch packages.
    asked = {"dsn": database.dsn, "url": url, "body": BODY, "jobs": jobs, "mode": dict(mode)}
    async with program(contestant.title, [*argv, orjson.dumps(asked).decode()], env=env) as process:
        ready_line = await process.response()
        yield Working(process, ready_line["statement"], ready_line["values"])


OURS = (
    "64 lanes of one endpoint, each in order and one delivery at a time; every delivery signed "
    "and numbered, every attempt written to the log, with fan-out to endpoints."
)
BARE = (
    "the relay's POSTs with all headers, over as many connections, on uvloop; it reads no "
    "database, signs nothing, and writes nothing."
)


def _graphile_worker(queued: int) -> dict[str, Any]:
    """The preset of graphile-worker."""
    return {
        "worker": {
            "concurrentJobs": 64,
            "maxPoolSize": 10,
            "localQueue": {"size": queued},
            "completeJobBatchDelay": 250,
            "failJobBatchDelay": 250,
        }
    }


# The values in comments were tried, too, on two busy cores: the chosen values were the best by
# deliveries per second or by latency, or, where these were equal, by CPU time.
CONTESTANTS = (
    Contestant(
        "graphile-worker",
        "graphile_worker.cjs",
        jobs=100_000,
        # size: 65, 500; delays: 0.
        draining=_graphile_worker(queued=1000),
        # size: 65, and none; delays: 0; maxPoolSize: 25.
        at_once=_graphile_worker(queued=500),
        asked="64 jobs at a time over 64 connections (undici), batched in both ways that its page "
        "on performance names: a local queue, of 1,000, and completion, after 250 ms. A finished "
        "job is deleted. Not in order, not signed, no log of attempts, no fan-out.",
        soon="a local queue of 500.",
        packages=("graphile-worker",),
        target=Target("at least", 1.4),
    ),
    Contestant(
        "PgQueuer",
        "with_pgqueuer.py",
        jobs=15_000,
        # batch_size: 64, 100, 250, 2000, and 10 with 5 managers as its own benchmark has it;
        # connections: 100.
        draining={"connections": 64, "managers": 1, "batch_size": 1000},
        # batch_size: 10, 1000, and 10 with 5 managers.
        at_once={"connections": 64, "managers": 1, "batch_size": 100},
        asked="asyncpg, batches of 1,000, aiohttp on uvloop over 64 connections, autovacuum as it "
        "advises, all tables durable. A row in its log for each change of a job's state. Not in "
        "order, as a task is made of each job at once; not signed, no fan-out.",
        soon="batches of 100.",
        packages=("pgqueuer",),
        target=Target("at least", 5.0),
    ),
    Contestant(
        "pg-boss",
        "pg_boss.cjs",
        jobs=15_000,
        draining={
            "connections": 64,
            "instance": {},
            "queue": {},
            # batchSize: 64, 100, 1000; localConcurrency: 1, 2, 8.  It ignores what its page
            # on jobs says of not sorting them.
            "work": {"batchSize": 250, "localConcurrency": 4, "burstWhenBatchFull": True},
        },
        at_once={
            "connections": 64,
            "instance": {"useListenNotify": True},
            "queue": {"notify": True},
            # batchSize: 10, 250; localConcurrency: 1, 8.
            "work": {"batchSize": 64, "localConcurrency": 4, "burstWhenBatchFull": True},
        },
        asked="four workers in a process with batches of 250, the next one at once while they are "
        "full, 64 connections (undici). A batch is finished, or fails, as a whole; a finished job "
        "stays for a week. Not in order, not signed, no log of attempts, no fan-out.",
        soon="batches of 64, and NOTIFY wakes its workers.",
        packages=("pg-boss",),
    ),
    Contestant(
        "procrastinate",
        "with_procrastinate.py",
        jobs=1_200,
        # concurrency: 30, as its documentation has it.
        draining={"concurrency": 64, "pooled": 65, "delete_jobs": "successful"},
        at_once={"concurrency": 64, "pooled": 65, "delete_jobs": "successful"},
        asked="one worker, 64 jobs at a time, a connection for each and one more (psycopg in C), "
        "aiohttp on uvloop, finished jobs deleted. Each job is fetched and finished individually. "
        "Ordered only where jobs share a lock, not signed, no fan-out.",
        soon="the same.",
        packages=("procrastinate", "psycopg"),
    ),
    Contestant(
        "a plain loop",
        "plain_loop.py",
        jobs=4_000,
        draining={"poll_s": 0.01},
        at_once={"poll_s": 0.01},
        asked="SELECT the oldest unsent event, POST, UPDATE; asyncpg, aiohttp and uvloop. In "
        "order, one at a time; not signed, no log, no fan-out, a single instance.",
        soon="it polls every 10 ms when idle.",
    ),
)


def descriptions() -> str:
    """Describe each contestant, with what it does not do and its version, for the report."""
    lines = [
        f"The receiver is {receiver_name()}. Node is {pins()[NODE]}, undici {pins()['undici']}, "
        f"psycopg {pins()['psycopg']}.",
        "",
        f"- outbox: {OURS}",
        f"- bare aiohttp client: {BARE}",
        *(f"- {each.name}: {each.asked}" for each in CONTESTANTS),
    ]
    return "\n".join(lines)


def latency_description() -> str:
    """Describe the differences of each mode for latency, for the report."""
    return "\n".join(["", "", *(f"- {each.name}: {each.soon}" for each in CONTESTANTS)])

"""Latency of operator commands on a database with a large history, compared with a small one.

Every command is a process of its own, as for an operator. With a million events, ten thousand
endpoints and a hundred thousand dead letters, a command should take at most twice as long as on an
almost empty database; so each must look up its rows and scan nothing else.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from benchmarks import history
from benchmarks.figures import Rounds, Row, Target
from benchmarks.history import LARGE, QUICK, SMALL
from benchmarks.stage import search
from outbox.core.model.ids import delivery_id
from outbox.errors import CannotRun
from outbox.store.retention.partitions import PartitionStore
from tests.support.process import command_line, environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.history import Past
    from benchmarks.stage import Stage
    from tests.support.postgres import Database

TARGET = Target("at most", 2.0)
EVENT = 57
"""An event in both databases, which was delivered."""
DEAD_EVENT = 50
"""An event in both databases, which was refused."""

COMMANDS: dict[str, tuple[str, ...]] = {
    "status": ("status",),
    "endpoint list, 10 rows": ("endpoint", "list", "--limit", "10"),
    "endpoint show": ("endpoint", "show", "e7"),
    "trace, event id": ("trace", f"{EVENT:032x}"),
    "trace, X-Delivery": ("trace", "DELIVERY"),
    "trace, once key": ("trace", f"order-{EVENT}"),
    "trace, key": ("trace", f"k{EVENT // 2}"),
    "trace, outbox id of a dead one": ("trace", str(DEAD_EVENT + 1)),
    "dead list, 10 rows": ("dead", "list", "--limit", "10"),
    "dead list of an endpoint": ("dead", "list", "--endpoint", "e0", "--limit", "10"),
    "dead show": ("dead", "show", "3"),
    "dead count of an endpoint": ("dead", "count", "--endpoint", "e0"),
    "dead count": ("dead", "count", "--reason", "refused", "--since", "1h"),
    "dead replay, dry run": ("dead", "replay", "--endpoint", "e0", "--dry-run"),
    "replay, dry run": ("replay", "--endpoint", "e7", "--since", "1h", "--dry-run"),
    "replay list": ("replay", "list"),
    "schedule list": ("schedule", "list"),
    "once list, 10 rows": ("once", "list", "--limit", "10"),
    "once show": ("once", "show", f"order-{EVENT}"),
    "erase of a key, dry run": ("erase", "--key", f"k{EVENT // 2}", "--dry-run"),
    "doctor": ("doctor", "--no-probe"),
}


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run each command on both databases, alternating."""
    return await run(stage, rounds, QUICK if quick else LARGE)


async def run(stage: Stage, rounds: int, past: Past) -> list[Row]:
    """Run with another history."""
    ours, baseline = Rounds(), Rounds()
    async with stage.server.database() as large, stage.server.database() as small:
        words_of: dict[str, dict[str, tuple[str, ...]]] = {}
        for database, what in ((small, SMALL), (large, past)):
            stage.say(f"commands: writing {what.events:,} events of {what.endpoints:,} endpoints")
            words_of[database.name] = await _prepare(stage, database, what)
        for number in range(rounds):
            for name in COMMANDS:
                for database, samples in ((small, baseline), (large, ours)):
                    took_ms = await _run(database, words_of[database.name][name])
                    samples.add(name, took_ms)
            stage.say(f"commands, round {number + 1} of {rounds}")
    return [
        Row(
            "commands",
            name,
            "ms",
            ours.samples_of(name),
            f"{SMALL.events} events, {SMALL.endpoints} endpoints",
            baseline.samples_of(name),
            target=TARGET,
        )
        for name in COMMANDS
    ]


async def _prepare(stage: Stage, database: Database, past: Past) -> dict[str, tuple[str, ...]]:
    """Fill the database and return the commands to run on it."""
    async with search(database) as connection:
        await history.write(connection, stage.urls["http"], past)
        # As after maintenance by a relay.
        await PartitionStore(connection).summarize()
        row = await connection.fetchrow(
            "SELECT endpoint_id FROM delivery JOIN lane ON lane.id = lane_id WHERE outbox_id = $1",
            EVENT + 1,
        )
        event_id = await connection.fetchval("SELECT event_id FROM outbox WHERE id = $1", EVENT + 1)
    delivery = str(delivery_id(row["endpoint_id"], EVENT + 1, event_id))
    return {
        name: tuple(delivery if word == "DELIVERY" else word for word in words)
        for name, words in COMMANDS.items()
    }


async def _run(database: Database, words: Sequence[str]) -> float:
    """Return the milliseconds until the command exits.

    Raises:
        CannotRun: The command failed.
    """
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *command_line(*words),
        env=environment({"OUTBOX_DSN": database.dsn}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    took_ms = (time.perf_counter() - began) * 1000
    # The doctor reports that no relay runs.
    if process.returncode not in (0, 1):
        raise CannotRun(f"outbox {' '.join(words)}: {errors.decode().strip()}")
    return took_ms

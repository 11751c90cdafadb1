"""Commits per second of a producer: the cost of the outbox for its writers.

Every transaction also does a small domain write. The contestants differ only in the event: none, as
without an outbox; an INSERT of the same row into the same indexes, with the trigger disabled and no
relay; the outbox as it is, with a relay that sequences; and the same with a trigger that notifies
in every transaction. To attribute the cost, the trigger is also measured without a relay: once with
the flag "awake", and once with "asleep", which a relay that was killed while asleep leaves behind
for a minute.

No endpoint subscribes, so that the producers and the sequencer have all cores. The data is on disk:
NOTIFY makes commits queue behind one lock, which is held as long as the disk takes.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.figures import Rounds, Row, Target
from benchmarks.producer import ACCOUNTS, FILLER
from benchmarks.stage import child, cores, search
from outbox.errors import CannotRun
from tests.support.process import environment

if TYPE_CHECKING:
    from benchmarks.stage import Stage
    from tests.support.postgres import Database, Server

MANY = 16
WRITERS = (1, MANY)
OF_PLAIN, OF_NOTIFYING = Target("at least", 0.85), Target("at least", 2.8)
"""With many writers: the contestants without a trigger, and those that always notify."""
SECONDS, QUICK_SECONDS = 4.0, 1.0

MAKE_ACCOUNTS = f"""
CREATE TABLE public.account (id integer PRIMARY KEY, balance bigint NOT NULL)
  WITH (fillfactor = 50);
INSERT INTO public.account SELECT n, 0 FROM generate_series(1, {ACCOUNTS}) AS n;
ANALYZE public.account;
"""

PGBENCH_DOMAIN = f"""\\set id random(1, {ACCOUNTS})
BEGIN;
UPDATE account SET balance = balance + 1 WHERE id = :id;
{{event}}END;
"""
PGBENCH_EVENT = f"""INSERT INTO relay.outbox (type, key, payload)
VALUES ('order.paid', 'order-' || :id::int,
        jsonb_build_object('n', :id::int, 'filler', '{FILLER}'));
"""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A writer, its statement and its database."""

    name: str
    event: bool = True
    relay: bool = False
    alter: str = ""


DOMAIN = Contestant("no outbox at all", event=False)
PLAIN = Contestant(
    "INSERT without trigger or relay", alter="ALTER TABLE outbox DISABLE TRIGGER notify_relay"
)
TRIGGER = Contestant("trigger alone, relay awake")
ASLEEP = Contestant(
    "trigger alone, relay asleep",
    alter="SELECT setval('wakeup', extract(epoch FROM now())::bigint + 86400)",
)
OURS = Contestant("the outbox", relay=True)
NOTIFYING = Contestant(
    "NOTIFY in every transaction",
    relay=True,
    alter="""
    DROP TRIGGER notify_relay ON outbox;
    CREATE TRIGGER notify_relay AFTER INSERT ON outbox
        FOR EACH STATEMENT EXECUTE FUNCTION notify_relay();
    """,
)
CONTESTANTS = (DOMAIN, PLAIN, TRIGGER, ASLEEP, OURS, NOTIFYING)


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run all contestants alternately, with one writer and with many."""
    async with stage.durable() as server:
        return await run(stage, server, rounds, WRITERS, QUICK_SECONDS if quick else SECONDS)


async def run(
    stage: Stage, server: Server, rounds: int, many: tuple[int, ...], seconds: float
) -> list[Row]:
    """Run with other numbers."""
    rows: list[Row] = []
    for writers in many:
        title = f"commits, {_writers(writers)}"
        found = await in_turns(stage, server, rounds, CONTESTANTS, writers, seconds, title)
        many_writers = writers > 1
        for ours, baseline, target in (
            (OURS, PLAIN, OF_PLAIN if many_writers else Target("at least", 0.8)),
            (OURS, NOTIFYING, OF_NOTIFYING if many_writers else None),
            (OURS, DOMAIN, None),
            (TRIGGER, PLAIN, None),
            (ASLEEP, PLAIN, None),
        ):
            rows.append(
                Row(
                    "commits",
                    _writers(writers) + ("" if ours is OURS else f", {ours.name}"),
                    "/s",
                    found.samples_of(ours.name),
                    baseline.name,
                    found.samples_of(baseline.name),
                    target=target,
                )
            )
    return rows


async def in_turns(
    stage: Stage,
    server: Server,
    rounds: int,
    contestants: tuple[Contestant, ...],
    writers: int,
    seconds: float,
    title: str,
) -> Rounds:
    """Return the commits per second of each contestant, round by round."""
    found = Rounds()
    for number in range(rounds):
        for each in contestants:
            found.add(each.name, await commits(stage, server, each, writers, seconds))
        last = ", ".join(f"{name} {values[-1]:,.0f}/s" for name, values in found.values.items())
        stage.say(f"{title}, round {number + 1} of {rounds}: {last}")
    return found


async def commits(
    stage: Stage, server: Server, who: Contestant, writers: int, seconds: float
) -> float:
    """Run one turn in a database of its own."""
    async with server.database() as database, AsyncExitStack() as stack:
        async with search(database) as connection:
            await connection.execute(MAKE_ACCOUNTS)
            if who.alter:
                await connection.execute(who.alter)
        if who.relay:
            await stack.enter_async_context(stage.relay(database))
        if (pgbench := find_pgbench()) is not None:
            return await _pgbench(stage, pgbench, database, who, writers, seconds)
        words = ("--what", "event" if who.event else "domain", "--seconds", seconds)
        # One process per core: a single process would be the bottleneck.
        shares = [len(range(n, writers, cores())) for n in range(min(writers, cores()))]
        children = [
            await stack.enter_async_context(
                child("producer", database.dsn, *words, "--writers", share)
            )
            for share in shares
        ]
        return sum([float((await each.response())["per_s"]) for each in children])


def find_pgbench() -> str | None:
    """Find pgbench next to the given PostgreSQL, or on the path."""
    where = os.environ.get("OUTBOX_PG_BIN")
    return (where and shutil.which("pgbench", path=where)) or shutil.which("pgbench")


async def _pgbench(
    stage: Stage, pgbench: str, database: Database, who: Contestant, writers: int, seconds: float
) -> float:
    script = stage.write(
        "pgbench.sql", PGBENCH_DOMAIN.format(event=PGBENCH_EVENT if who.event else "")
    )
    process = await asyncio.create_subprocess_exec(
        pgbench,
        *("--no-vacuum", "--protocol=prepared", f"--file={script}"),
        *(f"--client={writers}", f"--jobs={min(writers, cores())}"),
        f"--time={max(round(seconds), 1)}",
        database.dsn,
        env=environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found = re.search(rb"^tps = ([0-9.]+)", out, re.MULTILINE)
    if process.returncode or found is None:
        raise CannotRun(f"pgbench failed: {err.decode(errors='replace').strip()[-300:]}")
    return float(found[1])


def _writers(number: int) -> str:
    return "1 writer" if number == 1 else f"{number} writers"

"""What ways of tailing a table lose, or return in another order, under adversarial writers.

Ids come from a sequence, so a smaller id may be committed later. Three readers tail the same table:

* by the greatest id: read what is above the last id;
* by the horizon: read what is older than each open transaction, in the order of the transactions;
* outbox: its relay, as far as its receiver.

The writers lock the row of a key, count in it, and publish the number: so the order of each key is
known. Some take a transaction id long before they publish, some stay open afterwards, and a tenth
of them roll back.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Rounds, Row, Target
from benchmarks.stage import add_endpoint, search

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from asyncpg import Connection

    from benchmarks.stage import Stage
    from tests.support.postgres import Database

WRITERS, KEYS, LANES = 24, 40, 16
TRANSACTIONS, QUICK_TRANSACTIONS = 400, 10
"""Of each writer."""
EVENTS_MAX = 3
ROLLED_BACK, EARLY, OPEN = 0.1, 0.3, 0.3
"""Shares of the transactions."""
WAIT_S, LONG_S, LONG = 0.02, 0.5, 0.02
"""How long a transaction is open, at most, and a share that is open for longer."""
POLL_S, SETTLE_S = 0.005, 2.0
NONE = Target("at most", 0)

MAKE_COUNTERS = f"CREATE TABLE counter AS SELECT key, 0 AS n FROM generate_series(1, {KEYS}) AS key"
COUNT = "UPDATE counter SET n = n + 1 WHERE key = $1 RETURNING n"
PUBLISH = """
INSERT INTO outbox (type, key, payload)
VALUES ('cursor.test', $1::int::text, jsonb_build_object('n', $1::int || ':' || $2::int))
"""
BY_GREATEST_ID = """
SELECT id, payload->>'n' AS n FROM outbox WHERE id > $1 ORDER BY id
"""
# The ids of transactions have not wrapped around on a new server, and there are no savepoints.
BY_HORIZON = """
SELECT id, xmin::text::bigint AS xid, payload->>'n' AS n
  FROM outbox
 WHERE (xmin::text::bigint, id) > ($1, $2)
   AND xmin::text::bigint < pg_snapshot_xmin(pg_current_snapshot())::text::bigint
 ORDER BY xid, id
"""


@dataclass(frozen=True, slots=True)
class Transaction:
    """What a writer does in a transaction."""

    key: int
    events: int
    early_s: float
    """How long it has an id before it publishes."""
    open_s: float
    """How long it is open afterwards."""
    commits: bool


def plan(chance: random.Random, transactions: int) -> list[Transaction]:
    """Return the transactions of a writer."""

    def wait_s(share: float) -> float:
        if chance.random() >= share:
            return 0.0
        return LONG_S if chance.random() < LONG else chance.random() * WAIT_S

    return [
        Transaction(
            chance.randint(1, KEYS),
            chance.randint(1, EVENTS_MAX),
            wait_s(EARLY),
            wait_s(OPEN),
            chance.random() >= ROLLED_BACK,
        )
        for _ in range(transactions)
    ]


def lost_and_inverted(read: Iterable[str], committed: int) -> tuple[int, int]:
    """Return how many events were not read, and how many after a later one of their key."""
    newest: dict[str, int] = {}
    seen: set[str] = set()
    inverted = 0
    for each in read:
        key, number = each.split(":")
        inverted += int(number) < newest.get(key, 0)
        newest[key] = max(int(number), newest.get(key, 0))
        seen.add(each)
    return committed - len(seen), inverted


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run the writers with all three readers in each round."""
    return await run(stage, rounds, QUICK_TRANSACTIONS if quick else TRANSACTIONS)


async def run(stage: Stage, rounds: int, transactions: int) -> list[Row]:
    """Run with another number of transactions for each writer."""
    found = Rounds()
    for number in range(rounds):
        seed = random.randrange(10**6)
        plans = [plan(random.Random(seed + n), transactions) for n in range(WRITERS)]
        committed = sum(each.events for each_plan in plans for each in each_plan if each.commits)
        found.add("committed", committed)
        for reader, read in (await _race(stage, plans, committed)).items():
            lost, inverted = lost_and_inverted(read, committed)
            found.add(f"{reader}: lost", lost)
            found.add(f"{reader}: out of order within a key", inverted)
            stage.say(
                f"cursors, round {number + 1} of {rounds}, seed {seed}, {reader}: of "
                f"{committed:,} events {lost:,} lost, {inverted:,} out of order"
            )
    committed_each = found.samples_of("committed")
    return [
        Row(
            "cursors",
            name,
            "events",
            found.samples_of(name),
            "committed",
            committed_each,
            target=NONE if name.startswith("outbox") else None,
        )
        for name in found.values
        if name != "committed"
    ]


async def _race(
    stage: Stage, plans: Sequence[Sequence[Transaction]], committed: int
) -> dict[str, list[str]]:
    """Run the writers; returns what each reader has read, in its order."""
    async with stage.server.database() as database, search(database) as connection:
        await connection.execute(MAKE_COUNTERS)
        await add_endpoint(connection, stage.urls["http"], lanes=LANES)
        stage.expect(committed, keep=True)
        async with (
            stage.relay(database),
            _reading(database, _by_greatest_id) as greatest,
            _reading(database, _by_horizon) as horizon,
        ):
            async with asyncio.TaskGroup() as group:
                for each in plans:
                    group.create_task(_write(database, each))
            arrived: dict[str, Any] = (await stage.receiver.response())["arrived"]
            await asyncio.sleep(SETTLE_S)
    return {"outbox": list(arrived), "by the greatest id": greatest, "by the horizon": horizon}


async def _write(database: Database, transactions: Sequence[Transaction]) -> None:
    async with search(database) as connection:
        for each in transactions:
            transaction = connection.transaction()
            await transaction.start()
            if each.early_s:
                await connection.execute("SELECT pg_current_xact_id()")
                await asyncio.sleep(each.early_s)
            for _ in range(each.events):
                number = await connection.fetchval(COUNT, each.key)
                await connection.execute(PUBLISH, each.key, number)
            await asyncio.sleep(each.open_s)
            await (transaction.commit() if each.commits else transaction.rollback())


@asynccontextmanager
async def _reading(database: Database, reader: Any) -> AsyncIterator[list[str]]:
    """Tail the table during the block; yields what has been read."""
    read: list[str] = []
    async with search(database) as connection, asyncio.TaskGroup() as group:
        task = group.create_task(reader(connection, read))
        yield read
        task.cancel()


async def _by_greatest_id(connection: Connection[Any], read: list[str]) -> None:
    last = 0
    while True:
        for row in await connection.fetch(BY_GREATEST_ID, last):
            read.append(row["n"])
            last = row["id"]
        await asyncio.sleep(POLL_S)


async def _by_horizon(connection: Connection[Any], read: list[str]) -> None:
    last = (0, 0)
    while True:
        for row in await connection.fetch(BY_HORIZON, *last):
            read.append(row["n"])
            last = (row["xid"], row["id"])
        await asyncio.sleep(POLL_S)

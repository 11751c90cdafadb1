"""The hot queries stay cheap when the log is long: by index, and in few partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.store import cursor, lanes
from tests.support.relay import add_endpoint

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major
SESSION = {"server_settings": {"search_path": "relay"}}

LANES, BATCHES, PARTITION = 100, 40_000, 5_000
FIRST = 2_000_000
"""The first batch, at the beginning of the partitions that stand open-ended at first."""
PARENTS = ("outbox", "delivery", "attempt", "batch")


async def _a_long_log(connection: Connection[Any]) -> list[int]:
    """A batch for every event, all but the last of each lane acknowledged; returns the lanes."""
    for parent in PARENTS:
        lo = FIRST + 1_000_000 * (parent == "outbox")
        await connection.execute(f"DROP TABLE {parent}_{lo}")
        for _ in range(BATCHES // PARTITION):
            hi = lo + PARTITION
            await connection.execute(f"SELECT add_partition('{parent}', {lo}, {hi})")
            lo = hi
        await connection.execute(f"SELECT add_partition('{parent}', {lo}, NULL)")
    ids = [row["id"] for row in await connection.fetch("SELECT id FROM lane ORDER BY id")]
    await connection.execute(
        "INSERT INTO outbox (id, type, payload) OVERRIDING SYSTEM VALUE "
        f"SELECT 3000000 + i, 'a.b', '0' FROM generate_series(1, {BATCHES}) i"
    )
    await connection.execute(
        "INSERT INTO batch (batch, high) "
        f"SELECT {FIRST} + i, 3000000 + i FROM generate_series(1, {BATCHES}) i"
    )
    await connection.execute(
        "INSERT INTO delivery (lane_id, batch, seq, outbox_id) "
        f"SELECT ($1::bigint[])[1 + i % {LANES}], {FIRST} + i, 1 + i / {LANES}, 3000000 + i "
        f"  FROM generate_series(1, {BATCHES} - 1) i",
        ids,
    )
    await connection.execute(
        "INSERT INTO attempt SELECT lane_id, batch, seq, 1, 1, 'delivered', 204, NULL, now(), 1 "
        f"FROM delivery WHERE batch < {FIRST + BATCHES - LANES}"
    )
    await connection.execute("ANALYZE outbox, batch, delivery, attempt, lane")
    return ids


async def _plan(connection: Connection[Any], sql: str, *arguments: Any) -> list[str]:
    """What is really looked at, after the server has settled on a plan."""
    statement = await connection.prepare(f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {sql}")
    for _ in range(7):
        lines = [row[0] for row in await statement.fetch(*arguments)]
    return [line for line in lines if "Scan" in line and "never executed" not in line]


async def test_no_hot_query_reads_the_log_from_its_beginning(database: Database) -> None:
    await add_endpoint(database, lanes=LANES)
    async with database.connection(**SESSION) as connection:
        ids = await _a_long_log(connection)
        last = FIRST + BATCHES
        floors = [last - 2 * LANES] * LANES
        seqs = [BATCHES // LANES - 1] * LANES
        plans = {
            "events": (cursor.READ_EVENTS, 3_000_000 + BATCHES - 10, [3_000_005], [3_000_006], 99),
            "state": (cursor.READ_STATE,),
            "news": (lanes.READ_NEWS, last - 10),
            "last batch": (lanes.READ_LAST_BATCH,),
            "deliveries": (lanes.READ_DELIVERIES, ids, floors, seqs, 32, 1 << 20),
            "tail": (lanes.READ_TAIL, ids, floors, [s - 1 for s in seqs]),
        }
        for what, (sql, *arguments) in plans.items():
            scans = await _plan(connection, sql, *arguments)
            log = [s for s in scans if any(f" on {parent}_" in s for parent in PARENTS)]
            assert log, (what, scans)
            # The open-ended one is empty, and so small that it need no index.
            end = f"_{last} ", f"_{last + 1_000_000} "
            full = [s for s in log if "Seq Scan" in s and not any(e in s for e in end)]
            assert not full, (what, full)
            # Deliveries lie where their lanes are, and their events anywhere.
            own = [s for s in log if what != "deliveries" or " on delivery_" in s]
            assert len(own) <= 4, (what, own)

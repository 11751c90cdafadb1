"""A continuous load under faults, and the comparison of its results."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.store.connection.connect import CONNECTION_ERRORS
from tests.support.relay import (
    BUSY,
    OK,
    QUICK_RETRY,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.core.model.response import AttemptResult
    from tests.support.postgres import Database
    from tests.support.relay import Sent

INSERT = """
INSERT INTO relay.outbox (type, key, payload)
VALUES ('load.event', $1, jsonb_build_object('n', $2::int))
"""

# The committed events by key; each key has one producer, so ids are in commit order.
COMMITTED = """
SELECT key, array_agg((payload->>'n')::int ORDER BY id) AS ns
  FROM relay.outbox WHERE type = 'load.event' GROUP BY key
"""

TWICE = """
SELECT count(*) FROM (SELECT FROM relay.attempt WHERE outcome = 'delivered'
                       GROUP BY lane_id, seq HAVING count(*) > 1) twice
"""


# Who owns the endpoints, and since which epoch.
OWNERS = """
SELECT array_agg((endpoint_id, replica_id, epoch) ORDER BY endpoint_id) FROM relay.ownership
"""


class Load:
    """Producers, one per key.

    Args:
        pause_s: the pause between two events of a producer.
    """

    def __init__(self, database: Database, keys: int = 6, pause_s: float = 0.01) -> None:
        self.database = database
        self.network = Network()
        self.committed = 0
        """The events that producers know to be committed."""
        self._keys = keys
        self._pause_s = pause_s

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Publish during the block."""
        stop = asyncio.Event()
        producers = [
            asyncio.create_task(self._produce(f"key-{n}", stop)) for n in range(self._keys)
        ]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*producers)

    async def _produce(self, key: str, stop: asyncio.Event) -> None:
        connection: asyncpg.Connection | None = None
        n = 0
        while not stop.is_set():
            try:
                if connection is None:
                    connection = await asyncpg.connect(self.database.dsn, timeout=5)
                await connection.execute(INSERT, key, n)
                self.committed += 1
            except (*CONNECTION_ERRORS, TimeoutError):
                # The commit is in doubt; the table decides in the end.
                if connection is not None:
                    connection.terminate()
                connection = None
            n += 1
            await asyncio.sleep(self._pause_s)
        if connection is not None:
            await connection.close(timeout=5)

    async def arrives(self, more: int = 30, timeout_s: float = 60) -> None:
        """Wait until this many events arrive that are published from now on."""
        async with self.database.connection() as connection:
            last_id = await connection.fetchval("SELECT coalesce(max(id), 0) FROM relay.outbox")
            sql = "SELECT event_id::text FROM relay.outbox WHERE id > $1"

            async def count() -> bool:
                fresh = {r["event_id"] for r in await connection.fetch(sql, last_id)}
                return len({s.body["id"] for s in self.network.accepted} & fresh) >= more

            await until(count, timeout_s, f"{more} fresh events to arrive")

    def copies(self) -> int:
        """Number of accepted deliveries that had been accepted before."""
        accepted = [(sent.lane, sent.seq) for sent in self.network.accepted]
        return len(accepted) - len(set(accepted))

    async def check(self, timeout_s: float = 60) -> None:
        """Check that everything ended, and nothing was lost, reordered or duplicated."""
        await all_ended(self.database, timeout_s)
        async with self.database.connection() as connection:
            committed = {r["key"]: r["ns"] for r in await connection.fetch(COMMITTED)}
            assert await connection.fetchval(TWICE) == 0, "acknowledged twice"
        check_arrivals(self.network, committed)
        assert sum(map(len, committed.values())) >= self.committed
        assert await exceptions(self.database) == {}


def check_arrivals(network: Network, committed: dict[str, list[int]]) -> None:
    """Check that receivers accepted the committed events in order, each under one
    sequence number.
    """
    by_key: dict[str, list[int]] = defaultdict(list)
    by_lane: dict[str, list[int]] = defaultdict(list)
    identities: dict[tuple[str, int], tuple[str, str]] = {}
    for sent in network.accepted:
        if sent.body["type"] != "load.event":
            continue
        where, what = (sent.lane, sent.seq), (sent.delivery, sent.body["id"])
        if where in identities:
            assert identities[where] == what, "a number changed its event"
            continue  # A copy.
        identities[where] = what
        by_lane[sent.lane].append(sent.seq)
        by_key[sent.body["key"]].append(sent.body["data"]["n"])
    for lane, seqs in by_lane.items():
        assert seqs == list(range(1, len(seqs) + 1)), f"lane {lane} was reordered"
    assert by_key == committed, "lost or reordered"


class Sickly:
    """Receivers that exercise every kind of write.

    Some first attempts at the others fail, and the endpoint `sick`, which keeps the endpoint
    supervisor busy, accepts nothing until it is repaired.
    """

    def __init__(self) -> None:
        self.cured = False

    def __call__(self, sent: Sent) -> AttemptResult:
        if sent.url.endswith("/sick"):
            return OK if self.cured else BUSY
        return BUSY if sent.attempt == 1 and sent.seq % 13 == 0 else OK

    async def add(self, database: Database, **options: Any) -> None:
        await add_endpoint(database, types=["load.*"], **options)
        retry = {**QUICK_RETRY, "attempts_max": 10_000}
        await add_endpoint(database, "sick", types=["sick.*"], retry=retry)
        await fetchval(database, "UPDATE endpoint SET backlog_age_s = 3600 WHERE name = 'sick'")
        await publish(database, 0, type="sick.event")


async def loaded(database: Database, pause_s: float = 0.01) -> tuple[Load, Sickly]:
    """A load and its partly failing receivers."""
    load, sickly = Load(database, pause_s=pause_s), Sickly()
    load.network.script = sickly
    await sickly.add(database, lanes=3)
    return load, sickly


@asynccontextmanager
async def under_load(
    database: Database, *, pause_s: float = 0.01, **settings: Any
) -> AsyncIterator[Load]:
    """A running relay, for a block that injects a fault into it or its database.

    Events arrive before and after the block; in the end nothing is lost, reordered or duplicated.
    """
    load, sickly = await loaded(database, pause_s)
    async with running(database, load.network, **settings):
        async with load.running():
            await load.arrives()
            yield load
            await load.arrives()
        sickly.cured = True
        await load.check()

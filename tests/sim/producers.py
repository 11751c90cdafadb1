"""The application: transactions that publish, of every kind that is difficult for a cursor.

Versions of a key are counted under a row lock, which is released after the commit, so
their order is the order that every lane has to keep.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import asyncpg
import orjson

from tests.sim.database.connection import Connection
from tests.sim.database.engine import EXCLUSIVE, Wait
from tests.sim.database.inserts import insert_event
from tests.sim.database.shares import insert_future_event

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.clockwork import Process
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database

TROUBLE = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError)


@dataclass(frozen=True)
class Load:
    """Load of a run."""

    events: int
    producers: int
    keys: int
    types: int
    during_s: float
    rollback: float = 0.1
    keyless: float = 0.15
    repeatable_read: float = 0.3
    two_phase: float = 0.02
    expires: float = 0.02
    future: float = 0.03


def insert(
    db: Database, tx: Transaction, key: str | None, kind: str, ttl_s: float | None
) -> Steps[None]:
    """Insert an event, with a lock of the row of its key."""
    version = 0
    if key is not None:
        yield Wait(db.domain, key, EXCLUSIVE)
        row = tx.get(db.domain, key)
        version = 1 if row is None else row["version"] + 1
        tx.put(db.domain, key, {"version": version})
    payload = orjson.dumps({"k": key, "v": version}).decode()
    expires_at = None if ttl_s is None else db.later(ttl_s)
    yield from insert_event(db, tx, kind, key, payload, expires_at)


def insert_future(db: Database, tx: Transaction, kind: str, in_s: float) -> None:
    """Insert an event with a `deliver_at` in the future."""
    payload = orjson.dumps({"k": None, "v": 0}).decode()
    insert_future_event(db, tx, kind, None, payload, db.later(in_s))


def take_snapshot(db: Database, tx: Transaction) -> None:
    """The first statement of a transaction under REPEATABLE READ."""
    tx.snapshot = {"wakeup": db.wakeup}


async def publish_one(database: Database, process: Process) -> None:
    """Publish an event without a key on a connection of its own, if the database allows it."""
    connection = Connection(database, process, "application")
    with suppress(*TROUBLE):
        await connection.open()
        await connection.call(insert, None, "t0.changed", None)
    connection.terminate()


class Producer:
    """One connection of the application, one transaction after another.

    Args:
        on_open: called when a transaction stays open after it has published an event.
    """

    def __init__(
        self,
        database: Database,
        process: Process,
        load: Load,
        seed: int,
        on_open: Callable[[], None],
    ) -> None:
        self._db = database
        self._on_open = on_open
        self._process = process
        self._load = load
        self._rng = random.Random(seed)
        self._connection: Connection | None = None

    async def run(self, count: int) -> None:
        """Execute transactions, in bursts; errors of the database are ignored."""
        rng, load = self._rng, self._load
        clock = self._process.world
        bursts = max(1, count // 8)
        starts = sorted(rng.random() * load.during_s for _ in range(bursts))
        for n, start in enumerate(starts):
            await asyncio.sleep(max(start - clock.now, 0.0))
            for _ in range(count // bursts + (n < count % bursts)):
                with suppress(*TROUBLE):
                    await self._transaction()
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.05)

    async def _open(self) -> Connection:
        if self._connection is None or self._connection.is_closed():
            self._connection = Connection(self._db, self._process, "application")
            await self._connection.open()
        return self._connection

    async def _transaction(self) -> None:
        rng, load = self._rng, self._load
        connection = await self._open()
        await connection.control("BEGIN")
        two_phase = rng.random() < load.two_phase
        try:
            if rng.random() < load.repeatable_read:
                await connection.call(take_snapshot)
                await self._dwell()
            if two_phase:
                await connection.call(_disable_notifications)
            keys = sorted(self._key() or "" for _ in range(rng.choice((1, 1, 1, 2, 3))))
            for key in keys:
                ttl_s = 60 * rng.random() if rng.random() < load.expires else None
                kind = f"t{rng.randrange(load.types)}.changed"
                await connection.call(insert, key or None, kind, ttl_s)
                if rng.random() < load.future:
                    in_s = rng.random() * rng.choice((5, 300))
                    await connection.call(insert_future, kind, in_s)
                await self._dwell(published=True)
            rolled_back = rng.random() < load.rollback
            if two_phase:
                await self._two_phases(connection, rolled_back)
            else:
                await connection.control("ROLLBACK" if rolled_back else "COMMIT")
        except TROUBLE:
            connection.terminate()
            raise

    async def _two_phases(self, connection: Connection, rolled_back: bool) -> None:
        gid = f"{self._rng.random()}"
        await connection.run_on_server(partial(self._db.prepare, gid))
        await asyncio.sleep(self._rng.random() * 20)
        while True:
            try:
                other = await self._open()
                await other.run_on_server(partial(self._db.end_prepared, gid, not rolled_back))
            except TROUBLE:
                await asyncio.sleep(1)
            else:
                return

    async def _dwell(self, *, published: bool = False) -> None:
        """Hold the transaction open: mostly not at all, at times for long."""
        u = self._rng.random()
        if u < 0.7:
            return
        scale_s = 0.02 if u < 0.93 else 2.0 if u < 0.99 else 60.0
        if published and scale_s > 1:
            self._on_open()
        await asyncio.sleep(self._rng.random() * scale_s)

    def _key(self) -> str | None:
        if self._rng.random() < self._load.keyless:
            return None
        return f"k{self._rng.randrange(self._load.keys)}"


def _disable_notifications(db: Database, tx: Transaction) -> None:
    tx.quiet = True

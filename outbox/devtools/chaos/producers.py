"""The application: counts versions of its keys, and publishes each in its transaction.

It keeps its own books of what was committed.  Where a commit's outcome is not
known, because the connection broke, it waits for that transaction's end and
looks for its event; nothing is assumed.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import asyncpg
import orjson

import outbox
from outbox.devtools.chaos.plan import HOLDERS, KEYS_PER_ENDPOINT, PRODUCERS

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from asyncpg import Connection

    from outbox.devtools.chaos.ledger import Books
    from outbox.devtools.chaos.plan import Plan

SIZES = (1, 1, 2, 4, 8, 16, 24)
"""Events of one transaction."""
KEYS_PER_EVENT_MIN = 40
"""Transactions are no larger than a part of all keys."""
ROLLBACK_SHARE = 0.05
HOLD_S_MIN, HOLD_S_MAX = 0.1, 3.0
"""For so long some hold their transactions open, so that their ids come late."""
REPEATABLE_SHARE = 0.25
INSERT_SHARE = 0.5
LAG_S_MAX = 5.0
"""Who is behind by more does not try to catch up: the rate is what it is."""
RECONNECT_S = 0.2
LOCK_TIMEOUT = "500ms"

SETUP = """
CREATE TABLE prove_key (id integer PRIMARY KEY, version integer NOT NULL DEFAULT 0);
INSERT INTO prove_key (id) SELECT generate_series(0, {keys} - 1);
"""

# The row locks give the events of each key an order to keep.  They are taken in
# the order of the keys, as everybody does who takes several.
NEXT_VERSIONS = """
WITH locked AS MATERIALIZED (
    SELECT id FROM prove_key WHERE id = ANY ($1::integer[]) ORDER BY id FOR NO KEY UPDATE)
UPDATE prove_key k SET version = version + 1 FROM locked l WHERE k.id = l.id
RETURNING k.id, k.version
"""

INSERT = """
INSERT INTO outbox (event_id, type, key, payload)
SELECT e.event_id, e.type, e.key, e.payload::jsonb
  FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[])
       WITH ORDINALITY AS e(event_id, type, key, payload, n)
 ORDER BY e.n
"""

# Waits for a transaction that has the key to its end, however its connection
# ended.  Its number would not tell: after a crash it may be given out again.
AWAIT_END = "SELECT FROM prove_key WHERE id = $1 FOR UPDATE"
FIND_EVENT = "SELECT EXISTS (SELECT FROM outbox WHERE event_id = $1)"

LOST = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    # The server was shut down, or is starting.
    asyncpg.OperatorInterventionError,
    # Somebody's default, while a transaction was held open.
    asyncpg.IdleInTransactionSessionTimeoutError,
)
"""The connection is gone; what else goes wrong is for people to see."""

AGAIN = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError, asyncpg.LockNotAvailableError)
"""The transaction was rolled back; others are as good."""


@dataclass(frozen=True, slots=True)
class Written:
    """An event in a transaction that is not committed yet."""

    event_id: UUID
    key: int
    version: int


class Producers:
    """All of the application's processes.

    Args:
        connect: a new connection of the application's.
    """

    def __init__(
        self,
        plan: Plan,
        books: Books,
        rng: random.Random,
        connect: Callable[[], Awaitable[Connection[Any]]],
    ) -> None:
        self._plan = plan
        self._books = books
        self._rng = rng
        self._connect = connect
        self._keys = plan.endpoints * KEYS_PER_ENDPOINT
        self._size_max = max(self._keys // KEYS_PER_EVENT_MIN, 1)
        self._begun = 0
        self._since = 0.0

    async def set_up(self, connection: Connection[Any]) -> None:
        """Make the application's own table."""
        await connection.execute(SETUP.format(keys=self._keys))

    async def run(self, until: float) -> None:
        """Publish at the plan's rate until this time (monotonic)."""
        self._since = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(PRODUCERS):
                tasks.create_task(self._produce(until, holds=number < HOLDERS))

    async def _produce(self, until: float, *, holds: bool) -> None:
        connection: Connection[Any] | None = None
        try:
            while time.monotonic() < until:
                hold_s = self._rng.uniform(HOLD_S_MIN, HOLD_S_MAX) if holds else 0.0
                # Who has many keys, or has one for long, holds up the others.
                size = 1 if hold_s else min(self._rng.choice(SIZES), self._size_max)
                await self._turn(size)
                while connection is None or connection.is_closed():
                    connection = await self._reconnect(until)
                    if connection is None:
                        return
                try:
                    if not await self._transact(connection, size, hold_s):
                        self._begun -= size
                except LOST:
                    connection.terminate()
        finally:
            if connection is not None:
                connection.terminate()

    async def _turn(self, size: int) -> None:
        """Wait until the rate allows so many more events."""
        now = time.monotonic()
        due = self._since + self._begun / self._plan.rate
        if due < now - LAG_S_MAX:
            self._since += now - LAG_S_MAX - due
        self._begun += size
        await asyncio.sleep(max(due - now, 0.0))

    async def _reconnect(self, until: float) -> Connection[Any] | None:
        while time.monotonic() < until:
            with suppress(*LOST, outbox.OutboxError):
                connection = await self._connect()
                await connection.execute(f"SET lock_timeout = '{LOCK_TIMEOUT}'")
                return connection
            await asyncio.sleep(RECONNECT_S)
        return None

    async def _transact(self, connection: Connection[Any], size: int, hold_s: float) -> bool:
        """One transaction; its end is known when this returns, or the connection is lost.

        Returns:
            Whether it was committed.
        """
        rng = self._rng
        keys = sorted(rng.sample(range(self._keys), size))
        isolation = "repeatable_read" if rng.random() < REPEATABLE_SHARE else "read_committed"
        transaction = connection.transaction(isolation=isolation)
        try:
            await transaction.start()
            rows = await connection.fetch(NEXT_VERSIONS, keys)
            written = await self._write(connection, [(r["id"], r["version"]) for r in rows])
            if hold_s:
                # Others with higher ids commit meanwhile.
                await asyncio.sleep(hold_s)
            if rng.random() < ROLLBACK_SHARE:
                await transaction.rollback()
                self._books.rolled_back += len(written)
                return False
        except AGAIN:
            await transaction.rollback()
            return False
        try:
            await transaction.commit()
        except AGAIN:
            return False
        except LOST:
            if await self._committed(written[0]):
                self._keep(written)
            raise
        self._keep(written)
        return True

    async def _write(
        self, connection: Connection[Any], versions: list[tuple[int, int]]
    ) -> list[Written]:
        """Publish, by a plain INSERT or by the function."""
        payloads = [orjson.dumps({"key": key, "version": n}) for key, n in versions]
        types = [self._type(key) for key, _ in versions]
        ids: list[Any]
        if self._rng.random() < INSERT_SHARE:
            ids = [uuid4() for _ in versions]
            keys = [f"k{key}" for key, _ in versions]
            await connection.execute(INSERT, ids, types, keys, [p.decode() for p in payloads])
        else:
            events = [
                outbox.Event(type_, payload, key=f"k{key}")
                for type_, payload, (key, _) in zip(types, payloads, versions, strict=True)
            ]
            ids = await outbox.publish_many(connection, events, schema=self._plan.schema)
        return [Written(id_, key, n) for id_, (key, n) in zip(ids, versions, strict=True)]

    def _type(self, key: int) -> str:
        return f"e{key // KEYS_PER_ENDPOINT}.changed"

    async def _committed(self, written: Written) -> bool:
        """What became of a transaction whose connection was lost; asks until it is known."""
        while True:
            with suppress(*LOST, *AGAIN, outbox.OutboxError):
                connection = await self._connect()
                try:
                    async with connection.transaction(isolation="read_committed"):
                        await connection.execute(AWAIT_END, written.key)
                        return bool(await connection.fetchval(FIND_EVENT, written.event_id))
                finally:
                    connection.terminate()
            await asyncio.sleep(RECONNECT_S)

    def _keep(self, written: list[Written]) -> None:
        now = time.monotonic()
        for each in written:
            self._books.commit(
                each.event_id.bytes,
                each.key // KEYS_PER_ENDPOINT,
                each.key,
                each.version,
                now,
            )

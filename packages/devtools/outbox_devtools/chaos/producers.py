"""Producers of a chaos run: increment versions of keys and publish each in its transaction.

Committed events are recorded in the ledger.  If the outcome of a commit is unknown, because the
connection broke, the producer waits for the end of that transaction and queries its event.
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
from outbox_devtools.chaos.plan import LONG_TRANSACTION_PRODUCERS, PRODUCERS

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from asyncpg import Connection

    from outbox_devtools.chaos.ledger import Ledger
    from outbox_devtools.chaos.plan import ChaosPlan

SIZES = (1, 1, 2, 4, 8, 16, 24)
"""Transaction sizes in events, drawn at random."""
KEYS_PER_EVENT_MIN = 40
"""A transaction uses at most one of this many keys, to limit lock conflicts."""
ROLLBACK_SHARE = 0.1
HOLD_S_MIN = 0.1
REPEATABLE_SHARE = 0.25
INSERT_SHARE = 0.5
LAG_S_MAX = 5.0
"""A producer that lags by more than this does not catch up."""
RECONNECT_S = 0.2
LOCK_TIMEOUT = "500ms"

SETUP = """
CREATE TABLE prove_key (id integer PRIMARY KEY, version integer NOT NULL DEFAULT 0);
INSERT INTO prove_key (id) SELECT generate_series(0, {keys} - 1);
"""

# The row locks define the order of the events of each key.  They are taken in key order, to
# avoid deadlocks.
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

# Waits for the end of the transaction that locked the key, however its connection ended.  Its
# transaction id would be ambiguous: after a crash it may be assigned again.
AWAIT_END = "SELECT FROM prove_key WHERE id = $1 FOR UPDATE"
FIND_EVENT = "SELECT EXISTS (SELECT FROM outbox WHERE event_id = $1)"

LOST = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    # The server was shut down, or is starting.
    asyncpg.OperatorInterventionError,
    # The server's idle_in_transaction_session_timeout, while a transaction was held open.
    asyncpg.IdleInTransactionSessionTimeoutError,
)
"""Errors of a lost connection; all other errors end the run."""

RETRYABLE = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.LockNotAvailableError,
)
"""The transaction was rolled back, and another one is tried."""


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """An event of an open transaction."""

    event_id: UUID
    type: int
    key: int
    version: int


class Producers:
    """All producers of the application.

    Args:
        plan: the plan of the run.
        ledger: records committed events.
        rng: source of the random choices.
        connect: opens a connection for a producer.
    """

    def __init__(
        self,
        plan: ChaosPlan,
        ledger: Ledger,
        rng: random.Random,
        connect: Callable[[], Awaitable[Connection[Any]]],
    ) -> None:
        self._plan = plan
        self._ledger = ledger
        self._rng = rng
        self._connect = connect
        self._left = plan.events_max
        self._size_max = max(plan.keys // KEYS_PER_EVENT_MIN, 1)
        self._begun = 0
        self._since = 0.0

    async def set_up(self, connection: Connection[Any]) -> None:
        """Create the application's own table."""
        await connection.execute(SETUP.format(keys=self._plan.keys))

    async def run(self, until: float) -> None:
        """Publish at the plan's rate until this time (monotonic), or until its last event."""
        self._since = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(PRODUCERS):
                tasks.create_task(self._produce(until, holds=number < LONG_TRANSACTION_PRODUCERS))

    async def _produce(self, until: float, *, holds: bool) -> None:
        connection: Connection[Any] | None = None
        try:
            while time.monotonic() < until and self._left > 0:
                hold_s = self._rng.uniform(HOLD_S_MIN, self._plan.hold_s_max) if holds else 0.0
                # Many locked keys, or one locked for long, would block other producers.
                size = 1 if hold_s else min(self._rng.choice(SIZES), self._size_max, self._left)
                self._left -= size
                await self._wait_for_rate(size)
                while connection is None or connection.is_closed():
                    connection = await self._reconnect(until)
                    if connection is None:
                        return
                try:
                    if not await self._transact(connection, size, hold_s):
                        self._begun -= size
                        self._left += size
                except LOST:
                    connection.terminate()
        finally:
            if connection is not None:
                connection.terminate()

    async def _wait_for_rate(self, size: int) -> None:
        """Wait until the rate allows `size` more events."""
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
        """Execute one transaction and determine its outcome.

        Returns:
            Whether it was committed.

        Raises:
            One of LOST: the connection was lost; a committed transaction is recorded.
        """
        rng = self._rng
        keys = sorted(rng.sample(range(self._plan.keys), size))
        isolation = "repeatable_read" if rng.random() < REPEATABLE_SHARE else "read_committed"
        transaction = connection.transaction(isolation=isolation)
        try:
            await transaction.start()
            rows = await connection.fetch(NEXT_VERSIONS, keys)
            written = await self._write(connection, [(r["id"], r["version"]) for r in rows])
            if hold_s:
                # Transactions with higher ids commit meanwhile.
                await asyncio.sleep(hold_s)
            if rng.random() < ROLLBACK_SHARE:
                await transaction.rollback()
                self._ledger.rolled_back += len(written)
                return False
        except RETRYABLE:
            await transaction.rollback()
            return False
        try:
            await transaction.commit()
        except RETRYABLE:
            return False
        except LOST:
            if await self._was_committed(written[0]):
                self._record(written)
            raise
        self._record(written)
        return True

    async def _write(
        self, connection: Connection[Any], versions: list[tuple[int, int]]
    ) -> list[PendingEvent]:
        """Publish by a plain INSERT or by `publish_many`."""
        payloads = [orjson.dumps({"key": key, "version": n}) for key, n in versions]
        numbers = [self._rng.choice(self._plan.types_of(key)) for key, _ in versions]
        types = [self._plan.type_name(number) for number in numbers]
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
        return [
            PendingEvent(id_, type_, key, n)
            for id_, type_, (key, n) in zip(ids, numbers, versions, strict=True)
        ]

    async def _was_committed(self, written: PendingEvent) -> bool:
        """Whether a transaction with a lost connection was committed; retries until known."""
        while True:
            with suppress(*LOST, *RETRYABLE, outbox.OutboxError):
                connection = await self._connect()
                try:
                    async with connection.transaction(isolation="read_committed"):
                        await connection.execute(AWAIT_END, written.key)
                        return bool(await connection.fetchval(FIND_EVENT, written.event_id))
                finally:
                    connection.terminate()
            await asyncio.sleep(RECONNECT_S)

    def _record(self, written: list[PendingEvent]) -> None:
        now = time.monotonic()
        for each in written:
            self._ledger.record_commit(each.event_id.bytes, each.type, each.key, each.version, now)

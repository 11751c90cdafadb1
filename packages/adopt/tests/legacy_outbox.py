"""Another outbox table, with applications that write to it and the poller that it had before.

Their pauses are part of the workload: they are its rates, and no test waits for them.
Each key belongs to one application, which counts its rows: the order and the completeness of
what is delivered can be checked without the table.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import orjson

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from tests.support.postgres import Database

KEYS = 20
WRITERS = 4
POLLED_ROWS = 20

Style = Literal["locks-rows", "marks-later"]

CREATE = """
CREATE SCHEMA app;
CREATE TABLE app.events (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    message_id uuid NOT NULL DEFAULT gen_random_uuid(),
    kind       text NOT NULL,
    "Order Id" text,
    body       {body},
    created_at timestamptz NOT NULL DEFAULT now(),
    {sent}
)
"""
INSERT = 'INSERT INTO app.events (kind, "Order Id", body) VALUES ($1, $2, $3)'
INSERT_MANY = """
INSERT INTO app.events (kind, "Order Id", body)
SELECT ($1::text[])[1 + n % cardinality($1::text[])], 'k' || n % $2,
       json_build_object('key', 'k' || n % $2, 'n', n / $2){cast}
  FROM generate_series(0, $3 - 1) AS n
"""


@dataclass
class LegacyOutbox:
    """The table, and what its old poller has sent.

    Args:
        pending: the condition of pending rows.
        mark: the assignment that marks rows as sent; None: they are deleted.
    """

    database: Database
    rng: random.Random
    kinds: tuple[str, ...] = ("order.created", "order.paid")
    pending: str = "sent_at IS NULL"
    mark: str | None = "sent_at = now()"
    sent: list[dict[str, Any]] = field(default_factory=list)
    """Payloads in the order in which the old poller sent them."""
    written: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Number of committed rows by key."""
    longest_write_s: float = 0.0
    """The longest time that an application waited for one transaction."""

    async def create(
        self, rows: int, *, body: str = "jsonb", sent: str = "sent_at timestamptz"
    ) -> None:
        """Create the table with pending rows."""
        async with self.database.at_hand() as db:
            await db.execute(CREATE.format(body=body, sent=sent))
            cast = f"::{body}"
            await db.execute(INSERT_MANY.format(cast=cast), list(self.kinds), KEYS, rows)
        for n in range(rows):
            self.written[f"k{n % KEYS}"] += 1

    async def write(
        self, db: Connection[Any], key: str, kind: str | None = None, *, rolls_back: bool = False
    ) -> None:
        """Write one row in a transaction."""
        began = time.perf_counter()
        transaction = db.transaction()
        await transaction.start()
        payload = orjson.dumps({"key": key, "n": self.written[key]}).decode()
        await db.execute(INSERT, kind or self.rng.choice(self.kinds), key, payload)
        if rolls_back:
            await transaction.rollback()
            return
        await transaction.commit()
        self.longest_write_s = max(self.longest_write_s, time.perf_counter() - began)
        self.written[key] += 1

    @asynccontextmanager
    async def applications(self) -> AsyncIterator[None]:
        """Applications that write during the block, and roll back every tenth transaction."""
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for n in range(WRITERS):
                group.create_task(self._write_until(ended, n))
            try:
                yield
            finally:
                ended.set()

    async def _write_until(self, ended: asyncio.Event, writer: int) -> None:
        keys = [f"k{n}" for n in range(KEYS) if n % WRITERS == writer]
        async with self.database.connection() as db:
            while not ended.is_set():
                key, rolls_back = self.rng.choice(keys), self.rng.random() < 0.1
                await self.write(db, key, rolls_back=rolls_back)
                await asyncio.sleep(0.002)

    @asynccontextmanager
    async def poller(self, style: Style) -> AsyncIterator[asyncio.Event]:
        """The old poller, during the block or until the event is set."""
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._poll_until(ended, style))
            try:
                yield ended
            finally:
                ended.set()

    async def _poll_until(self, ended: asyncio.Event, style: Style) -> None:
        select = (
            f"SELECT id, body FROM app.events WHERE {self.pending} ORDER BY id LIMIT {POLLED_ROWS}"
        )
        async with self.database.connection() as db:
            while not ended.is_set():
                if style == "locks-rows":
                    async with db.transaction():
                        rows = await db.fetch(f"{select} FOR UPDATE SKIP LOCKED")
                        await self._send(rows)
                        await self._mark(db, rows)
                else:
                    rows = await db.fetch(select)
                    await self._send(rows)
                    await self._mark(db, rows)
                if not rows:
                    await asyncio.sleep(0.01)

    async def _send(self, rows: list[Any]) -> None:
        await asyncio.sleep(0.02)
        self.sent += [orjson.loads(row["body"]) for row in rows]

    async def _mark(self, db: Connection[Any], rows: list[Any]) -> None:
        ids = [row["id"] for row in rows]
        change = (
            "DELETE FROM app.events" if self.mark is None else f"UPDATE app.events SET {self.mark}"
        )
        await db.execute(f"{change} WHERE id = ANY ($1::bigint[])", ids)

    def check(self, delivered: list[dict[str, Any]]) -> None:
        """Check that each row was sent by the old poller or delivered, once and in order.

        Raises:
            AssertionError: one was lost, doubled or misordered.
        """
        old, new = _by_key(self.sent), _by_key(delivered)
        for key, rows in self.written.items():
            # The old poller sends the first rows of a key, and the relay the others.
            assert old[key] + new[key] == list(range(rows)), key


def _by_key(payloads: list[dict[str, Any]]) -> dict[str, list[int]]:
    sequences: dict[str, list[int]] = defaultdict(list)
    for payload in payloads:
        sequences[payload["key"]].append(payload["n"])
    return sequences

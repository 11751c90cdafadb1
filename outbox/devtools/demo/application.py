"""Application of the demo: a small shop that publishes in its own transactions.

It records committed and rolled-back events itself, so that the checks do not depend on the
relay's tables.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import outbox

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable
    from uuid import UUID

    from asyncpg import Connection

PRODUCERS = 8
CUSTOMERS = 24
ROLLBACK_SHARE = 0.1
LONG_SHARE = 0.03
LONG_S = 0.3
BAD_ADDRESSES = 3
TYPES = ("order.placed", "order.paid", "stock.moved")

SETUP = """
CREATE SCHEMA shop;
CREATE TABLE shop.customer (id int PRIMARY KEY, version int NOT NULL DEFAULT 0);
INSERT INTO shop.customer (id) SELECT generate_series(0, {customers} - 1);
"""

# The row lock defines the order of the events of one customer.
NEXT_VERSION = "UPDATE shop.customer SET version = version + 1 WHERE id = $1 RETURNING version"


@dataclass(frozen=True, slots=True)
class Published:
    """A committed event."""

    id: str
    type: str
    customer: int
    version: int


@dataclass(slots=True)
class ShopLedger:
    """Committed and rolled-back events of the shop."""

    planned: int
    committed: list[Published] = field(default_factory=list)
    rolled_back: set[str] = field(default_factory=set)

    @property
    def done(self) -> int:
        """Number of events committed up to now."""
        return len(self.committed)


class _RollBack(Exception):
    """Raised to roll a transaction back."""


class Shop:
    """Publishes a number of events on several concurrent connections."""

    def __init__(self, events: int, per_s: float, rng: random.Random) -> None:
        self.ledger = ShopLedger(events)
        self._per_s = per_s
        self._rng = rng
        self._left = events
        self._bad = set(rng.sample(range(events), min(BAD_ADDRESSES, events)))

    async def set_up(self, connection: Connection[Any]) -> None:
        """Create the shop's own tables."""
        await connection.execute(SETUP.format(customers=CUSTOMERS))

    async def run(self, connect: Callable[[], Awaitable[Connection[Any]]]) -> None:
        """Publish all events at a limited rate."""
        started = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as producers:
            for _ in range(PRODUCERS):
                producers.create_task(self._produce(connect, started))

    async def _produce(
        self, connect: Callable[[], Awaitable[Connection[Any]]], started: float
    ) -> None:
        connection = await connect()
        clock = asyncio.get_running_loop().time
        try:
            while self._left > 0:
                self._left -= 1
                number = self.ledger.planned - self._left - 1
                await asyncio.sleep(max(0.0, started + number / self._per_s - clock()))
                while not await self._publish(connection, number):
                    pass
        finally:
            await connection.close(timeout=2)

    async def _publish(self, connection: Connection[Any], number: int) -> bool:
        """Publish one event in its transaction; False if it was rolled back."""
        rng = self._rng
        customer = rng.randrange(CUSTOMERS)
        kind = TYPES[1] if number in self._bad else rng.choice(TYPES)
        address = "nowhere" if number in self._bad else f"Main Street {customer}"
        event_id: UUID | None = None
        try:
            async with connection.transaction():
                version: int = await connection.fetchval(NEXT_VERSION, customer)
                event_id = await outbox.publish(
                    connection,
                    kind,
                    {"customer": customer, "version": version, "address": address},
                    key=f"customer-{customer}",
                )
                if rng.random() < LONG_SHARE:
                    # Transactions with higher ids commit meanwhile.
                    await asyncio.sleep(rng.random() * LONG_S)
                if rng.random() < ROLLBACK_SHARE:
                    raise _RollBack
        except _RollBack:
            self.ledger.rolled_back.add(str(event_id))
            return False
        self.ledger.committed.append(Published(str(event_id), kind, customer, version))
        return True

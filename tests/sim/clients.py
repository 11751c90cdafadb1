"""Clients of tenants, which publish by the API: most of it exceeds the share of the tenant.

A client repeats a request with its idempotency key until it gets a response, and then sends the
next one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson

from tests.sim.books import Violation
from tests.sim.database.connection import Connection
from tests.sim.database.shares import Request, delete_future_events, publish_shared
from tests.sim.producers import TROUBLE
from tests.sim.stores.future_events import FutureEventStore, lock_future

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tests.sim.simulation import Simulation

TENANTS = ("acme", "globex")
BURST = 10
RESPONSE_S = 5.0
"""A client that has waited for this long repeats its request."""


class ApiClient:
    """A client of a tenant, with keys of its own.

    Args:
        number: of the client.
        rng: for the load, and what becomes of requests.
    """

    def __init__(self, simulation: Simulation, number: int, rng: random.Random) -> None:
        self._sim = simulation
        self._rng = rng
        self._tenant = TENANTS[number // 2 % len(TENANTS)]
        self._keys = [f"{self._tenant}/{number}/{n}" for n in range(rng.choice((1, 1, 3)))]
        # Of all events of all clients, so that each has one of its own.
        self._next = number * 1_000_000
        self._connection: Connection | None = None

    async def run(self, starts: Sequence[float]) -> None:
        """Publish a burst of requests at each of these times."""
        rng, world = self._rng, self._sim.world
        for start in starts:
            await asyncio.sleep(max(start - world.now, 0.0))
            passes = rng.choice((0.1, 0.5))
            for _ in range(BURST):
                await self._publish(passes)
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * rng.choice((0.1, 1.0)))

    async def _publish(self, passes: float) -> None:
        """Publish a request, and repeat it until it has a response."""
        rng = self._rng
        requests = [self._request() for _ in range(rng.choice((1, 1, 1, 3)))]
        once = str(requests[0].number)
        while True:
            restores = self._sim.database.restores
            try:
                async with asyncio.timeout(RESPONSE_S):
                    connection = await self._open()
                    if rng.random() < 0.05:
                        self._disturb(connection)
                    await connection.call(
                        publish_shared, self._tenant, once, requests, passes=rng.random() < passes
                    )
            except (*TROUBLE, TimeoutError):
                if self._connection is not None:
                    self._connection.terminate()
                await asyncio.sleep(rng.random())
                continue
            if restores == self._sim.database.restores:
                self._responded(requests)
            return

    def _responded(self, requests: list[Request]) -> None:
        try:
            self._sim.checker.shares.responded(requests)
        except Violation as violation:
            self._sim.checker.violations.append(violation)

    def _request(self) -> Request:
        rng = self._rng
        self._next += 1
        deliver_at, key, version = 0.0, None, 0
        if rng.random() < 0.1:
            deliver_at = self._sim.database.wall() + rng.uniform(-1.0, 1.0) * rng.choice((2, 200))
        else:
            key, version = rng.choice(self._keys), self._next
        payload = orjson.dumps({"k": key, "v": version}).decode()
        kind = f"t{rng.randrange(3)}.changed"
        return Request(key, payload, self._next, deliver_at, kind, cost=rng.choice((0, 1, 2)))

    async def _open(self) -> Connection:
        if self._connection is None or self._connection.is_closed():
            self._connection = Connection(self._sim.database, self._sim.api, "outbox-api")
            await self._connection.open()
        return self._connection

    def _disturb(self, connection: Connection) -> None:
        """Lose the response of a request, which is executed, and maybe late."""
        if self._rng.random() < 0.3 and connection.backend is not None:
            connection.backend.stalled_until = self._sim.world.now + 2 * self._rng.random()
        lose = self._rng.choice((connection.cut, connection.hang))
        self._sim.world.after(self._rng.expovariate(500), None, lose)


async def move_beside(simulation: Simulation, rng: random.Random) -> None:
    """Move events as a replica that does not know that it has ceased to lead, and may fail."""
    connection = Connection(simulation.database, simulation.api, "outbox-relay-before")
    try:
        await connection.open()
        if rng.random() < 0.5:
            store = FutureEventStore(connection, 0)
            for _ in range(3):
                await store.move_shares(simulation.world.now)
        else:
            await connection.control("BEGIN")
            await connection.call(lock_future)
            await asyncio.sleep(rng.random() * 0.02)
    except TROUBLE:
        pass
    finally:
        connection.terminate()


async def erase_key(simulation: Simulation, rng: random.Random) -> None:
    """Erase the future events of the key of the newest held one of a tenant."""
    db = simulation.database
    held = [r for r in db.future_event.rows.values() if r["is_held"] and r["key"]]
    if not held:
        return
    tenant = rng.choice(held)["tenant"]
    key: Any = [r["key"] for r in held if r["tenant"] == tenant][-1]
    connection = Connection(db, simulation.operator_process, "outbox")
    try:
        await connection.open()
        await connection.call(delete_future_events, key)
        simulation.log(f"operator: erases the future events of {key}")
    except TROUBLE:
        pass
    finally:
        connection.terminate()

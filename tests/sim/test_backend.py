"""Sessions of the simulated server: what a process that stalls holds, and until when."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.sim.clockwork import World
from tests.sim.database.backend import Backend, Client
from tests.sim.database.engine import UPDATE, Wait
from tests.sim.database.tables import Database

if TYPE_CHECKING:
    from tests.sim.database.engine import Steps, Transaction

STALL_S = 100.0


class _Client(Client):
    """Keeps the results."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def response(self, result: Any, error: Exception | None) -> None:
        self.results.append(error or result)

    def closed(self) -> None:
        self.results.append("closed")


def _lock_row(tx: Transaction) -> Steps[str]:
    yield Wait("row", 1, UPDATE)
    return "locked"


def test_a_session_that_stalls_holds_its_lock_until_it_is_terminated(rng: random.Random) -> None:
    world = World(random.Random(rng.random()))
    database = Database(world, random.Random(rng.random()))
    hanging, waiting = _Client(), _Client()
    stalled = Backend(database, "stalled", hanging)
    stalled.stalled_until = STALL_S
    stalled.execute(_lock_row)
    Backend(database, "waiting", waiting).execute(_lock_row)
    world.run(STALL_S / 2)
    assert (hanging.results, waiting.results) == ([], [])
    stalled.terminate()
    world.run(STALL_S / 2 + 1)
    assert (hanging.results, waiting.results) == (["closed"], ["locked"])


def test_a_session_that_stalls_continues_with_its_lock_afterwards(rng: random.Random) -> None:
    world = World(random.Random(rng.random()))
    database = Database(world, random.Random(rng.random()))
    holding, stalling = _Client(), _Client()
    holder = Backend(database, "holding", holding)
    holder.begin()
    holder.execute(_lock_row)
    stalled = Backend(database, "stalled", stalling)
    stalled.execute(_lock_row)
    stalled.stalled_until = STALL_S
    holder.client_closed()
    world.run(STALL_S / 2)
    assert (holding.results, stalling.results) == (["locked"], [])
    world.run(STALL_S + 1)
    assert stalling.results == ["locked"]

"""People: they change lanes, pause, resume, replay and discard, with the real commands."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.errors import OutboxError
from outbox.store import endpoint_changes, endpoint_states, replays
from outbox.store.changes import change
from outbox.store.replays import Selection
from tests.sim.database.connection import Connection
from tests.sim.database.tables import SCHEMA

if TYPE_CHECKING:
    import random

    from tests.sim.simulation import Simulation

TROUBLE = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, OutboxError)


class Operator:
    """Does something now and then, and puts everything right in the end."""

    def __init__(self, simulation: Simulation, rng: random.Random) -> None:
        self._sim = simulation
        self._rng = rng
        self._asked = asyncio.Semaphore(0)

    async def run(self) -> None:
        """Act whenever asked to."""
        while True:
            await self._asked.acquire()
            # While the event is read, sequenced or sent, or some time later.
            await asyncio.sleep(self._rng.choice((0.002, 0.02, 60.0)) * self._rng.random())
            await self._act()

    def act_soon(self, _: str) -> None:
        """Something happens that a person could interfere with."""
        self._sim.people.loop.call_soon(self._asked.release)

    async def settle(self) -> None:
        """Let everything go on: nothing may be left to wait for a person."""
        db = self._sim.database
        while True:
            await asyncio.sleep(5)
            for endpoint in list(db.endpoint.rows.values()):
                state, name = endpoint["state"], endpoint["name"]
                if state == "disabled":
                    await self._try(endpoint_states.enable, name)
                blocked = any(
                    db.lane.rows[b]["endpoint_id"] == endpoint["id"] for b in db.lane_block.rows
                )
                # A clock that went back makes a receiver's "in a minute" an hour.
                rest_until = db.endpoint_health.rows[endpoint["id"]]["held_until"]
                asked_to_rest = rest_until is not None and rest_until.timestamp() > db.wall() + 60
                if state == "paused" or (state == "active" and (blocked or asked_to_rest)):
                    await self._try(endpoint_states.resume, [name])

    async def _act(self) -> None:
        rng = self._rng
        endpoints = list(self._sim.database.endpoint.rows.values())
        name = rng.choice(endpoints)["name"]
        u = rng.random()
        if u < 0.3:
            await self._change_lanes(name, rng.choice((1, 2, 3, 4)))
        elif u < 0.45:
            await self._try(endpoint_states.pause, [name])
        elif u < 0.65:
            await self._try(endpoint_states.resume, [name])
        elif u < 0.72:
            await self._disable(name)
        elif u < 0.78:
            await self._try(endpoint_states.enable, name)
        elif u < 0.93:
            await self._try(replays.replay, Selection(everything=True))
        else:
            await self._try(replays.discard, Selection(everything=True))

    async def _change_lanes(self, name: str, lanes: int) -> None:
        await self._try(endpoint_changes.update, name, lambda s: replace(s, lanes=lanes))

    async def _disable(self, name: str) -> None:
        """As its owner would, after three days or a 410."""

        async def command(connection: Any, schema: str, *, actor: str) -> None:
            async with change(connection, schema) as from_batch:
                found = await endpoint_changes.lock(connection, name)
                endpoint_states.must_be(found, ("active", "paused"), "disabled")
                end = endpoint_changes.END_SUBSCRIPTION
                await connection.execute(end, found.id, from_batch)
                set_state = endpoint_states.SET_STATE
                await connection.execute(set_state, found.id, "disabling", actor, None)

        await self._try(command)

    async def _try(self, command: Any, *args: Any) -> None:
        connection = Connection(self._sim.database, self._sim.people, "outbox")
        try:
            await connection.open()
            await command(connection, SCHEMA, *args, actor="operator")
            self._sim.tell(f"operator: {command.__name__} {args[0] if args else ''}")
        except TROUBLE as error:
            self._sim.tell(f"operator: {type(error).__name__}: {error}")
        finally:
            connection.terminate()

"""The relays of a simulation: processes that are started, killed, frozen and stopped."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from outbox.errors import DatabaseUnavailable
from outbox.relay.relay import Relay
from outbox.relay.session import HAND_OVER_MIN_S
from outbox.store.connection.worker import working
from outbox.store.replicas import listener_name
from tests.sim.books import Violation
from tests.sim.clockwork import Process
from tests.sim.database.connection import Connection
from tests.sim.receivers import Receiver, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from outbox.config import Settings
    from tests.sim.checks import Checker
    from tests.sim.clockwork import World
    from tests.sim.database.tables import Database

TAKE_OVER_LEASES = 1.5
"""What a dead replica owned is claimed by another one within so many leases."""


class SimulatedConnections:
    """A relay's connections, in the place of `outbox.relay.cluster.connections`."""

    def __init__(self, fleet: Fleet, process: Process) -> None:
        self._fleet = fleet
        self._process = process

    async def worker(self, name: str) -> Connection:
        connection = Connection(self._fleet.database, self._process, name)
        try:
            await asyncio.wait_for(connection.open(), 10)
        except OSError as error:
            raise DatabaseUnavailable(str(error)) from error
        assert connection.backend is not None
        connection.backend.idle_timeout_s = self._fleet.settings.lease_s * 0.8
        return connection

    async def working(self, pids: Collection[int]) -> set[int]:
        """Those of the backends that are at work."""
        connection = await self.worker("outbox-relay")
        try:
            async with asyncio.timeout(10):
                return await working(connection, pids)
        finally:
            connection.terminate()

    async def listener(self, replica_id: int) -> Connection:
        connection = await self.worker(listener_name(replica_id))
        assert connection.backend is not None
        connection.backend.idle_timeout_s = 0.0
        return connection


class Fleet:
    """All relays, each in a process that is started again when it ends.

    Args:
        receivers: by their addresses.
        tell: takes what happens, line by line.
    """

    def __init__(
        self,
        world: World,
        database: Database,
        checker: Checker,
        settings: Settings,
        receivers: dict[str, Receiver],
        rng: random.Random,
        tell: Callable[[str], None],
    ) -> None:
        self.world = world
        self.database = database
        self.checker = checker
        self.settings = settings
        self.relays: dict[str, Process] = {}
        self._receivers = receivers
        self._rng = rng
        self._tell = tell
        self._running: dict[str, tuple[Relay, asyncio.Task[Any]]] = {}
        # When they went on after a SIGSTOP.
        self._thawed_at: dict[Process, float] = {}
        # When one that ends by itself is started again, apart from a second.
        self._back_s: dict[str, float] = {}
        self._unwell_until: dict[str, float] = {}
        # No fault is injected any more; and: nobody is started any more.
        self._peace = False
        self._stopping = False

    def start(self, name: str) -> None:
        """Start a relay's process; if it ends by itself, it is started again."""
        if name in self.relays and not self.relays[name].dead:
            return
        process = self.relays[name] = Process(self.world, name)
        self.trouble(process, 0.0, harm=False)
        rng = random.Random(self._rng.random())
        transport = Transport(self.world, process, self._receivers, self.checker, rng)
        relay = Relay(
            self.settings,
            transport,
            SimulatedConnections(self, process),  # type: ignore[arg-type]
            name=name,
            clock=lambda: self.world.now,
            rng=random.Random(self._rng.random()),
        )
        task = process.run(relay.run())
        self._running[name] = (relay, task)
        task.add_done_callback(lambda task: self._ended(name, process, task))

    def _ended(self, name: str, process: Process, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, DatabaseUnavailable):
            text = f"{name} ends by an error: {error!r}"
            self.checker.violations.append(Violation("relay", text))
        self._tell(f"{name} ended: {error!r}")
        process.kill()
        self.checker.died(process)
        if not self._stopping:
            self.world.after(self._back_s.pop(name, 1.0), None, self.start, name)

    def kill(self, relay: Process, back_s: float) -> None:
        """SIGKILL; it is started again after some time."""
        relay.kill()
        self.checker.died(relay)
        self.world.after(back_s, None, self.start, relay.name)
        if back_s > TAKE_OVER_LEASES * self.settings.lease_s:
            self._expect_take_over(relay)

    def freeze(self, relay: Process, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after some time."""
        relay.freeze()

        def thaw() -> None:
            if not relay.dead:
                self._tell(f"{relay.name} goes on")
                relay.thaw()
                self._thawed_at[relay] = self.world.now
                self.world.after(0.1, None, self.checker.thawed, relay)

        self.world.after(for_s, None, thaw)
        if for_s > TAKE_OVER_LEASES * self.settings.lease_s:
            self._expect_take_over(relay)

    def _expect_take_over(self, relay: Process) -> None:
        """If the others are well, they soon own what it owned."""
        others = [r for r in self.relays.values() if not r.dead and r is not relay]
        # A renewal that is on its way still counts when it arrives.
        silent_at = self.database.stalled_until(relay.name)
        limit_s = silent_at - self.world.now + TAKE_OVER_LEASES * self.settings.lease_s + 2
        if not others or not all(self._well(r) for r in others):
            return
        rows = list(self.database.ownership.rows.values())
        mine = [r for r in rows if self.checker.owns(relay, r["replica_id"])]

        def look() -> None:
            if self._peace or not all(self._well(r) for r in others):
                return
            for row in mine:
                new = self.database.ownership.rows[row["endpoint_id"]]
                state = self.database.endpoint.rows[row["endpoint_id"]]["state"]
                if new["epoch"] == row["epoch"] and state in ("active", "paused"):
                    text = f"{relay.name} still owns {row['endpoint_id']}"
                    self.checker.violations.append(Violation("take-over", text))

        self.world.after(limit_s, None, look)

    def _well(self, relay: Process) -> bool:
        return not relay.dead and self._unwell_until.get(relay.name, 0.0) < self.world.now

    def stop(self, relay: Process, back_s: float) -> None:
        """SIGTERM, upon which it ends in time, unless it was frozen meanwhile."""
        told_at = self.world.now
        running, _ = self._running[relay.name]
        relay.loop.call_soon(running.stop)
        self._back_s[relay.name] = back_s

        def kill() -> None:
            if relay.dead:
                return
            if not relay.frozen and self._thawed_at.get(relay, -1.0) < told_at:
                text = f"{relay.name} did not stop in time"
                self.checker.violations.append(Violation("stop", text))
            self.kill(relay, back_s)

        self.world.after(self._stops_in_s, None, kill)

    @property
    def _stops_in_s(self) -> float:
        return max(self.settings.drain_s, HAND_OVER_MIN_S) + 0.1

    def trouble(self, whom: Process | None, for_s: float, *, harm: bool = True) -> None:
        """Something is wrong for so long, with one relay or all, and has to be got over after it.

        Args:
            harm: an acknowledgement may be lost by it.
        """
        until = self.world.now + for_s + 3 * self.settings.lease_s + 60
        self.checker.troubled_until = max(self.checker.troubled_until, until)
        if harm:
            self.checker.harmed_until = max(self.checker.harmed_until, until)
        for name in self.relays if whom is None else [whom.name]:
            self._unwell_until[name] = max(self._unwell_until.get(name, 0.0), until)

    def any_relay(self, rng: random.Random) -> Process | None:
        """One that lives."""
        alive = [relay for relay in self.relays.values() if not relay.dead]
        return rng.choice(alive) if alive else None

    def make_peace(self) -> None:
        """Everybody runs, from now on."""
        self._peace = True
        for name, process in self.relays.items():
            if process.frozen and not process.dead:
                process.thaw()
            self.world.after(1.0, None, self.start, name)

    def stop_all(self) -> list[str]:
        """SIGTERM to all of them; returns those that are still there after their time."""
        self._stopping = True
        for name, process in self.relays.items():
            if not process.dead:
                process.loop.call_soon(self._running[name][0].stop)
        limit = self.world.now + self._stops_in_s
        self.world.run(limit, lambda: all(p.dead for p in self.relays.values()))
        return [p.name for p in self.relays.values() if not p.dead]

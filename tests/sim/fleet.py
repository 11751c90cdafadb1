"""The relays of a simulation: processes that are started, killed, frozen and stopped."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from outbox.errors import DatabaseUnavailable
from outbox.relay.relay import Relay
from outbox.relay.session import HAND_OVER_MIN_S
from outbox.store.cluster.sessions import LISTENER_SUFFIX
from tests.sim.books import Violation
from tests.sim.clockwork import Process
from tests.sim.database.connection import Connection, ListenerConnection
from tests.sim.receivers import Receiver, Transport
from tests.sim.stores import STORES
from tests.sim.stores.replicas import renew_lease

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from uuid import UUID

    from outbox.config import Settings
    from tests.sim.checks import Checker
    from tests.sim.clockwork import World
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database

TAKE_OVER_LEASES = 1.5
"""Limit, in leases, for another replica to claim the endpoints of a dead one."""

HAND_OVER_S = 10.0
"""Limit, in seconds, for a replica to claim an endpoint that another one has released."""


def read_busy_backends(db: Database, tx: Transaction, pids: Collection[int]) -> set[int]:
    """Those of the backends that execute a statement."""
    return {pid for pid in pids if pid in db.backends and db.backends[pid].at_work}


class SimulatedConnections:
    """Stands in for `outbox.relay.cluster.connections.Connections`."""

    stores = STORES
    reopens = False

    def __init__(self, fleet: Fleet, process: Process) -> None:
        self._fleet = fleet
        self._process = process

    def reread_secrets(self) -> Settings:
        return self._fleet.settings

    async def worker(self, name: str, *, long: bool = False) -> Connection:
        connection = Connection(self._fleet.database, self._process, name)
        return await self._open(connection, self._fleet.settings.lease_s * 0.8)

    async def reopened(self, name: str, *, long: bool) -> Connection:
        return await self.worker(name, long=long)

    async def _open(self, connection: Connection, idle_timeout_s: float) -> Connection:
        try:
            await asyncio.wait_for(connection.open(), 10)
        except OSError as error:
            raise DatabaseUnavailable(str(error)) from error
        assert connection.backend is not None
        connection.backend.idle_timeout_s = idle_timeout_s
        return connection

    async def find_busy_backends(self, pids: Collection[int]) -> Mapping[int, None]:
        """Those of the backends that execute a statement."""
        connection = await self.worker("outbox-relay")
        try:
            async with asyncio.timeout(10):
                return dict.fromkeys(await connection.call(read_busy_backends, pids))
        finally:
            connection.terminate()

    async def find_standby_wait(self, _: str) -> None:
        """No simulated server has a standby."""

    async def listener(self, label: str) -> Connection:
        name = label + LISTENER_SUFFIX
        listener = ListenerConnection(self._fleet.database, self._process, name)
        return await self._open(listener, 0.0)


class Fleet:
    """All relays, each in a process that is started again when it ends.

    Args:
        receivers: by their addresses.
        log: receives lines of the log.
    """

    def __init__(
        self,
        world: World,
        database: Database,
        checker: Checker,
        settings: Settings,
        receivers: dict[str, Receiver],
        rng: random.Random,
        log: Callable[[str], None],
    ) -> None:
        self.world = world
        self.database = database
        self.checker = checker
        self.settings = settings
        self.relays: dict[str, Process] = {}
        self._receivers = receivers
        self._rng = rng
        self._log = log
        self._running: dict[str, tuple[Relay, asyncio.Task[Any]]] = {}
        # When they were last resumed after a SIGSTOP.
        self._thawed_at: dict[Process, float] = {}
        # Delay before the restart of a relay that ends by itself; default: 1 s.
        self._back_s: dict[str, float] = {}
        self._unhealthy_until: dict[str, float] = {}
        # No fault is injected any more; no relay is started any more.
        self._peace = False
        self._stopping = False

    def start(self, name: str) -> None:
        """Start a relay's process; if it ends by itself, it is started again."""
        alive = name in self.relays and not self.relays[name].dead
        if alive or self._stopping:
            return
        process = self.relays[name] = Process(self.world, name)
        self.trouble(process, 0.0, harm=False)
        rng = random.Random(self._rng.random())
        transport = Transport(self.world, process, self._receivers, self.checker, rng)
        relay = Relay(
            transport,
            SimulatedConnections(self, process),  # type: ignore[arg-type]
            name=name,
            clock=lambda: self.world.now,
            wall=self.world.wall,
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
        self._log(f"{name} ended: {error!r}")
        process.kill()
        self.checker.died(process)
        if not self._stopping:
            self.world.after(self._back_s.pop(name, 1.0), None, self.start, name)

    def kill(self, relay: Process, back_s: float, held: UUID | None = None) -> None:
        """SIGKILL; the relay is started again after some time.

        Args:
            held: an endpoint that no other relay can claim.
        """
        relay.kill()
        self.checker.died(relay)
        self.world.after(back_s, None, self.start, relay.name)
        if back_s > TAKE_OVER_LEASES * self.settings.lease_s:
            self._expect_take_over(relay, held)

    def freeze(self, relay: Process, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after some time."""
        relay.freeze()

        def thaw() -> None:
            if not relay.dead:
                self._log(f"{relay.name} resumes")
                relay.thaw()
                self._thawed_at[relay] = self.world.now
                self.world.after(0.1, None, self.checker.thawed, relay)

        self.world.after(for_s, None, thaw)
        if for_s > TAKE_OVER_LEASES * self.settings.lease_s:
            self._expect_take_over(relay)

    def successors_of(self, relay: Process) -> list[Process]:
        """The other relays; none unless all of them are healthy."""
        others = [r for r in self.relays.values() if not r.dead and r is not relay]
        return others if all(self._is_healthy(r) for r in others) else []

    def _expect_take_over(self, relay: Process, held: UUID | None = None) -> None:
        """If the other relays are healthy, check that they soon own the endpoints of this one."""
        others = self.successors_of(relay)
        limit_s = (
            self._silent_at(relay) - self.world.now + TAKE_OVER_LEASES * self.settings.lease_s + 2
        )
        if not others:
            return
        rows = list(self.database.ownership.rows.values())
        owned = [
            r
            for r in rows
            if self.checker.owns(relay, r["replica_id"]) and r["endpoint_id"] != held
        ]

        restores = self.database.restores

        def check(epochs: dict[UUID, int]) -> None:
            if self.database.restores != restores:
                return  # The epochs are those of another history.
            if self._peace or not all(self._is_healthy(r) for r in others):
                return
            if any(c.backend and c.backend.commits for c in self._connections_named(relay.name)):
                return  # It cannot be terminated.
            unowned: dict[UUID, int] = {}
            for endpoint_id, epoch in epochs.items():
                new = self.database.ownership.rows[endpoint_id]
                if self.database.endpoint.rows[endpoint_id]["state"] not in ("active", "paused"):
                    continue
                if new["epoch"] == epoch:
                    what = "nobody claims" if new["replica_id"] is None else "still owned:"
                    text = f"after the end of {relay.name} {what} {endpoint_id}"
                    self.checker.violations.append(Violation("take-over", text))
                elif new["replica_id"] is None:
                    unowned[endpoint_id] = new["epoch"]
            if unowned:
                # Maybe it is passed on at this moment.
                self.world.after(HAND_OVER_S, None, check, unowned)

        self.world.after(limit_s, None, check, {r["endpoint_id"]: r["epoch"] for r in owned})

    def _silent_at(self, relay: Process) -> float:
        """The time by which all renewals of a relay have been processed.

        One that is on its way counts when it arrives.  The other sessions can be ended.
        """
        named = self._connections_named(relay.name)
        renewing = [c for c in named if c.last_step == renew_lease.__name__]
        stalls = [c.backend.stalled_until for c in renewing if c.backend and c.backend.alive]
        arrivals = [c.statement_at for c in renewing if not c.hangs]
        network = self.database.network_of(relay.name)
        return max(self.world.now, network.stalled_until, *stalls, *arrivals)

    def _connections_named(self, name: str) -> list[Connection]:
        """The connections of a relay, and of those of its name that were killed before it.

        What they owned may still be theirs, because one of their sessions goes on.
        """
        return [c for c in self.database.connections if c.process.name == name]

    def _connections_of(self, relay: Process) -> list[Connection]:
        return [c for c in self.database.connections if c.process is relay]

    def _is_healthy(self, relay: Process) -> bool:
        return (
            not relay.dead
            and self._unhealthy_until.get(relay.name, 0.0) < self.world.now
            and not any(c.hangs for c in self._connections_of(relay) if not c.is_closed())
        )

    def stop(self, relay: Process, back_s: float) -> None:
        """SIGTERM; check that the relay ends in time, unless it was frozen meanwhile."""
        requested_at = self.world.now
        running, _ = self._running[relay.name]
        relay.loop.call_soon(running.stop)
        self._back_s[relay.name] = back_s

        def kill() -> None:
            if relay.dead:
                return
            if not relay.frozen and self._thawed_at.get(relay, -1.0) < requested_at:
                text = f"{relay.name} did not stop in time"
                self.checker.violations.append(Violation("stop", text))
            self.kill(relay, back_s)

        self.world.after(self.stops_in_s, None, kill)

    def stop_for(self, back_s: float) -> None:
        """Stop all relays; those that are frozen are killed."""
        for relay in list(self.relays.values()):
            if relay.frozen and not relay.dead:
                self.kill(relay, back_s)
            elif not relay.dead:
                self.trouble(relay, self.settings.drain_s, harm=False)
                self.stop(relay, back_s)

    @property
    def stops_in_s(self) -> float:
        """Limit, in seconds, for a relay to stop."""
        return max(self.settings.drain_s, HAND_OVER_MIN_S) + 0.1

    def trouble(self, relay: Process | None, for_s: float, *, harm: bool = True) -> None:
        """Register a fault of one relay or (None) of all; recovery may take some time after it.

        Args:
            harm: the fault may lose an acknowledgement.
        """
        until = self.world.now + for_s + 3 * self.settings.lease_s + 60
        self.checker.troubled_until = max(self.checker.troubled_until, until)
        if harm:
            self.checker.harmed_until = max(self.checker.harmed_until, until)
        for name in self.relays if relay is None else [relay.name]:
            self._unhealthy_until[name] = max(self._unhealthy_until.get(name, 0.0), until)

    def pick_live_relay(self, rng: random.Random) -> Process | None:
        """A random relay that is alive; None: there is none."""
        alive = [relay for relay in self.relays.values() if not relay.dead]
        return rng.choice(alive) if alive else None

    def make_peace(self) -> None:
        """Thaw and start all relays; no fault follows."""
        self._peace = True
        for name, process in self.relays.items():
            if process.frozen and not process.dead:
                process.thaw()
            self.world.after(1.0, None, self.start, name)

    def stop_all(self) -> list[str]:
        """SIGTERM to all relays; returns the names of those that do not end in time."""
        self._stopping = True
        for name, process in self.relays.items():
            if not process.dead:
                process.loop.call_soon(self._running[name][0].stop)
        limit = self.world.now + self.stops_in_s
        self.world.run(limit, lambda: all(p.dead for p in self.relays.values()))
        return [p.name for p in self.relays.values() if not p.dead]

"""One seed: a database, some relays, receivers, producers and people; then faults,
then peace, in which everything must come to its end.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.config import Settings
from outbox.core.endpoint import EndpointSettings
from outbox.core.retry import RetryPolicy
from outbox.errors import DatabaseUnavailable
from outbox.relay.relay import Relay
from outbox.store.backends import working
from outbox.store.replicas import listener_name
from tests.sim import rest
from tests.sim.books import Violation
from tests.sim.checks import Checker
from tests.sim.clockwork import Process, World
from tests.sim.database import endpoints
from tests.sim.database.connection import Connection
from tests.sim.database.tables import Database
from tests.sim.faults import Faults
from tests.sim.operators import Operator
from tests.sim.producers import Load, Producer
from tests.sim.receivers import Receiver, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

HOUR_S = 3600.0
TAKE_OVER_LEASES = 1.5
"""What a dead replica owned is claimed by another one within so many leases."""
SETTLE_LEASES = 12
"""In peace, everything has come to its end after so many leases and the retries."""


@dataclass(frozen=True)
class Result:
    """What one seed showed."""

    seed: int
    violations: tuple[Violation, ...]
    steps: int
    statements: int
    events: int
    requests: int
    duplicates: int
    batches: int
    faults: int
    take_overs: int
    digest: int
    """The same for the same seed, or something is left to chance."""

    @property
    def good(self) -> bool:
        return not self.violations


class SimulatedConnections:
    """A relay's connections, in the place of `outbox.relay.connections`."""

    def __init__(self, simulation: Simulation, process: Process) -> None:
        self._sim = simulation
        self._process = process

    async def worker(self, name: str) -> Connection:
        connection = Connection(self._sim.database, self._process, name)
        try:
            await asyncio.wait_for(connection.open(), 10)
        except OSError as error:
            raise DatabaseUnavailable(str(error)) from error
        assert connection.backend is not None
        connection.backend.idle_timeout_s = self._sim.settings.lease_s * 0.8
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


class Simulation:
    """One run.

    Args:
        during_s: of virtual time, faults and peace together.
        on_tell: takes what happens, line by line.
    """

    def __init__(
        self,
        seed: int,
        during_s: float = HOUR_S,
        on_tell: Callable[[str], None] | None = None,
        mutate: Callable[[Simulation], None] | None = None,
    ) -> None:
        self.seed = seed
        rng = self._rng = random.Random(seed)
        self._on_tell = on_tell
        self.world = World(random.Random(rng.random()))
        self.database = Database(self.world, random.Random(rng.random()), rng.uniform(-5, 5))
        self.database.signals = rng.random() < 0.5
        lease_s = rng.choice((10.0, 30.0, 60.0, 60.0, 120.0))
        poll_s = min(lease_s / 5, 60.0)
        self.settings = Settings(
            lease_s=lease_s,
            drain_s=rng.choice((1.0, lease_s / 2)),
            poll_s=poll_s,
            notify=rng.random() < 0.9,
            ack_group_ms=rng.choice((0, 5, 20, 200)),
            in_flight_max=rng.choice((2, 20, 256)),
            batch_events_max=rng.choice((2, 7, 2000)),
            batch_deliveries_max=rng.choice((3, 20_000)),
        )
        latency_s = 1.0 if self.settings.notify else poll_s + 1.0
        self.checker = Checker(self.world, self.database, latency_s, self.tell)
        self.people = Process(self.world, "people")
        self._shop = Process(self.world, "shop")
        self.relays: dict[str, Process] = {}
        self._running: dict[str, tuple[Relay, asyncio.Task[Any]]] = {}
        # When one that ends by itself is started again, apart from a second.
        self._back_s: dict[str, float] = {}
        self._unwell_until: dict[str, float] = {}
        self.clock_offset_s: dict[str, float] = {}
        self.receivers: dict[str, Receiver] = {}
        self.settling = False
        self._stopping = False
        self._replicas = rng.choice((1, 2, 2, 3, 3))
        self._peace_at = during_s - SETTLE_LEASES * lease_s - 300
        self._ends_at = during_s
        self._load = Load(
            events=rng.choice((20, 60, 120, 200)),
            producers=rng.choice((1, 3, 6)),
            keys=rng.choice((1, 3, 20)),
            types=3,
            during_s=self._peace_at,
        )
        self.faults = Faults(self, random.Random(rng.random()))
        if mutate is not None:
            mutate(self)

    # ------------------------------------------------------------- the set-up

    def _endpoint(self, n: int) -> None:
        rng = self._rng
        retry = RetryPolicy(
            base_s=rng.choice((0.5, 5.0, 20.0)),
            factor=2.0,
            cap_s=40.0,
            attempts_max=rng.choice((3, 5, 8)),
        )
        settings = EndpointSettings(
            name=f"e{n}",
            url=f"http://receiver-{n}.test/",
            types=rng.choice((("**",), ("t0.changed", "t1.changed"))),
            retry=retry,
            on_dead_letter=rng.choice(("continue", "continue", "block")),
            backlog_count_max=rng.choice((None, None, 5)),
            backlog_age_max_s=rng.choice((None, None, 600.0)),
            lanes=rng.choice((1, 1, 2, 3)),
        )
        for lane in endpoints.add(self.database, UUID(int=rng.getrandbits(128)), settings):
            self.checker.know(lane)
        self.receivers[settings.url] = Receiver(
            settings.name, busy=rng.choice((0.0, 0.05, 0.3)), slow_s=rng.choice((0.01, 0.5))
        )

    # ---------------------------------------------------------------- relays

    def start(self, name: str) -> None:
        """Start a relay's process; if it ends by itself, it is started again."""
        if name in self.relays and not self.relays[name].dead:
            return
        process = self.relays[name] = Process(self.world, name)
        process.wall_offset_s = self.clock_offset_s.get(name, 0.0)
        self.trouble(process, 0.0, harm=False)
        rng = random.Random(self._rng.random())
        transport = Transport(self.world, process, self.receivers, self.checker, rng)
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
        self.tell(f"{name} ended: {error!r}")
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
                self.tell(f"{relay.name} goes on")
                relay.thaw()
                self.world.after(0.1, None, self.checker.thawed, relay)

        self.world.after(for_s, None, thaw)
        if for_s > TAKE_OVER_LEASES * self.settings.lease_s:
            self._expect_take_over(relay)

    def _expect_take_over(self, relay: Process) -> None:
        """If the others are well, they soon own what it owned."""
        others = [r for r in self.relays.values() if not r.dead and r is not relay]
        limit_s = TAKE_OVER_LEASES * self.settings.lease_s + 2
        if not others or not all(self._well(r) for r in others):
            return
        rows = list(self.database.ownership.rows.values())
        mine = [r for r in rows if self.checker.owns(relay, r["replica_id"])]

        def look() -> None:
            if self.settling or not all(self._well(r) for r in others):
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
        """SIGTERM; and SIGKILL if it is still there after a while, as a supervisor does it."""
        running, _ = self._running[relay.name]
        relay.loop.call_soon(running.stop)
        limit_s = self.settings.drain_s + 3 * self.settings.lease_s
        self._back_s[relay.name] = back_s

        def kill() -> None:
            if not relay.dead:
                self.kill(relay, back_s)

        self.world.after(limit_s, None, kill)

    def crash_database(self, for_s: float) -> None:
        """It is back after some time."""
        if not self.database.up:
            return
        self.database.crash()

        def back() -> None:
            self.database.up = True
            self.tell("the database is back")

        self.world.after(for_s, None, back)

    def heal(self, after_s: float, what: Callable[[], None]) -> None:
        """A fault ends."""
        self.world.after(after_s, None, what)

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

    def any_connection(self, rng: random.Random) -> Connection | None:
        """One of a relay."""
        self.database.connections = [c for c in self.database.connections if not c.is_closed()]
        found = [c for c in self.database.connections if c.name.startswith("outbox-relay")]
        return rng.choice(found) if found else None

    def any_receiver(self, rng: random.Random) -> Receiver:
        return rng.choice(list(self.receivers.values()))

    def tell(self, line: str) -> None:
        """Something happened."""
        if self._on_tell is not None:
            self._on_tell(f"{self.world.now:10.3f} {self.world.steps:8} {line}")

    # ------------------------------------------------------------------ a run

    def run(self) -> Result:
        """Everything from the set-up to the verdict."""
        rng, world = self._rng, self.world
        for n in range(rng.choice((1, 2, 3, 4))):
            self._endpoint(n)
        for n in range(self._replicas):
            world.at(rng.random() * 5, None, self.start, f"relay-{n}")
        share = self._load.events // self._load.producers or 1
        for _ in range(self._load.producers):
            producer = Producer(self.database, self._shop, self._load, rng.getrandbits(32))
            self._shop.run(producer.run(share))
        operator = Operator(self, random.Random(rng.random()))
        acts = sorted(rng.random() * self._peace_at for _ in range(rng.choice((0, 3, 8))))
        acting = self.people.run(operator.run(acts))
        self._plan_faults()

        world.run(self._peace_at, self._over)
        self.settling = True
        self.tell("--- peace")
        acting.cancel()
        self.people.run(operator.settle())
        self._make_peace()
        if not self._over() and not world.run(self._ends_at, self._over_or_at_rest):
            self.checker.violations.append(Violation("liveness", rest.unrest(self.checker)))
        if not self._over():
            self._stop_all()
        if not self._over():
            try:
                rest.audit(self.checker)
            except Violation as violation:
                self.checker.violations.append(violation)
        return self._result()

    def _over(self) -> bool:
        """Whether something was broken; nothing else is to be learnt then."""
        return bool(self.checker.violations or self.world.errors)

    def _over_or_at_rest(self) -> bool:
        calm = self.world.now > self._peace_at + 60
        return self._over() or (calm and rest.at_rest(self.checker))

    def _plan_faults(self) -> None:
        """By the time, by the step, and most of them while something is being sent."""
        rng, world = self._rng, self.world
        requests = self._load.events * len(self.receivers) * 2 // 3 + 2
        for _ in range(rng.choice((0, 5, 20, 40))):
            u = rng.random()
            if u < 0.6:
                self.checker.at_request(rng.randrange(1, requests), self._strike_soon)
            elif u < 0.75:
                world.at_step(int(rng.expovariate(1 / 20_000)), self.faults.strike)
            else:
                world.at(rng.random() * self._peace_at, None, self.faults.strike)

    def _strike_soon(self, process: Process) -> None:
        """While it sends: before the answer, when that is written, or a little later."""
        delay_s = self.world.rng.expovariate(30)
        self.world.after(delay_s, None, self.faults.strike, process)

    def _make_peace(self) -> None:
        world, database = self.world, self.database
        for network in database.networks.values():
            network.usual_s, network.stalled_until = 0.0005, world.now
        # Whoever prepared them may never have heard that they are; a person would see.
        world.after(60, None, self._end_prepared)
        for receiver in self.receivers.values():
            receiver.busy = receiver.resets = receiver.garbage = receiver.hangs = 0.0
            receiver.down_until = receiver.hanging_until = receiver.busy_until = world.now
        for name, process in self.relays.items():
            if process.frozen and not process.dead:
                process.thaw()
            world.after(1.0, None, self.start, name)

    def _end_prepared(self) -> None:
        for gid in list(self.database.prepared):
            self.database.abort(self.database.prepared.pop(gid))

    def _stop_all(self) -> None:
        """Every relay drains, and leaves nothing behind."""
        self._stopping = True
        for name, process in self.relays.items():
            if not process.dead:
                process.loop.call_soon(self._running[name][0].stop)
        limit = self.world.now + self.settings.drain_s + 2 * self.settings.lease_s + 30
        self.world.run(limit, lambda: all(p.dead for p in self.relays.values()))
        left = [p.name for p in self.relays.values() if not p.dead]
        if left:
            self.checker.violations.append(Violation("stop", f"{left} did not stop"))
            return
        owned = [r for r in self.database.ownership.rows.values() if r["replica_id"] is not None]
        if owned and self.faults.happened == []:
            self.checker.violations.append(Violation("stop", f"not handed over: {owned}"))

    def _result(self) -> Result:
        found = list(self.checker.violations)
        found += [Violation("error", text) for text in self.world.errors]
        db = self.database
        claims = sum(kind == "endpoint_claimed" for _, kind, *_ in db.journal)
        marks = (self.world.steps, db.statements, self.checker.requests, len(db.batches))
        return Result(
            self.seed,
            tuple(found),
            self.world.steps,
            db.statements,
            len(db.outbox),
            self.checker.requests,
            self.checker.duplicates,
            len(db.batches) - 1,
            len(self.faults.happened),
            claims,
            hash((marks, db.rng.random())),
        )

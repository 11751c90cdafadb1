"""Fault injection: executes the planned faults, each with its own random generator."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outbox.core.model.position import parse_position
from outbox.errors import CannotRun, DatabaseUnavailable, OutboxError
from outbox.operations.criteria import DeadLetterSelection
from outbox.operations.dead_letters import replay as replays
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import states as endpoint_states
from outbox.store.connection.connect import CONNECTION_ERRORS
from outbox_devtools.chaos import operators, queries
from outbox_devtools.chaos.facts import Incident
from outbox_devtools.chaos.plan import DOWN_LEASES_MAX, FROZEN_LEASES
from outbox_devtools.chaos.receivers import REJECTS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from outbox_devtools.chaos.environment import Environment
    from outbox_devtools.chaos.plan import PlannedFault
    from outbox_devtools.chaos.queries import Session
    from outbox_devtools.chaos.receivers import EndpointStub
    from outbox_devtools.chaos.relays import Relay

ACTOR = "outbox-prove"
FAULT_LANES_MAX = 4
ENDPOINTS_HIT_MAX = 10
POSITION_KEPT_S_MAX = 3.0
"""How long a position is kept before an endpoint begins at it."""
APPLIED_MAX = 5
LEADER_TIMEOUT_S = 1.0
COMMAND_TIMEOUT_S, RESUME_TIMEOUT_S = 10.0, 60.0
RETRY_S = 0.25


@dataclass(slots=True)
class FaultRun:
    """A running fault, with the affected relays and endpoints."""

    kind: str
    rng: random.Random
    begin: float
    relays: set[int] = field(default_factory=set)
    endpoints: set[int] = field(default_factory=set)
    leader: int | None = None


class FaultInjector:
    """Injects the faults of a plan and records them as incidents."""

    def __init__(self, environment: Environment, log: Callable[[str], None]) -> None:
        self._environment = environment
        self._log = log
        self._lease_s = environment.plan.lease_s
        self.incidents: list[Incident] = []
        self.skipped: list[str] = []
        """Faults that were not injected: the database was unavailable for a command, a command
        ended before it was interrupted, or a relay had no session."""
        self._restarting = asyncio.Lock()
        self._faults: dict[str, Callable[[FaultRun], Awaitable[None]]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "freeze-long": self._freeze,
            "stop": self._stop,
            "down": self._down,
            "cut": self._cut,
            "half-open": self._half_open,
            "half-sent": self._half_sent,
            "unreachable": self._unreachable,
            "terminate": self._terminate,
            "terminate-listen": self._terminate_listen,
            "terminate-all": self._terminate_all,
            "restart": self._restart,
            "refuse": self._refuse,
            "lanes": self._lanes,
            "pause": self._pause,
            "add": self._add,
            "snapshot": self._snapshot,
            "replay": self._replay,
            "half-command": self._interrupt_command,
            "freeze-command": self._interrupt_command,
            "kill-command": self._interrupt_command,
        }

    async def run(self, planned: Iterable[PlannedFault], began_at: float) -> None:
        """Inject the faults at their times; returns after the last one ended."""
        async with asyncio.TaskGroup() as tasks:
            for fault in planned:
                await asyncio.sleep(max(began_at + fault.at_s - time.monotonic(), 0.0))
                tasks.create_task(self._inject(fault))

    async def _inject(self, fault: PlannedFault) -> None:
        rng = random.Random(fault.seed)  # noqa: S311 (a repeatable run is the point)
        leader = await self._leader()
        run = FaultRun(fault.kind, rng, time.monotonic(), leader=leader)
        try:
            await self._faults.get(fault.kind, self._respond_with_fault)(run)
        except (*CONNECTION_ERRORS, OutboxError) as error:
            if fault.kind == "restart":
                raise
            # A command while another fault makes the database unavailable, for example.
            self.skipped.append(f"{fault.kind}: {error}")
            self._log(f"{fault.kind}, not injected: {error}")
            return
        self.incidents.append(
            Incident(
                run.kind,
                run.begin,
                time.monotonic(),
                frozenset(run.relays),
                frozenset(run.endpoints),
                run.leader,
            )
        )

    async def _leader(self) -> int | None:
        """Return the replica that leads, unless the database is unavailable."""
        with suppress(TimeoutError, DatabaseUnavailable):
            async with asyncio.timeout(LEADER_TIMEOUT_S), self._environment.control.use() as each:
                return await queries.leader(each)
        return None

    def _report(self, run: FaultRun, detail: str) -> None:
        self._log(f"{run.kind}: {detail}")

    # -------------------------------------------------------------- the relays

    def _choose_relay(self, run: FaultRun) -> Relay:
        relay = run.rng.choice(self._environment.relays.relays)
        run.relays.add(relay.number)
        return relay

    async def _kill(self, run: FaultRun) -> None:
        relay = self._choose_relay(run)
        away_s = run.rng.uniform(0.0, self._environment.plan.killed_leases_max) * self._lease_s
        self._report(run, f"relay {relay.number}, restarted after {away_s:.1f} s")
        async with relay.process_lock:
            await relay.process.kill()
            await asyncio.sleep(away_s)
            await relay.start()

    async def _freeze(self, run: FaultRun) -> None:
        relay = self._choose_relay(run)
        frozen_s = run.rng.uniform(*FROZEN_LEASES[run.kind]) * self._lease_s
        self._report(run, f"relay {relay.number} for {frozen_s:.1f} s")
        relay.freeze()
        try:
            await asyncio.sleep(frozen_s)
        finally:
            relay.thaw()

    async def _stop(self, run: FaultRun) -> None:
        relay = self._choose_relay(run)
        self._report(run, f"relay {relay.number}, and restarts it")
        async with relay.process_lock:
            await relay.process.stop()
            await relay.start()

    async def _down(self, run: FaultRun) -> None:
        relays = self._environment.relays.relays
        run.relays.update(relay.number for relay in relays)
        away_s = run.rng.uniform(0.0, DOWN_LEASES_MAX) * self._lease_s
        self._report(run, f"all relays for {away_s:.1f} s")
        async with AsyncExitStack() as locks:
            for relay in relays:
                await locks.enter_async_context(relay.process_lock)
            await asyncio.gather(*(relay.process.kill() for relay in relays))
            await asyncio.sleep(away_s)
            await asyncio.gather(*(relay.start() for relay in relays))

    # --------------------------------------------------- connections to the database

    async def _cut(self, run: FaultRun) -> None:
        relay = self._choose_relay(run)
        self._report(run, f"relay {relay.number}")
        relay.proxy.cut()

    async def _half_open(self, run: FaultRun) -> None:
        relay = self._choose_relay(run)
        hung_s = run.rng.uniform(0.8, 3.0) * self._lease_s
        self._report(run, f"relay {relay.number} for {hung_s:.1f} s")
        relay.proxy.mute()
        try:
            await asyncio.sleep(hung_s)
        finally:
            relay.proxy.resume()

    async def _half_sent(self, run: FaultRun) -> None:
        relay = self._choose_relay(run)
        pid = relay.proxy.hang_half_sent(run.rng)
        if pid is None:
            raise CannotRun(f"relay {relay.number} has no session that works")
        self._report(run, f"relay {relay.number}, the session {pid}")

    async def _unreachable(self, run: FaultRun) -> None:
        relay = self._choose_relay(run)
        away_s = run.rng.uniform(0.5, 3.0) * self._lease_s
        self._report(run, f"relay {relay.number} for {away_s:.1f} s")
        relay.proxy.gate.shut()
        relay.proxy.cut()
        try:
            await asyncio.sleep(away_s)
        finally:
            await relay.proxy.gate.open()

    # ------------------------------------------------------------- the database

    async def _terminate(self, run: FaultRun) -> None:
        await self._end_sessions(run, lambda found: [run.rng.choice(found)])

    async def _terminate_listen(self, run: FaultRun) -> None:
        def listener(found: list[Session]) -> list[Session]:
            listeners = [session for session in found if queries.is_listener(session)]
            return [run.rng.choice(listeners)] if listeners else []

        await self._end_sessions(run, listener)

    async def _terminate_all(self, run: FaultRun) -> None:
        await self._end_sessions(run, lambda found: found)

    async def _end_sessions(
        self, run: FaultRun, choose: Callable[[list[Session]], list[Session]]
    ) -> None:
        """Terminate sessions that were opened through the run's own proxies, and no others."""
        relay_of: dict[int, int] = {}
        pids: list[int] = []
        ports: list[int] = []
        for relay in self._environment.relays.relays:
            for pid, port in relay.proxy.sessions():
                if pid is not None:
                    pids.append(pid)
                    relay_of[pid] = relay.number
                elif port is not None:
                    ports.append(port)
                    relay_of[-port] = relay.number
        async with self._environment.control.use_within(COMMAND_TIMEOUT_S) as connection:
            found = await queries.sessions(connection, pids, ports)
            chosen = choose(sorted(found, key=lambda s: s.name)) if found else []
            ended = [s for s in chosen if await queries.terminate(connection, s, pids, ports)]
        for session in ended:
            port = session.client_port
            known = relay_of.get(session.pid, relay_of.get(-port) if port else None)
            if known is not None:
                run.relays.add(known)
        names = ", ".join(session.name for session in ended[:3])
        self._report(run, f"{names} …" if len(ended) > 3 else names or "no session")

    async def _restart(self, run: FaultRun) -> None:
        postgres = self._environment.postgres
        if postgres is None:
            raise CannotRun("the fault restart needs --embedded")
        async with self._restarting:
            run.begin = time.monotonic()
            run.relays.update(relay.number for relay in self._environment.relays.relays)
            self._report(run, "the server, as after a crash")
            # Shielded: a thread cannot be cancelled, and the restart has to complete.
            await asyncio.shield(asyncio.to_thread(postgres.restart, immediate=True))

    # ------------------------------------------------------------ the receivers

    def _endpoints(self, run: FaultRun, count_max: int) -> list[EndpointStub]:
        stubs = list(self._environment.receivers.endpoints.values())
        chosen = run.rng.sample(stubs, min(run.rng.randint(1, count_max), len(stubs)))
        run.endpoints.update(stub.number for stub in chosen)
        return chosen

    async def _refuse(self, run: FaultRun) -> None:
        receivers = self._environment.receivers
        group = run.rng.randrange(len(receivers.gates))
        away_s = run.rng.uniform(0.5, 4.0)
        groups = len(receivers.gates)
        run.endpoints.update(
            d.number for d in receivers.endpoints.values() if d.number % groups == group
        )
        self._report(run, f"{len(run.endpoints)} endpoints for {away_s:.1f} s")
        receivers.shut(group)
        try:
            await asyncio.sleep(away_s)
        finally:
            await receivers.gates[group].open()

    async def _respond_with_fault(self, run: FaultRun) -> None:
        """Inject a faulty response; all other faults of receivers are of this kind."""
        chosen = self._endpoints(run, ENDPOINTS_HIT_MAX)
        lasts_s = run.rng.uniform(1.0, 4.0)
        self._report(run, f"{len(chosen)} endpoints for {lasts_s:.1f} s")
        until = time.monotonic() + lasts_s
        for stub in chosen:
            if run.kind == "reject":
                stub.rejects = REJECTS
            else:
                stub.fault, stub.fault_until = run.kind, until
        await asyncio.sleep(lasts_s)
        if run.kind == "reject":
            for stub in chosen:
                stub.rejects = 0

    # -------------------------------------------------------------- operator commands

    def _choose_endpoint(self, run: FaultRun) -> str:
        number = run.rng.randrange(self._environment.plan.endpoints)
        run.endpoints.add(number)
        return f"e{number}"

    async def _lanes(self, run: FaultRun) -> None:
        name = self._choose_endpoint(run)
        lanes = run.rng.randint(1, FAULT_LANES_MAX)
        self._report(run, f"{name} to {lanes}")
        async with self._environment.control.use_within(COMMAND_TIMEOUT_S) as connection:
            await endpoint_changes.update_endpoint(
                connection,
                self._environment.plan.schema,
                name,
                lambda settings: replace(settings, lanes=lanes),
                actor=ACTOR,
            )

    async def _interrupt_command(self, run: FaultRun) -> None:
        name, lanes = self._choose_endpoint(run), run.rng.randint(1, FAULT_LANES_MAX)
        match run.rng.choice(("pause", "resume", "lanes", "replay", "apply")):
            case "pause":
                what, command = f"pause {name}", operators.pause(name)
            case "resume":
                what, command = f"resume {name}", operators.resume(name)
            case "lanes":
                what, command = f"{name} to {lanes} lanes", operators.change_lanes(name, lanes)
            case "replay":
                what, command = "dead replay", operators.replay_dead_letters()
            case _:
                command = self._apply(run, lanes)
                what = f"apply {len(run.endpoints)} endpoints with {lanes} lanes"
        interrupted = await self._environment.operators.interrupt(command, run.kind, run.rng)
        # The outcome is unknown, and a paused endpoint would never settle.  It is resumed while
        # the session of the interrupted command may still be there.
        await self._resume(name)
        if interrupted is None:
            raise CannotRun(f"{what} ended before it was interrupted")
        self._report(run, f"{what}: {interrupted}")

    def _apply(self, run: FaultRun, lanes: int) -> operators.OperatorCommand:
        """Apply a file that sets the lanes of some endpoints, the chosen one among them."""
        known = self._environment.endpoint_settings
        own = range(self._environment.plan.endpoints)
        run.endpoints.update(run.rng.sample(own, min(APPLIED_MAX, len(own))))
        path = self._environment.directory / f"apply-{run.begin}.json"
        return operators.apply_file(
            path, [replace(known[n], lanes=lanes) for n in sorted(run.endpoints)]
        )

    async def _pause(self, run: FaultRun) -> None:
        name = self._choose_endpoint(run)
        schema = self._environment.plan.schema
        paused_s = run.rng.uniform(0.5, 3.0)
        self._report(run, f"{name} for {paused_s:.1f} s")
        # The outcome may be unknown after a lost connection: resume in any case.
        with suppress(DatabaseUnavailable):
            async with self._environment.control.use_within(COMMAND_TIMEOUT_S) as connection:
                await endpoint_states.pause_endpoints(connection, schema, [name], actor=ACTOR)
        await asyncio.sleep(paused_s)
        await self._resume(name)

    async def _resume(self, name: str) -> None:
        """Resume an endpoint, with retries: a paused one would never settle."""
        deadline = time.monotonic() + RESUME_TIMEOUT_S
        while True:
            try:
                async with self._environment.control.use() as connection:
                    await endpoint_states.resume_endpoints(
                        connection, self._environment.plan.schema, [name], actor=ACTOR
                    )
            except DatabaseUnavailable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def _add(self, run: FaultRun) -> None:
        source = run.rng.randrange(self._environment.plan.endpoints)
        async with self._environment.control.use_within(COMMAND_TIMEOUT_S) as connection:
            number = await self._environment.add_subscriber(connection, source)
        run.endpoints.add(number)
        self._report(run, f"e{number}, with the events of e{source}")

    async def _snapshot(self, run: FaultRun) -> None:
        environment = self._environment
        source = run.rng.randrange(environment.plan.endpoints)
        types = [environment.plan.type_name(n) for n in environment.plan.endpoint(source).types]
        async with environment.control.use_within(COMMAND_TIMEOUT_S) as connection:
            text, seen = await queries.take_snapshot(connection, environment.plan.schema, types)
        await asyncio.sleep(run.rng.uniform(0.0, POSITION_KEPT_S_MAX))
        async with environment.control.use_within(COMMAND_TIMEOUT_S) as connection:
            start = parse_position(text), seen
            number = await environment.add_subscriber(connection, source, start)
        run.endpoints.add(number)
        self._report(run, f"e{number}, with what a snapshot did not see of e{source}")

    async def _replay(self, run: FaultRun) -> None:
        async with self._environment.control.use_within(COMMAND_TIMEOUT_S) as connection:
            report = await replays.start_replay(
                connection,
                self._environment.plan.schema,
                DeadLetterSelection(everything=True),
                actor=ACTOR,
            )
        self._report(run, f"{report.replaying} dead letters")

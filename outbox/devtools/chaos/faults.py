"""The storm: every fault of the plan at its time, each with its own dice."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outbox.devtools.chaos import queries
from outbox.devtools.chaos.facts import Incident
from outbox.devtools.chaos.receivers import REJECTS
from outbox.errors import CannotRun, DatabaseUnavailable, OutboxError
from outbox.operations import endpoint_changes, endpoint_states, replays
from outbox.operations.dead_letter_filter import Selection
from outbox.store.connection.connect import TROUBLE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from outbox.devtools.chaos.environment import Stage
    from outbox.devtools.chaos.plan import Planned
    from outbox.devtools.chaos.queries import Session
    from outbox.devtools.chaos.receivers import Desk
    from outbox.devtools.chaos.relays import Relay

ACTOR = "outbox-prove"
LANES_MAX = 4
ENDPOINTS_HIT_MAX = 10
ORDER_WITHIN_S, RESUME_WITHIN_S = 10.0, 60.0
RETRY_S = 0.25


@dataclass(slots=True)
class Hit:
    """A fault in the making, and whom it hits."""

    kind: str
    rng: random.Random
    begin: float
    relays: set[int] = field(default_factory=set)
    endpoints: set[int] = field(default_factory=set)
    detail: str = ""


class Storm:
    """Makes the faults, and keeps what it did."""

    def __init__(self, stage: Stage, tell: Callable[[str], None]) -> None:
        self._stage = stage
        self._tell = tell
        self._lease_s = stage.plan.lease_s
        self.incidents: list[Incident] = []
        self.skipped: list[str] = []
        """Orders that could not be given, because the database was away."""
        self.going_on: dict[int, str] = {}
        self._restarting = asyncio.Lock()
        self._faults: dict[str, Callable[[Hit], Awaitable[None]]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "stop": self._stop,
            "cut": self._cut,
            "half-open": self._half_open,
            "unreachable": self._unreachable,
            "terminate": self._terminate,
            "terminate-listen": self._terminate_listen,
            "terminate-all": self._terminate_all,
            "restart": self._restart,
            "refuse": self._refuse,
            "lanes": self._lanes,
            "pause": self._pause,
            "add": self._add,
            "replay": self._replay,
        }

    async def run(self, planned: Iterable[Planned], began_at: float) -> None:
        """Until the last fault is over."""
        async with asyncio.TaskGroup() as tasks:
            for number, fault in enumerate(planned):
                await asyncio.sleep(max(began_at + fault.at_s - time.monotonic(), 0.0))
                tasks.create_task(self._make(number, fault))

    async def _make(self, number: int, fault: Planned) -> None:
        rng = random.Random(fault.seed)  # noqa: S311 (a repeatable run is the point)
        hit = Hit(fault.kind, rng, time.monotonic())
        self.going_on[number] = fault.kind
        try:
            await self._faults.get(fault.kind, self._answer_badly)(hit)
        except (*TROUBLE, OutboxError) as error:
            if fault.kind == "restart":
                raise
            # An order at a time when another fault keeps the database away.
            self.skipped.append(f"{fault.kind}: {error}")
            return
        finally:
            del self.going_on[number]
        self.incidents.append(
            Incident(
                hit.kind,
                hit.begin,
                time.monotonic(),
                frozenset(hit.relays),
                frozenset(hit.endpoints),
                hit.detail,
            )
        )

    def _say(self, hit: Hit, whom: str) -> None:
        hit.detail = whom
        self._tell(f"{hit.kind}: {whom}")

    # -------------------------------------------------------------- the relays

    def _relay(self, hit: Hit) -> Relay:
        relay = hit.rng.choice(self._stage.fleet.relays)
        hit.relays.add(relay.number)
        return relay

    async def _kill(self, hit: Hit) -> None:
        relay = self._relay(hit)
        away_s = hit.rng.uniform(0.0, 1.5) * self._lease_s
        self._say(hit, f"relay {relay.number}, started again after {away_s:.1f} s")
        async with relay.turn:
            await relay.process.kill()
            await asyncio.sleep(away_s)
            await relay.start()

    async def _freeze(self, hit: Hit) -> None:
        relay = self._relay(hit)
        frozen_s = hit.rng.uniform(1.3, 2.5) * self._lease_s
        self._say(hit, f"relay {relay.number} for {frozen_s:.1f} s")
        relay.process.freeze()
        relay.frozen = True
        try:
            await asyncio.sleep(frozen_s)
        finally:
            relay.frozen = False
            relay.process.thaw()

    async def _stop(self, hit: Hit) -> None:
        relay = self._relay(hit)
        self._say(hit, f"relay {relay.number}, and starts it again")
        async with relay.turn:
            await relay.process.stop()
            await relay.start()

    # ------------------------------------------------ their way to the database

    async def _cut(self, hit: Hit) -> None:
        relay = self._relay(hit)
        self._say(hit, f"relay {relay.number}")
        relay.proxy.cut()

    async def _half_open(self, hit: Hit) -> None:
        relay = self._relay(hit)
        hung_s = hit.rng.uniform(0.8, 3.0) * self._lease_s
        self._say(hit, f"relay {relay.number} for {hung_s:.1f} s")
        relay.proxy.mute()
        try:
            await asyncio.sleep(hung_s)
        finally:
            relay.proxy.heal()

    async def _unreachable(self, hit: Hit) -> None:
        relay = self._relay(hit)
        away_s = hit.rng.uniform(0.5, 3.0) * self._lease_s
        self._say(hit, f"relay {relay.number} for {away_s:.1f} s")
        relay.proxy.door.shut()
        relay.proxy.cut()
        try:
            await asyncio.sleep(away_s)
        finally:
            await relay.proxy.door.open()

    # ------------------------------------------------------------- the database

    async def _terminate(self, hit: Hit) -> None:
        await self._end_sessions(hit, lambda found: [hit.rng.choice(found)])

    async def _terminate_listen(self, hit: Hit) -> None:
        def listener(found: list[Session]) -> list[Session]:
            listeners = [session for session in found if queries.listens(session)]
            return [hit.rng.choice(listeners)] if listeners else []

        await self._end_sessions(hit, listener)

    async def _terminate_all(self, hit: Hit) -> None:
        await self._end_sessions(hit, lambda found: found)

    async def _end_sessions(
        self, hit: Hit, choose: Callable[[list[Session]], list[Session]]
    ) -> None:
        """Ends sessions that came through the run's own proxies, and no others."""
        relay_of: dict[int, int] = {}
        pids: list[int] = []
        ports: list[int] = []
        for relay in self._stage.fleet.relays:
            for pid, port in relay.proxy.sessions():
                if pid is not None:
                    pids.append(pid)
                    relay_of[pid] = relay.number
                elif port is not None:
                    ports.append(port)
                    relay_of[-port] = relay.number
        async with self._stage.control.insist(ORDER_WITHIN_S) as connection:
            found = await queries.sessions(connection, pids, ports)
            chosen = choose(sorted(found, key=lambda s: s.name)) if found else []
            ended = [s for s in chosen if await queries.terminate(connection, s, pids, ports)]
        for session in ended:
            port = session.client_port
            known = relay_of.get(session.pid, relay_of.get(-port) if port else None)
            if known is not None:
                hit.relays.add(known)
        names = ", ".join(session.name for session in ended[:3])
        self._say(hit, f"{names} …" if len(ended) > 3 else names or "none was there")

    async def _restart(self, hit: Hit) -> None:
        postgres = self._stage.postgres
        if postgres is None:
            raise CannotRun("only an embedded server is restarted")
        async with self._restarting:
            hit.begin = time.monotonic()
            hit.relays.update(relay.number for relay in self._stage.fleet.relays)
            self._say(hit, "the server, as after a crash")
            # A thread cannot be cancelled, and a server must not be left half started.
            await asyncio.shield(asyncio.to_thread(postgres.restart, immediate=True))

    # ------------------------------------------------------------ the receivers

    def _endpoints(self, hit: Hit, most: int) -> list[Desk]:
        desks = list(self._stage.receivers.desks.values())
        chosen = hit.rng.sample(desks, min(hit.rng.randint(1, most), len(desks)))
        hit.endpoints.update(desk.number for desk in chosen)
        return chosen

    async def _refuse(self, hit: Hit) -> None:
        receivers = self._stage.receivers
        group = hit.rng.randrange(len(receivers.doors))
        away_s = hit.rng.uniform(0.5, 4.0)
        groups = len(receivers.doors)
        hit.endpoints.update(
            d.number for d in receivers.desks.values() if d.number % groups == group
        )
        self._say(hit, f"{len(hit.endpoints)} endpoints for {away_s:.1f} s")
        receivers.shut(group)
        try:
            await asyncio.sleep(away_s)
        finally:
            await receivers.doors[group].open()

    async def _answer_badly(self, hit: Hit) -> None:
        """All other faults of receivers are answers."""
        chosen = self._endpoints(hit, ENDPOINTS_HIT_MAX)
        lasts_s = hit.rng.uniform(1.0, 4.0)
        self._say(hit, f"{len(chosen)} endpoints for {lasts_s:.1f} s")
        until = time.monotonic() + lasts_s
        for desk in chosen:
            desk.mood, desk.mood_until = hit.kind, until
            desk.rejects = REJECTS
        await asyncio.sleep(lasts_s)

    # -------------------------------------------------------------- an operator

    def _name(self, hit: Hit) -> str:
        number = hit.rng.randrange(self._stage.plan.endpoints)
        hit.endpoints.add(number)
        return f"e{number}"

    async def _lanes(self, hit: Hit) -> None:
        name = self._name(hit)
        lanes = hit.rng.randint(1, LANES_MAX)
        self._say(hit, f"{name} to {lanes}")
        async with self._stage.control.insist(ORDER_WITHIN_S) as connection:
            await endpoint_changes.update(
                connection,
                self._stage.plan.schema,
                name,
                lambda settings: replace(settings, lanes=lanes),
                actor=ACTOR,
            )

    async def _pause(self, hit: Hit) -> None:
        name = self._name(hit)
        schema = self._stage.plan.schema
        paused_s = hit.rng.uniform(0.5, 3.0)
        self._say(hit, f"{name} for {paused_s:.1f} s")
        # Resumed also when nobody knows whether it was paused.
        with suppress(DatabaseUnavailable):
            async with self._stage.control.insist(ORDER_WITHIN_S) as connection:
                await endpoint_states.pause(connection, schema, [name], actor=ACTOR)
        await asyncio.sleep(paused_s)
        await self._resume(name)

    async def _resume(self, name: str) -> None:
        """Until it is done, whatever befalls the database meanwhile: nobody else will."""
        give_up_at = time.monotonic() + RESUME_WITHIN_S
        while True:
            try:
                async with self._stage.control.use() as connection:
                    await endpoint_states.resume(
                        connection, self._stage.plan.schema, [name], actor=ACTOR
                    )
            except DatabaseUnavailable:
                if time.monotonic() > give_up_at:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def _add(self, hit: Hit) -> None:
        source = hit.rng.randrange(self._stage.plan.endpoints)
        async with self._stage.control.insist(ORDER_WITHIN_S) as connection:
            number = await self._stage.add_subscriber(connection, source)
        hit.endpoints.add(number)
        self._say(hit, f"e{number}, which gets what e{source} gets")

    async def _replay(self, hit: Hit) -> None:
        async with self._stage.control.insist(ORDER_WITHIN_S) as connection:
            done = await replays.replay(
                connection,
                self._stage.plan.schema,
                Selection(everything=True),
                actor=ACTOR,
            )
        self._say(hit, f"{done.done} dead letters")

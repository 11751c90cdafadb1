"""The relays of the run: real processes, each on its own way to the database.

Whoever runs a relay restarts it when it ends, and so does this: one that is
started while the database is away says so and ends.  One that was at work and
ends by itself is a finding.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import orjson

from outbox.devtools.chaos.port_gate import HOST
from outbox.devtools.chaos.proxy import Proxy
from outbox.devtools.chaos.proxy_dsn import through
from outbox.devtools.relay_process import RelayProcess

if TYPE_CHECKING:
    from pathlib import Path

    from outbox.devtools.chaos.plan import Plan
    from outbox.store.connection.dsn import Dsn

LOOK_EVERY_S = 0.25
RESTART_S = 0.5
DRAIN_S = 3
REGISTERED = "replica registered"


class Relay:
    """One relay: a place for a process, and its way to the database."""

    def __init__(self, number: int, plan: Plan, dsn: Dsn, directory: Path) -> None:
        self.number = number
        (address,) = dsn.addresses
        self.proxy = Proxy(*address)
        self.process = RelayProcess(
            through(dsn, HOST, self.proxy.door.port),
            directory / f"relay-{number}.log",
            {
                "OUTBOX_SCHEMA": plan.schema,
                "OUTBOX_LEASE_S": str(plan.lease_s),
                "OUTBOX_DRAIN_S": str(DRAIN_S),
            },
        )
        # Held by whoever ends it on purpose, until it is started again.
        self.turn = asyncio.Lock()
        self.frozen = False
        self.left_alone = False
        self._log_from = 0

    async def start(self) -> None:
        """Start the process."""
        path = self.process.log_path
        self._log_from = path.stat().st_size if path.exists() else 0
        await self.process.start()

    @property
    def state(self) -> str:
        """In a word."""
        if self.process.pid is None or self.process.exit_code is not None:
            return "down"
        if self.frozen:
            return "frozen"
        return "half-open" if self.proxy.muted else "up"

    def was_at_work(self) -> bool:
        """Whether this life of it got so far as to register."""
        with self.process.log_path.open("rb") as log:
            log.seek(self._log_from)
            return REGISTERED.encode() in log.read()

    def replicas(self) -> list[int]:
        """Every replica that it ever was."""
        if not self.process.log_path.exists():
            return []
        with self.process.log_path.open("rb") as log:
            return [orjson.loads(line)["replica"] for line in log if REGISTERED.encode() in line]

    async def look_after(self, died: list[str]) -> None:
        """Start it again whenever it ends by itself, until it is to be left alone."""
        while not self.left_alone:
            await asyncio.sleep(LOOK_EVERY_S)
            async with self.turn:
                code = self.process.exit_code
                if code is None or self.left_alone:
                    continue
                if self.was_at_work():
                    words = self.process.last_words()[:300]
                    died.append(f"relay {self.number} ended with code {code}: {words}")
                await asyncio.sleep(RESTART_S)
                await self.start()

    async def close(self) -> None:
        """End it at once, whatever state it is in."""
        await self.process.kill()
        self.proxy.close()


class Fleet:
    """All of them."""

    def __init__(self, plan: Plan, dsn: Dsn, directory: Path) -> None:
        self.relays = [Relay(n, plan, dsn, directory) for n in range(plan.replicas)]
        self.died: list[str] = []
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all, and look after them."""
        for relay in self.relays:
            await relay.proxy.door.open()
            await relay.start()
            self._keepers.append(asyncio.create_task(relay.look_after(self.died)))

    async def stop(self) -> None:
        """SIGTERM to all: a clean end, after which the tables say everything."""
        await self._leave_alone()
        for relay in self.relays:
            await relay.process.stop()

    async def close(self) -> None:
        """The end."""
        await self._leave_alone()
        for relay in self.relays:
            await relay.close()

    async def _leave_alone(self) -> None:
        # Not cancelled: a process that is just being started would be nobody's.
        for relay in self.relays:
            relay.left_alone = True
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers.clear()

    def relay_of(self) -> dict[int, int]:
        """Which relay each replica was a life of."""
        return {replica: relay.number for relay in self.relays for replica in relay.replicas()}

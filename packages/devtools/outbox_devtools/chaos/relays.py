"""Relays of a chaos run: real processes, each with its own proxy to the database.

Like a service manager, this restarts a relay that exits: one that starts while the database is
unavailable exits with an error.  A relay that exits after it had registered is a violation.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson

from outbox.store.absence_proof import CONTRADICTED
from outbox_devtools.chaos.plan import RELAY_DRAIN_S
from outbox_devtools.chaos.port_gate import HOST
from outbox_devtools.chaos.proxy import Proxy
from outbox_devtools.chaos.proxy_dsn import proxied_dsn
from outbox_devtools.command_process import CommandProcess

if TYPE_CHECKING:
    from pathlib import Path

    from outbox.store.connection.dsn import Dsn
    from outbox_devtools.chaos.plan import ChaosPlan

EXIT_POLL_S = 0.25
RESTART_S = 0.5
REGISTERED = "replica registered"


class Relay:
    """One relay: its process and its proxy."""

    def __init__(self, number: int, plan: ChaosPlan, dsn: Dsn, directory: Path) -> None:
        self.number = number
        (address,) = dsn.addresses
        self.proxy = Proxy(*address)
        self.process = CommandProcess(
            ("relay",),
            proxied_dsn(dsn, HOST, self.proxy.gate.port),
            directory / f"relay-{number}.log",
            {
                "OUTBOX_LOG_FORMAT": "json",
                "OUTBOX_SCHEMA": plan.schema,
                "OUTBOX_LEASE_S": str(plan.lease_s),
                "OUTBOX_DRAIN_S": str(RELAY_DRAIN_S),
            },
        )
        # Held by a fault that stops the process, until it is started again.
        self.process_lock = asyncio.Lock()
        self._freezes = 0
        """Faults that freeze it at the moment."""
        self.supervision_ended = False
        self._log_from = 0

    async def start(self) -> None:
        path = self.process.log_path
        self._log_from = path.stat().st_size if path.exists() else 0
        await self.process.start()

    def freeze(self) -> None:
        """Freeze the process, until as many calls of `thaw`."""
        self._freezes += 1
        self.process.freeze()

    def thaw(self) -> None:
        """Let the process resume, if no other fault freezes it."""
        self._freezes -= 1
        if not self._freezes:
            self.process.thaw()

    def was_registered(self) -> bool:
        """Whether the current process has registered as a replica."""
        with self.process.log_path.open("rb") as log:
            log.seek(self._log_from)
            return REGISTERED.encode() in log.read()

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        """Return the log lines of an event, of all its processes."""
        if not self.process.log_path.exists():
            return []
        with self.process.log_path.open("rb") as log:
            return [orjson.loads(line) for line in log if event.encode() in line]

    async def supervise(self, died: list[str]) -> None:
        """Restart the process whenever it exits, until supervision ends."""
        while not self.supervision_ended:
            await asyncio.sleep(EXIT_POLL_S)
            async with self.process_lock:
                code = self.process.exit_code
                if code is None or self.supervision_ended:
                    continue
                if self.was_registered():
                    line = self.process.last_log_line()[:300]
                    died.append(f"relay {self.number} exited with code {code}: {line}")
                await asyncio.sleep(RESTART_S)
                await self.start()

    async def close(self) -> None:
        """Kill the process in any state, and close the proxy."""
        await self.process.kill()
        self.proxy.close()


class Relays:
    """All relays of a run."""

    def __init__(self, plan: ChaosPlan, dsn: Dsn, directory: Path) -> None:
        self.relays = [Relay(n, plan, dsn, directory) for n in range(plan.replicas)]
        self.died: list[str] = []
        self._supervisors: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start and supervise all relays."""
        for relay in self.relays:
            await relay.proxy.gate.open()
            await relay.start()
            self._supervisors.append(asyncio.create_task(relay.supervise(self.died)))

    async def stop(self) -> None:
        """Stop all relays by SIGTERM, so that everything is recorded in the tables."""
        await self._end_supervision()
        for relay in self.relays:
            await relay.process.stop()

    async def close(self) -> None:
        """Kill all relays."""
        await self._end_supervision()
        for relay in self.relays:
            await relay.close()

    async def _end_supervision(self) -> None:
        # Not cancelled: a process that is just being started would not be stopped.
        for relay in self.relays:
            relay.supervision_ended = True
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        self._supervisors.clear()

    def relay_of(self) -> dict[int, int]:
        """Return the relay number of each replica id."""
        return {
            line["replica"]: relay.number
            for relay in self.relays
            for line in relay.log_lines(REGISTERED)
        }

    def proof_aborts(self) -> tuple[str, ...]:
        """Return what the relays logged about proofs whose second read found an event."""
        return tuple(
            f"relay {relay.number}: events from {line['first_ids'][0]} on"
            for relay in self.relays
            for line in relay.log_lines(CONTRADICTED)
        )

"""CPU seconds of relay processes, and of the PostgreSQL backends that serve them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from outbox.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncpg import Connection

    from tests.support.process import RelayProcess

TICK_S = 0.01
"""The resolution of the system's CPU time."""

BACKENDS = """
SELECT pid FROM pg_stat_activity
 WHERE datname = current_database() AND application_name LIKE 'outbox-relay%'
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds per thousand deliveries."""

    relays_s: float
    postgres_s: float

    def parts(self, relays: str) -> dict[str, float]:
        """CPU seconds by name of the relay."""
        return {
            relays: self.relays_s,
            "PostgreSQL": self.postgres_s,
            "together": self.relays_s + self.postgres_s,
        }


class Meter:
    """Measures CPU time from its creation."""

    def __init__(
        self, relays: Iterable[psutil.Process], backends: Iterable[psutil.Process]
    ) -> None:
        self._processes = list(relays), list(backends)
        self._before = [cpu_s(each) for each in self._processes]

    @classmethod
    async def start(cls, relays: Iterable[RelayProcess], connection: Connection[Any]) -> Meter:
        """Start to measure these relays, and their backends in the connection's database."""
        running = [psutil.Process(r.process.pid) for r in relays if r.process is not None]
        backends = [psutil.Process(row["pid"]) for row in await connection.fetch(BACKENDS)]
        return cls(running, backends)

    def cost(self, deliveries: int) -> Cost:
        """Return the cost since the start for this number of deliveries.

        Raises:
            CannotRun: One of the processes has ended.
        """
        try:
            relays_s, postgres_s = (
                max(cpu_s(each) - s, TICK_S) / deliveries * 1000
                for each, s in zip(self._processes, self._before, strict=True)
            )
        except psutil.NoSuchProcess as gone:
            raise CannotRun(
                f"process {gone.pid} ended while its CPU time was counted: the relay lost its "
                "session, or ended"
            ) from None
        return Cost(relays_s, postgres_s)


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU seconds of processes."""
    times = [process.cpu_times() for process in processes]
    return float(sum(each.user + each.system for each in times))


def server_cpu_s(server: psutil.Process) -> float:
    """Return the CPU seconds of a PostgreSQL server with its backends, also of those that ended.

    Raises:
        psutil.NoSuchProcess: The server has ended.
    """
    while True:
        times = server.cpu_times()
        ended_s = float(times.children_user + times.children_system)
        # A backend that ends meanwhile is one of the ended ones then.
        with suppress(psutil.NoSuchProcess):
            return ended_s + cpu_s((server, *server.children()))

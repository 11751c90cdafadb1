"""Adversarial runs: producers of every kind and replicas that restart, all at once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.judge import finished
from tests.support.producers import APPLICATION, EVERY_KIND, Producer
from tests.support.sequencers import REAL, Replica, Variant, add_endpoints
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from tests.support.postgres import Database


@dataclass(frozen=True, slots=True)
class Workload:
    """Who takes part.

    Args:
        kinds: what the producers do, and how often.
        events_max: a replica's batches have at most one of these many events.
        dawdle: which share of which of a replica's statements comes late,
        dawdle_s: and how late at most (seconds).
        hasty_share: for how many of a replica's lives gaps become old sooner.
        take_chance: of taking the lead from another replica, with each turn that might.
    """

    kinds: Mapping[str, int]
    producers: int = 12
    replicas: int = 2
    events_max: Sequence[int] = (3, 20, 200)
    dawdle: Mapping[str, float] = field(
        default_factory=lambda: {"holders": 0.15, "read": 0.15, "look": 0.15, "write": 0.15}
    )
    dawdle_s: float = 0.004
    hasty_share: float = 0.5
    take_chance: float = 0.02


EVERYTHING = Workload(EVERY_KIND)


class Run:
    """A run under way."""

    def __init__(
        self,
        database: Database,
        variant: Variant,
        workload: Workload,
        rng: random.Random,
        *,
        may_crash: bool,
    ) -> None:
        self._database = database
        self.done: Counter[str] = Counter()
        """How often producers did what."""
        self.replicas = [
            Replica(
                database,
                variant,
                random.Random(rng.random()),
                events_max=workload.events_max,
                dawdle=workload.dawdle,
                dawdle_s=workload.dawdle_s,
                hasty_share=workload.hasty_share,
                take_chance=workload.take_chance,
            )
            for _ in range(workload.replicas)
        ]
        self.producers = [
            Producer(
                database,
                random.Random(rng.random()),
                str(number),
                self.done,
                kinds=workload.kinds,
                may_crash=may_crash,
            )
            for number in range(workload.producers)
        ]
        self.stop_producers = asyncio.Event()
        self.stop_replicas = asyncio.Event()
        self.producing: list[asyncio.Task[None]] = []

    async def last(self, seconds: float) -> None:
        """Let it go on: the length of the run, not something that is waited for."""
        async with self._database.connection() as connection:
            await connection.execute("SELECT pg_sleep($1)", seconds)

    async def finish(self) -> None:
        """End the producers; then every gap must end too."""
        self.stop_producers.set()
        await asyncio.wait(self.producing)
        async with self._database.connection() as connection:
            await until(lambda: finished(connection), 30, "every gap to end")


@asynccontextmanager
async def running(
    database: Database,
    rng: random.Random,
    variant: Variant = REAL,
    workload: Workload = EVERYTHING,
    *,
    may_crash: bool = False,
) -> AsyncIterator[Run]:
    """Producers and replicas at work while the block runs.

    Args:
        may_crash: the server may go away; everybody comes back with it.
    """
    async with database.connection() as connection:
        await connection.execute(APPLICATION + variant.prepare)
    await add_endpoints(database, 1, 3)
    run = Run(database, variant, workload, rng, may_crash=may_crash)
    async with asyncio.TaskGroup() as tasks:
        run.producing = [tasks.create_task(each.run(run.stop_producers)) for each in run.producers]
        for replica in run.replicas:
            tasks.create_task(replica.run(run.stop_replicas))
        try:
            yield run
        finally:
            run.stop_producers.set()
            run.stop_replicas.set()

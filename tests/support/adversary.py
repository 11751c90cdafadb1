"""Adversarial runs: producers of every kind and restarting replicas, concurrently."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.cursor_checks import finished
from tests.support.producers import APPLICATION, EVERY_KIND, Producer
from tests.support.sequencers import REAL, Replica, Variant, add_endpoints
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from tests.support.postgres import Database


@dataclass(frozen=True, slots=True)
class Workload:
    """The participants of a run.

    Args:
        kinds: the actions of the producers, with their weights.
        events_max: the batch limits to choose from, for each life of a replica.
        dawdle: the share of delayed statements of a replica, by statement.
        dawdle_s: the maximal delay (seconds).
        hasty_share: the share of a replica's lives in which gaps become old sooner.
        take_chance: the probability of a takeover from another replica, per eligible batch.
        actions_per_s: how many actions of the producers a second of the run has at least: a busy
            machine takes longer for as many.
    """

    kinds: Mapping[str, int]
    producers: int = 12
    replicas: int = 2
    events_max: Sequence[int] = (3, 20, 200)
    dawdle: Mapping[str, float] = field(
        default_factory=lambda: {
            "holders": 0.15,
            "read": 0.15,
            "holders_after_read": 0.15,
            "write": 0.15,
        }
    )
    dawdle_s: float = 0.004
    hasty_share: float = 0.5
    take_chance: float = 0.02
    actions_per_s: float = 0.0


# A third of what an idle machine does.
EVERYTHING = Workload(EVERY_KIND, actions_per_s=50.0)


class Run:
    """A run in progress."""

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
        self._actions_per_s = workload.actions_per_s
        self.done: Counter[str] = Counter()
        """The number of actions of the producers, by kind."""
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
        """Let the run continue; this is its length, not a wait for a condition.

        It lasts longer on a machine where the producers have not done enough by then.
        """
        actions = self.done.total() + self._actions_per_s * seconds
        async with self._database.connection() as connection:
            await connection.execute("SELECT pg_sleep($1)", seconds)
        await until(
            lambda: self.done.total() >= actions,
            60 + 2 * seconds,
            f"the producers to have done {actions:.0f} actions",
        )

    def pause_replicas(self) -> None:
        """Stop all replicas after their turns, as crashes would."""
        for each in self.replicas:
            each.working.clear()

    def resume_replicas(self) -> None:
        """Let all replicas go on."""
        for each in self.replicas:
            each.working.set()

    async def finish(self) -> None:
        """Stop the producers; then every gap must end."""
        self.stop_producers.set()
        await asyncio.wait(self.producing)
        async with self._database.connection() as connection:
            await until(lambda: finished(connection), what="every gap to end")


@asynccontextmanager
async def running(
    database: Database,
    rng: random.Random,
    variant: Variant = REAL,
    workload: Workload = EVERYTHING,
    *,
    may_crash: bool = False,
) -> AsyncIterator[Run]:
    """Run producers and replicas during the block.

    Args:
        may_crash: whether the server may crash; all clients reconnect.
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

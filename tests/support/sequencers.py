"""Sequencers under test: the real one, its broken variants, and ways to run them."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import asyncpg
from pydantic import SecretStr

from outbox.config import Settings
from outbox.core.endpoint import EndpointSettings
from outbox.core.gaps import GapTracker
from outbox.relay.bell import Bell
from outbox.relay.sequencer import Sequencer, Turn
from outbox.store import endpoint_changes
from outbox.store.cursor import CursorStore, Look

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from asyncpg import Connection

    from outbox.core.gaps import CursorState, Holders, Range, Step
    from outbox.core.sequencing import Sighting
    from outbox.relay.sequencer import Sequenced
    from tests.support.postgres import Database

# What a sequencer meets when its connection or the server is gone.
LOST = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.InternalClientError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
)

# Names of replicas, as the table `replica` would give them out.
replica_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Variant:
    """The sequencer's parts; the defaults are the real ones."""

    sequencer: type[Sequencer] = Sequencer
    store: type[CursorStore] = CursorStore
    tracker: type[GapTracker] = GapTracker
    prepare: str = ""
    """SQL to run in the database first."""

    def build(
        self,
        connection: Connection,
        settings: Settings,
        *,
        replica_id: int | None = None,
        bell: Bell | None = None,
        store_mixin: type | None = None,
        on_batch: Callable[[Sequenced], None] = lambda _: None,
        notified: bool = False,
        busy_events: int = 1,
    ) -> tuple[Sequencer, Any]:
        """A sequencer and its store; `store_mixin` comes before the store's class.

        Unless told otherwise every event makes it busy, so that it falls
        asleep anew after each.
        """
        store_type = (
            type(f"Watched{self.store.__name__}", (store_mixin, self.store), {})
            if store_mixin
            else self.store
        )
        # The constructor reads them.
        settled = {"tracker_type": self.tracker, "busy_events": busy_events}
        sequencer_type = type(self.sequencer.__name__, (self.sequencer,), settled)
        store = store_type(connection)
        sequencer = sequencer_type(
            store,
            next(replica_ids) if replica_id is None else replica_id,
            settings,
            bell or Bell(),
            on_batch,
            notified=notified,
        )
        return sequencer, store


REAL = Variant()


def settings(database: Database, **values: Any) -> Settings:
    """Settings for a sequencer of this database."""
    return Settings(dsn=SecretStr(database.dsn), dsn_source="test", **values)


async def session(database: Database, **options: Any) -> Connection:
    """A connection as the relay makes it: the search path is the schema alone."""
    return await database.connect(
        server_settings={"search_path": database.schema, "jit": "off"}, **options
    )


async def add_endpoints(database: Database, *lanes: int) -> None:
    """Endpoints for every event, one for each number of lanes."""
    async with database.connection(server_settings={"search_path": database.schema}) as connection:
        for number, count in enumerate(lanes or (1,)):
            settings = EndpointSettings(
                name=f"endpoint {number}", url="http://127.0.0.1/", lanes=count
            )
            await endpoint_changes.add(connection, database.schema, settings, actor="test")


def on_clock(tracker: type[GapTracker], ahead_s: Callable[[float], float]) -> type[GapTracker]:
    """The tracker, but its clock is `ahead_s(now)` ahead, so that tests need not wait."""

    class OnClock(tracker):  # type: ignore[misc, valid-type]
        def begin(self, state: CursorState, before: Holders, now: float) -> None:
            super().begin(state, before, now + ahead_s(now))

        def close(self, ids: Sequence[int], cut: bool, after: Holders, now: float) -> Step:
            step: Step = super().close(ids, cut, after, now + ahead_s(now))
            return step

    return OnClock


class Hooked:
    """Mixed into a store: something happens between two of its statements.

    A hook runs once, right before the named statement; `look` is the pair of
    statements after the read.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)  # type: ignore[call-arg]
        self._hooks: defaultdict[str, list[Callable[[], Awaitable[object]]]] = defaultdict(list)

    def before(self, statement: str, action: Callable[[], Awaitable[object]]) -> None:
        """Run `action` once before the next such statement."""
        self._hooks[statement].append(action)

    async def _run_hooks(self, statement: str) -> None:
        for action in self._hooks.pop(statement, ()):
            await action()

    async def holders(self) -> Holders:
        await self._run_hooks("holders")
        return await super().holders()  # type: ignore[misc, no-any-return]

    async def read(self, high: int, gaps: Sequence[Range], limit: int) -> list[Sighting]:
        await self._run_hooks("read")
        return await super().read(high, gaps, limit)  # type: ignore[misc, no-any-return]

    async def look(self) -> Look:
        await self._run_hooks("look")
        return await super().look()  # type: ignore[misc, no-any-return]


class Dawdling:
    """Mixed into a store: its statements come late, as over a slow network.

    The pauses are part of the workload: they widen the windows in which a
    producer can come between two statements.
    """

    rng: random.Random
    chances: Mapping[str, float]
    longest_s: float

    async def _dawdle(self, statement: str) -> None:
        if self.rng.random() < self.chances.get(statement, 0):
            await asyncio.sleep(self.rng.random() * self.longest_s)

    async def holders(self) -> Holders:
        await self._dawdle("holders")
        return await super().holders()  # type: ignore[misc, no-any-return]

    async def read(self, high: int, gaps: Sequence[Range], limit: int) -> list[Sighting]:
        await self._dawdle("read")
        return await super().read(high, gaps, limit)  # type: ignore[misc, no-any-return]

    async def look(self) -> Look:
        await self._dawdle("look")
        return await super().look()  # type: ignore[misc, no-any-return]


class Replica:
    """A sequencer that takes turns, restarts, forgets, and loses its connection.

    What its transactions were doing when that happened is the tables' matter,
    as it is in the product: a lost connection makes a new replica.
    """

    restart_chance = 0.01
    forget_chance = 0.01
    lose_chance = 0.005

    def __init__(
        self,
        database: Database,
        variant: Variant,
        rng: random.Random,
        *,
        events_max: Sequence[int],
        dawdle: Mapping[str, float],
        dawdle_s: float,
        hasty_share: float,
    ) -> None:
        self._database = database
        self._rng = rng
        self._events_max = events_max
        self._variant = variant
        # In some lives, gaps become old after a twentieth of a second.
        self._hasty_share = hasty_share
        self._hasty = replace(variant, tracker=on_clock(variant.tracker, lambda now: 19 * now))
        # Nothing else may go wrong, or a wrong state would be mended by a new life.
        self._survives = LOST
        if variant.store.ISOLATION != "read_committed":
            self._survives += (asyncpg.PostgresError,)
        self._mixin = type(
            "Slow", (Dawdling,), {"rng": rng, "chances": dawdle, "longest_s": dawdle_s}
        )
        self._connection: Connection | None = None
        self._sequencer: Sequencer | None = None
        self.old_gaps = 0
        self.lives = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Take turns until `stop` is set."""
        while not stop.is_set():
            try:
                turn = await self._turn()
            except self._survives:
                self.close()
                turn = Turn.IDLE
            if turn is not Turn.MOVED:
                # Nothing to do: leave the processor to the producers.
                await asyncio.sleep(self._rng.random() * 0.005)
        self.close()

    async def _turn(self) -> Turn:
        if self._sequencer is None or self._rng.random() < self.restart_chance:
            self.close()
            self._sequencer = await self._begin_life()
        if self._rng.random() < self.forget_chance:
            self._sequencer.forget()
        if self._rng.random() < self.lose_chance:
            # Cut the line wherever the turn then is, also in its COMMIT.
            assert self._connection is not None
            asyncio.get_running_loop().call_later(
                self._rng.random() * 0.01, self._connection._transport.abort
            )
        return await self._sequencer.turn()

    async def _begin_life(self) -> Sequencer:
        self._connection = await session(self._database)
        self.lives += 1
        limits = {
            "batch_events_max": self._rng.choice(self._events_max),
            "batch_deliveries_max": self._rng.choice([10, 100, 1000]),
        }
        hasty = self._rng.random() < self._hasty_share
        sequencer, store = (self._hasty if hasty else self._variant).build(
            self._connection, settings(self._database, **limits), store_mixin=self._mixin
        )
        self._count_old_gaps(store)
        await store.check()
        return sequencer

    def _count_old_gaps(self, store: CursorStore) -> None:
        write = store.write

        async def counted(batch: int, step: Step, *rest: Any) -> None:
            self.old_gaps += len(step.old_opened)
            await write(batch, step, *rest)

        store.write = counted  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        """End this life, as a crash would."""
        if self._connection is not None:
            self._connection.terminate()
        self._connection = self._sequencer = None

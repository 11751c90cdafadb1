"""Sequencers under test: the real one, its incorrect variants, and ways to run them."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import asyncpg
from pydantic import SecretStr

from outbox.config import Settings
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.sequencing.batch_notifications import READ_BATCHES
from outbox.core.sequencing.gaps import GapTracker
from outbox.core.sequencing.router import RoutableEvent
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.relay.sequencing.cursor import BatchResult, Cursor
from outbox.relay.sequencing.feed_reader import FeedReader
from outbox.relay.sequencing.sequencer import Sequencer
from outbox.relay.wake_event import WakeEvent, Wakeups
from outbox.store.sequencing import event_reads
from outbox.store.sequencing.batches import SequencingStore
from outbox.store.sequencing.event_reads import Reading
from outbox.store.sequencing.feeds import FeedStore
from outbox.store.sequencing.filters import FilterStore
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from asyncpg import Connection

    from outbox.core.sequencing.gaps import CursorChange, CursorState, LockHolders, Range
    from outbox.relay.sequencing.cursor import SequencedBatch
    from tests.support.postgres import Database

# The errors of a lost connection or server.
LOST = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.InternalClientError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
)

NO_SECOND_READ = WriteStatement("no_second_read", "SELECT $1::text")
# Replica ids that the table `replica` does not assign.
replica_ids = itertools.count(1_000_000)

_REGISTER = """
INSERT INTO replica (id, label, name, version, lease_s, expires_at) OVERRIDING SYSTEM VALUE
VALUES ($1::bigint, 'sequencer ' || $1::bigint, 'test', '0', 1, clock_timestamp() + interval '1 s')
    ON CONFLICT DO NOTHING
"""
_UNREGISTER = "DELETE FROM replica WHERE id = $1 AND label = 'sequencer ' || $1::bigint"


class Registered(SequencingStore):
    """Registers the replica for the moment in which it takes the leadership, which requires it.

    A sequencer under test has no lease.
    """

    async def take_leadership(self, replica_id: int) -> bool:
        await self._db.execute(_REGISTER, replica_id)
        taken = await super().take_leadership(replica_id)
        await self._db.execute(_UNREGISTER, replica_id)
        return taken


def always_notify(_: int, __: Mapping[int, int]) -> str | None:
    """Notify other replicas of every batch, without its lanes."""
    return READ_BATCHES


@dataclass(frozen=True, slots=True)
class Variant:
    """The parts of a sequencer; the defaults are the real ones."""

    sequencer: type[Sequencer] = Sequencer
    cursor: type[Cursor] = Cursor
    store: type[SequencingStore] = SequencingStore
    tracker: type[GapTracker] = GapTracker
    prepare: str = ""
    """SQL to run in the database first."""
    second_read: bool = True
    """Whether the proof reads ids again; it hides that a cursor is incorrect."""

    def build(
        self,
        connection: Connection,
        settings: Settings,
        *,
        replica_id: int | None = None,
        wakeups: Wakeups | None = None,
        store_mixin: type | None = None,
        on_batch: Callable[[SequencedBatch], object] = lambda _: True,
        notified: bool = False,
        busy_events: int = 1,
    ) -> tuple[Sequencer, Any]:
        """A sequencer and its store; `store_mixin` comes before the store's class.

        By default every event makes it busy, so that it falls asleep anew after each, and some lane
        waits for the content of the next event.
        """
        bases: tuple[type, ...] = (Registered, self.store)
        if store_mixin is not None:
            bases = (store_mixin, *bases)
        store_type = type(f"Registered{self.store.__name__}", bases, {})
        # The constructors read these settings.
        cursor_type = type(self.cursor.__name__, (self.cursor,), {"tracker_type": self.tracker})
        settled = {"cursor_type": cursor_type, "busy_events": busy_events}
        sequencer_type = type(self.sequencer.__name__, (self.sequencer,), settled)
        store = store_type(connection)
        if not self.second_read:
            store.proof.second_read = NO_SECOND_READ
        sequencer = sequencer_type(
            store,
            next(replica_ids) if replica_id is None else replica_id,
            settings,
            wakeups or Wakeups(),
            on_batch,
            always_notify,
            notified=notified,
        )
        return sequencer, store


REAL = Variant()


def settings(database: Database, **values: Any) -> Settings:
    """Settings of a sequencer of this database."""
    return Settings(dsn=SecretStr(database.dsn), dsn_source="test", **values)


async def session(database: Database, **options: Any) -> Connection:
    """A connection like the relay's: its search path is the schema, and its commits are durable."""
    like_relay = {"search_path": database.schema, "jit": "off", "synchronous_commit": "on"}
    return await database.connect(server_settings=like_relay, **options)


async def add_endpoints(database: Database, *lanes: int) -> None:
    """Endpoints for every event, one for each given lane count."""
    async with database.connection(server_settings={"search_path": database.schema}) as connection:
        for number, count in enumerate(lanes or (1,)):
            settings = EndpointSettings(
                name=f"endpoint {number}", url="http://127.0.0.1/", lanes=count
            )
            await endpoint_changes.add_endpoint(connection, database.schema, settings, actor="test")


def on_clock(tracker: type[GapTracker], ahead_s: Callable[[float], float]) -> type[GapTracker]:
    """The tracker with a clock that is `ahead_s(now)` ahead, so that tests need not wait."""

    class OnClock(tracker):  # type: ignore[misc, valid-type]
        proof_every_s = 0.0  # A script says what happens in each batch.

        def begin_batch(self, state: CursorState, before: LockHolders, now: float) -> None:
            super().begin_batch(state, before, now + ahead_s(now))

        def close_batch(
            self, ids: Sequence[int], cut: bool, after: LockHolders, now: float
        ) -> CursorChange:
            step: CursorChange = super().close_batch(ids, cut, after, now + ahead_s(now))
            return step

    return OnClock


class Slow(SequencingStore):
    """Reads the events and the holders in two statements.

    In the product they are one statement, whose snapshot is older than its view of the sequence and
    its holders; here another action can run in between.
    """

    async def read(
        self,
        high: int | None,
        gaps: Sequence[Range],
        limit: int,
        *,
        with_holders: bool,
        with_content: bool = False,
    ) -> Reading:
        events = await self.events(high, gaps, limit)
        last_id, wakeup, *cursor = await self._db.fetchrow(
            "SELECT coalesce(pg_sequence_last_value($1::oid::regclass), 0),"
            " pg_sequence_last_value('wakeup'::regclass), writer, version FROM cursor",
            self.proof.sequence,
        )
        fresh = [e.id for e in events if high is not None and e.id > high]
        missing = with_holders or (fresh and fresh[-1] - (high or 0) > len(fresh))
        waiting = 0
        if events and last_id - event_reads.IN_FLIGHT_MIN >= events[-1].id:
            waiting = await self._db.fetchval(event_reads.COUNT_WAITING_PRODUCERS)
        holders = await self.holders_after_read() if missing else None
        return Reading(events, last_id, wakeup, waiting, holders, *cursor)

    async def events(
        self, high: int | None, gaps: Sequence[Range], limit: int
    ) -> list[RoutableEvent]:
        los, his = [lo for lo, _ in gaps], [hi for _, hi in gaps]
        rows = await self._db.fetch(event_reads.READ_EVENTS, high, limit, los, his)
        return [RoutableEvent(*row) for row in rows]

    async def holders_after_read(self) -> LockHolders:
        return await SequencingStore.holders(self)


class Hooked(Slow):
    """Runs actions between two of its statements.

    A hook runs once, right before the named statement; `holders_after_read` follows the read of the
    events.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._hooks: defaultdict[str, list[Callable[[], Awaitable[object]]]] = defaultdict(list)

    def before(self, statement: str, action: Callable[[], Awaitable[object]]) -> None:
        """Run `action` once before the next statement of this name."""
        self._hooks[statement].append(action)

    async def _run_hooks(self, statement: str) -> None:
        for action in self._hooks.pop(statement, ()):
            await action()

    async def holders(self) -> LockHolders:
        await self._run_hooks("holders")
        return await super().holders()

    async def events(
        self, high: int | None, gaps: Sequence[Range], limit: int
    ) -> list[RoutableEvent]:
        await self._run_hooks("read")
        return await super().events(high, gaps, limit)

    async def holders_after_read(self) -> LockHolders:
        await self._run_hooks("holders_after_read")
        return await super().holders_after_read()

    async def write(self, *batch: Any, **options: Any) -> Any:
        await self._run_hooks("write")
        return await super().write(*batch, **options)


class Dawdling(SequencingStore):
    """Delays its statements, as over a slow network.

    The pauses are part of the workload: they widen the windows in which a producer, or another
    replica, can act between two statements.
    """

    rng: random.Random
    chances: Mapping[str, float]
    longest_s: float

    async def _dawdle(self, statement: str) -> None:
        if self.rng.random() < self.chances.get(statement, 0):
            await asyncio.sleep(self.rng.random() * self.longest_s)

    async def holders(self) -> LockHolders:
        await self._dawdle("holders")
        return await super().holders()

    async def write(self, *batch: Any, **options: Any) -> Any:
        await self._dawdle("write")
        return await super().write(*batch, **options)


class DawdlingInReads(Dawdling, Slow):
    """Also pauses where the product has one statement."""

    async def events(
        self, high: int | None, gaps: Sequence[Range], limit: int
    ) -> list[RoutableEvent]:
        await self._dawdle("read")
        return await super().events(high, gaps, limit)

    async def holders_after_read(self) -> LockHolders:
        await self._dawdle("holders_after_read")
        return await super().holders_after_read()


class Replica:
    """A sequencer that runs batches, restarts, forgets its state, and loses its connection.

    The outcome of its open transactions is read from the tables, as in the product: a lost
    connection makes a new replica.
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
        take_chance: float,
    ) -> None:
        self._database = database
        self._rng = rng
        self._events_max = events_max
        self._variant = variant
        # In some lives gaps become old after a twentieth of a second.
        self._hasty_share = hasty_share
        self._take_chance = take_chance
        self._hasty = replace(variant, tracker=on_clock(variant.tracker, lambda now: 19 * now))
        values = {"rng": rng, "chances": dawdle, "longest_s": dawdle_s}
        self._mixins = [
            type(f"My{each.__name__}", (each,), values) for each in (Dawdling, DawdlingInReads)
        ]
        self._connection: Connection | None = None
        self._sequencer: Sequencer | None = None
        self._reading: asyncio.Task[None] | None = None
        self.working = asyncio.Event()
        """Whether it runs; cleared, it ends its life after a turn."""
        self.working.set()
        self.old_gaps = 0
        self.lives = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Run batches until `stop` is set."""
        while not stop.is_set():
            if not self.working.is_set():
                self.close()
                await self.working.wait()
            try:
                turn = await self._turn()
            except LOST:  # Other errors fail the test: a new life would hide a wrong state.
                self.close()
                turn = BatchResult.EMPTY
            if turn is not BatchResult.WRITTEN:
                # Idle: leave the processor to the producers.
                await asyncio.sleep(self._rng.random() * 0.005)
        self.close()

    async def _turn(self) -> BatchResult:
        if self._sequencer is None or self._rng.random() < self.restart_chance:
            self.close()
            self._sequencer = await self._begin_life()
        if not self._sequencer.cursor.leads and self._rng.random() >= self._take_chance:
            return BatchResult.EMPTY
        if self._rng.random() < self.forget_chance:
            self._sequencer.cursor.forget()
        if self._rng.random() < self.lose_chance:
            # Close the connection wherever the batch then is, also in its COMMIT.
            assert self._connection is not None
            asyncio.get_running_loop().call_later(
                self._rng.random() * 0.01, self._connection._transport.abort
            )
        return await self._sequencer.sequence_batch()

    async def _begin_life(self) -> Sequencer:
        self._connection = await session(self._database)
        self.lives += 1
        limits = {
            "batch_events_max": self._rng.choice(self._events_max),
            "batch_deliveries_max": self._rng.choice([10, 100, 1000]),
        }
        hasty = self._rng.random() < self._hasty_share
        sequencer, store = (self._hasty if hasty else self._variant).build(
            self._connection,
            settings(self._database, **limits),
            store_mixin=self._rng.choice(self._mixins),
        )
        self._count_old_gaps(store)
        await store.check()
        reader = FeedReader(
            sequencer.cursor.feeder,
            functools.partial(session, self._database),
            lambda connection: (FeedStore(connection), FilterStore(connection)),
            WakeEvent(),
            60.0,
        )
        self._reading = asyncio.create_task(reader.run())
        return sequencer

    def _count_old_gaps(self, store: SequencingStore) -> None:
        write = store.write

        async def counted(batch: int, step: CursorChange, *rest: Any, **options: Any) -> Any:
            self.old_gaps += len(step.old_opened)
            return await write(batch, step, *rest, **options)

        store.write = counted  # type: ignore[method-assign]

    def close(self) -> None:
        """End this life as a crash would."""
        if self._connection is not None:
            self._connection.terminate()
        if self._reading is not None:
            self._reading.cancel()
        self._connection = self._sequencer = self._reading = None

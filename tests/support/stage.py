"""A stage for scripts: one sequencer that runs batches on demand, producers that run statement by
statement, and a manual clock.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.relay.sequencing.cursor import BatchResult
from tests.support.sequencers import (
    Hooked,
    Variant,
    add_endpoints,
    on_clock,
    session,
    settings,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from asyncpg import Connection

    from outbox.relay.sequencing.sequencer import Sequencer
    from tests.support.postgres import Database

INSERT = """
INSERT INTO relay.outbox (type, key, payload)
VALUES ('app.scripted', $1, CASE WHEN $2::bigint IS NULL THEN '{}'::jsonb
                                 ELSE jsonb_build_object('v', $2::bigint) END)
RETURNING id
"""
UNASSIGNED = "SELECT pg_current_xact_id_if_assigned() IS NULL"


class Actor:
    """A producer. Events with `v` belong to one key and must arrive in the order of `v`."""

    def __init__(self, connection: Connection) -> None:
        self._db = connection
        self.execute = connection.execute
        self.fetchval = connection.fetchval

    async def publish(self, v: int | None = None) -> int:
        """Insert one event; returns its id."""
        own_id: int = await self._db.fetchval(INSERT, None if v is None else "key", v)
        return own_id

    async def open(self, v: int | None = None) -> int:
        """Begin a transaction and insert one event."""
        await self.begin()
        return await self.publish(v)

    async def begin(self, isolation: str = "READ COMMITTED") -> None:
        await self._db.execute(f"BEGIN ISOLATION LEVEL {isolation}")

    async def commit(self) -> None:
        await self._db.execute("COMMIT")

    async def rollback(self) -> None:
        await self._db.execute("ROLLBACK")

    async def take_id(self) -> int:
        """Begin a transaction that has an outbox id but no xid."""
        while True:
            await self.begin()
            own_id: int = await self._db.fetchval("SELECT nextval('relay.outbox_id_seq')")
            if await self._db.fetchval(UNASSIGNED):
                return own_id
            # One nextval of 32 is WAL-logged, and needs an xid for that.
            await self.rollback()

    async def use_id(self, own_id: int) -> None:
        """Insert an event with an id allocated before, which only the owner may do."""
        await self._db.execute(
            "INSERT INTO relay.outbox (id, type, payload) OVERRIDING SYSTEM VALUE "
            "VALUES ($1, 'app.scripted', '{}')",
            own_id,
        )


class Stage:
    """One sequencer of a variant in a database with one endpoint."""

    def __init__(self, database: Database, variant: Variant, *, strict: bool) -> None:
        self._database = database
        self._strict = strict
        self._remembers = getattr(variant.cursor, "remembers", False)
        self._ahead_s = 0.0
        # The clock advances by `pass_time` only.
        stopped = on_clock(variant.tracker, lambda now: self._ahead_s - now)
        self._variant = replace(variant, tracker=stopped, second_read=strict)
        self._connection: Connection | None = None
        self._sequencer: Sequencer
        self._store: Hooked

    async def begin(self) -> None:
        """Prepare the database and the sequencer."""
        async with self._database.connection() as connection:
            if self._variant.prepare:
                await connection.execute(self._variant.prepare)
        await add_endpoints(self._database, 1)
        await self.reconnect()

    async def actor(self) -> Actor:
        return Actor(await self._database.connect())

    async def actors(self, count: int) -> list[Actor]:
        return [await self.actor() for _ in range(count)]

    def pass_time(self, seconds: float) -> None:
        self._ahead_s += seconds

    async def limit(self, events_max: int) -> None:
        """Limit the batches to this many events."""
        self._sequencer.cursor.reader._settings = settings(
            self._database, batch_events_max=events_max
        )

    async def reconnect(self) -> None:
        """Reconnect the sequencer, as after a restart of the server.

        A real sequencer is also new then; one that remembers is not.
        """
        if self._connection is not None:
            await self._connection.close()  # Its locks are free now.
        connection = self._connection = await session(self._database)
        if self._remembers and hasattr(self, "_sequencer"):
            self._store._db = self._store.proof._db = connection
        else:
            self._sequencer, self._store = self._variant.build(
                connection,
                settings(self._database),
                store_mixin=Hooked,
            )
        await self._store.check()

    def forget(self) -> None:
        """Reset the state, as when a commit is in doubt."""
        self._sequencer.cursor.forget()

    async def turn(
        self, *, asleep_s: int | None = None, **before: Callable[[], Awaitable[object]]
    ) -> BatchResult:
        """Run one batch; `read=action` runs an action right before the read, and so on."""
        for statement, action in before.items():
            self._store.before(statement, action)
        turn = await self._sequencer.cursor.sequence_batch(asleep_s=asleep_s)
        if turn is BatchResult.STALE:
            turn = await self._sequencer.cursor.sequence_batch(asleep_s=asleep_s)
        return turn

    async def turn_in_doubt(self) -> None:
        """Run one batch that is committed but reports an error."""
        store: Any = self._store
        write = store.write

        async def write_in_doubt(*batch: Any, **options: Any) -> Any:
            await write(*batch, **options)
            raise ConnectionResetError

        store.write = write_in_doubt
        with suppress(ConnectionResetError):
            await self._sequencer.sequence_batch()
        store.write = write

    async def turn_of_another(self) -> None:
        """Run one batch of a second replica."""
        sequencer, store = self._variant.build(
            await session(self._database), settings(self._database)
        )
        await store.check()
        await sequencer.sequence_batch()

    async def settle(self) -> None:
        """Run batches until the sequencer is idle."""
        await self.limit(1000)
        # A gap is closed by the batch after the one that found its holders gone.
        idle = 0
        for _ in range(20):
            idle = idle + 1 if await self.turn() is BatchResult.EMPTY else 0
            if idle == 2:
                return
        raise AssertionError("the sequencer does not come to rest")

    async def expect_sequenced(self, *ids: int) -> None:
        """Expect these sequenced ids, in this order (strict stages only)."""
        async with self._database.connection() as connection:
            rows = await connection.fetch("SELECT outbox_id FROM relay.delivery ORDER BY seq")
        assert not self._strict or [row["outbox_id"] for row in rows] == list(ids)

    async def expect_old_gaps(self, *gaps: tuple[int, int]) -> None:
        """Expect these old gaps (strict stages only)."""
        async with self._database.connection() as connection:
            rows = await connection.fetch("SELECT lo, hi FROM relay.gap ORDER BY lo")
        assert not self._strict or [(row["lo"], row["hi"]) for row in rows] == list(gaps)

    async def crash(self) -> None:
        """Crash the server (unwritten data is lost) and restart it."""
        await asyncio.to_thread(self._database.server.embedded.restart, immediate=True)
        await self.reconnect()


@asynccontextmanager
async def staged(database: Database, variant: Variant, *, strict: bool) -> AsyncIterator[Stage]:
    """A prepared stage; a `strict` one checks every step, others only the end."""
    stage = Stage(database, variant, strict=strict)
    await stage.begin()
    yield stage

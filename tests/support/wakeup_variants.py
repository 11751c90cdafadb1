"""Incorrect ways to fall asleep, which lose wake-ups."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.relay.sequencing.sequencer import Sequencer
from outbox.store.cluster.leadership import AWAKE
from tests.support.sequencers import Slow, Variant, session

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.relay.sequencing.cursor import BatchResult
    from outbox.store.sequencing.event_reads import Reading
    from tests.support.postgres import Database

# The flag as an ordinary row, read by the trigger in the producer's snapshot.
FLAG_ROW = """
CREATE TABLE relay.flag (until bigint NOT NULL);
INSERT INTO relay.flag VALUES (1);
GRANT SELECT ON relay.flag TO PUBLIC;
CREATE OR REPLACE FUNCTION relay.notify_relay() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT until FROM relay.flag) > extract(epoch FROM clock_timestamp()) THEN
        PERFORM pg_notify('relay', '');
    END IF;
    RETURN NULL;
END $$;
DROP TRIGGER notify_relay ON relay.outbox;
CREATE TRIGGER notify_relay AFTER INSERT ON relay.outbox
    FOR EACH STATEMENT EXECUTE FUNCTION relay.notify_relay();
"""


class RowStore(Slow):
    """Keeps the flag in a row."""

    database: Database
    _flag: Connection | None = None

    async def _set_flag(self, value: int) -> None:
        # Written at once, like a sequence, and not at the end of the batch.
        if self._flag is None:
            self._flag = await session(self.database)
        await self._flag.execute("UPDATE flag SET until = $1", value)

    async def fall_asleep(self, replica_id: int, for_s: int) -> bool:
        now = "SELECT extract(epoch FROM clock_timestamp())::bigint"
        await self._set_flag(await self._db.fetchval(now) + for_s)
        return True

    async def release_leadership(self, replica_id: int) -> bool:
        await self._set_flag(AWAKE)
        return await super().release_leadership(replica_id)

    async def read(self, *cursor: Any, **options: Any) -> Reading:
        reading = await super().read(*cursor, **options)
        return replace(reading, wakeup=await self._db.fetchval("SELECT until FROM flag"))

    async def write(self, *batch: Any, awake: bool, **options: Any) -> Any:
        if awake:
            await self._set_flag(AWAKE)
        return await super().write(*batch, awake=False, **options)


class BlindSequencer(Sequencer):
    """Does not read the producers in flight before it sleeps."""

    async def _fall_asleep(self) -> BatchResult:
        turn = await super()._fall_asleep()
        self.cursor.reader.watched = frozenset()
        return turn


class LateStore(Slow):
    """Sets the flag after the last read."""

    _late: tuple[int, int] | None = None

    async def fall_asleep(self, replica_id: int, for_s: int) -> bool:
        self._late = (replica_id, for_s)
        return True

    async def read(self, *cursor: Any, **options: Any) -> Reading:
        reading = await super().read(*cursor, **options)
        if self._late is not None:
            await super().fall_asleep(*self._late)
            self._late = None
        return reading


FLAG_IS_A_ROW = Variant(store=RowStore, prepare=FLAG_ROW)
WITHOUT_HOLDERS = Variant(sequencer=BlindSequencer)
LATE_FLAG = Variant(store=LateStore)

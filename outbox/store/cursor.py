"""The sequencer's SQL: the cursor row, the gaps, the batch.

All of it runs on one connection, in READ COMMITTED transactions, as separate
statements: each needs a snapshot of its own, and their order is the argument
of `outbox.core.gaps`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from asyncpg import Range as PgRange

from outbox.core.gaps import CursorState, Holders, Range, Step
from outbox.core.sequencing import Sighting
from outbox.errors import CursorBroken, SchemaMissing
from outbox.store.filters import FilterStore
from outbox.store.notify import WAKE_OWNERS
from outbox.store.routing import RoutingStore

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from asyncpg import Connection
    from asyncpg.transaction import Transaction

    from outbox.core.sequencing import Deliveries

AWAKE = 1
"""The wake-up flag's value while the relay reads without being asked."""

# The sequence behind outbox.id, and whether it hands ids out one by one in
# ascending order, which the cursor's argument needs.
SEQUENCE = """
SELECT s.seqrelid AS oid,
       s.seqcache = 1 AND s.seqincrement = 1 AND NOT s.seqcycle AS plain,
       c.relpersistence = 'p' AS logged,
       NOT pg_is_in_recovery() AS primary
  FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid
 WHERE s.seqrelid = pg_get_serial_sequence('outbox', 'id')::regclass
"""

# SKIP LOCKED: another replica that sequences just now is as good as we are.
LOCK_CURSOR = "SELECT writer, version FROM cursor FOR UPDATE SKIP LOCKED"

# The newest batch is the cursor's state.
READ_STATE = "SELECT batch, high, young FROM batch ORDER BY batch DESC LIMIT 1"

READ_OLD_GAPS = "SELECT lo, hi FROM gap"

# Who may still insert an id that was already allocated.  The lock is taken
# before the allocation and belongs to the top transaction until its end.
HOLDERS = """
SELECT virtualtransaction FROM pg_locks
 WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND relation = $1
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

# Which of the holders are *running*: have a transaction that this statement's
# snapshot still takes for unfinished, so that a read before it saw none of its
# rows.  The lock on the sequence does not tell, because a transaction's rows
# are visible before its locks are let go.  Ids in pg_locks have 32 bits; what
# is "at or after xmax" among them is decided modulo 2^32.
READ_RUNNING = """
WITH here AS MATERIALIZED (
    SELECT pg_snapshot_xmax(s)::text::bigint & 4294967295 AS xmax,
           array(SELECT x::text::bigint & 4294967295 FROM pg_snapshot_xip(s) x) AS xip
      FROM pg_current_snapshot() s)
SELECT DISTINCT l.virtualtransaction
  FROM pg_locks l, here
 WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock'
   AND (l.transactionid::text::bigint = ANY (here.xip)
        OR (l.transactionid::text::bigint - here.xmax) & 4294967295 < 2147483648)
"""

# Gaps and everything above the highest id, in id order.  Ranges as rows: an OR
# over a multirange would scan the whole table.
READ_EVENTS = """
SELECT id, tenant, type,
       CASE WHEN key IS NULL THEN id
            ELSE hashtextextended(key, 0) & 9223372036854775807 END AS spread
  FROM (SELECT o.id, o.tenant, o.type, o.key
          FROM unnest($2::bigint[], $3::bigint[]) AS gap(lo, hi)
         CROSS JOIN LATERAL (
               SELECT id, tenant, type, key FROM outbox
                WHERE id BETWEEN gap.lo AND gap.hi ORDER BY id LIMIT $4) o
         UNION ALL
        (SELECT id, tenant, type, key FROM outbox
          WHERE id > $1 ORDER BY id LIMIT $4)) event
 ORDER BY id LIMIT $4
"""

# Read after the events, so that none of them can be above the sequence.
LOOK = f"""
SELECT coalesce(pg_sequence_last_value($1::oid::regclass), 0) AS last_id,
       pg_sequence_last_value('wakeup'::regclass) AS wakeup,
       array({HOLDERS}) AS holders
"""

# Costs a tenth of a batch that finds nothing.
READ_LAST_ID = "SELECT coalesce(pg_sequence_last_value($1::oid::regclass), 0)"

READ_COUNTERS = "SELECT lane_id, last_seq FROM lane_counter WHERE lane_id = ANY ($1)"

# The whole batch: its row, the deliveries, and the counters they came from.  The
# owners of the lanes hear of it when it commits.
WRITE_BATCH = f"""
WITH row AS (
    INSERT INTO batch (batch, high, young, found, dead, events, deliveries, lanes, writer)
    VALUES ($1, $2, $3, $4, $5, $6, cardinality($9::bigint[]), $7, $12)),
counted AS (
    UPDATE lane_counter c SET last_seq = n.last_seq
      FROM unnest($7::bigint[], $8::bigint[]) AS n(lane_id, last_seq)
     WHERE c.lane_id = n.lane_id),
given AS (
    INSERT INTO delivery (lane_id, batch, seq, outbox_id, replay_id, replay_seq)
    SELECT d.lane_id, $1, d.seq, d.outbox_id, d.replay_id, d.replay_seq
      FROM unnest($9::bigint[], $10::bigint[], $11::bigint[], $13::bigint[], $14::bigint[])
           AS d(lane_id, seq, outbox_id, replay_id, replay_seq))
{WAKE_OWNERS} WHERE cardinality($9::bigint[]) > 0
"""  # noqa: S608 (constants only)

CLOSE_OLD_GAPS = "DELETE FROM gap WHERE lo = ANY ($1)"
OPEN_OLD_GAPS = "INSERT INTO gap (lo, hi) SELECT * FROM unnest($1::bigint[], $2::bigint[])"
SIGN_CURSOR = "UPDATE cursor SET writer = $1"

# A sequence, because reading one ignores snapshots; so setting it is not undone
# by a rollback either, and nobody waits for it to reach the disk.
SET_WAKEUP = "SELECT setval('wakeup', $1)"
SLEEP_UNTIL = "SELECT extract(epoch FROM clock_timestamp())::bigint + $1::bigint"


@dataclass(frozen=True, slots=True)
class Lock:
    """The cursor row, held until the transaction ends."""

    writer: int | None
    version: int


@dataclass(frozen=True, slots=True)
class Look:
    """What is seen right after a read."""

    last_id: int
    wakeup: int
    holders: Holders


class CursorStore:
    """The sequencer's side of the database, on one connection.

    Not safe for concurrent use; asyncpg's errors pass through.
    """

    ISOLATION: Literal["read_committed"] = "read_committed"

    def __init__(self, connection: Connection[Any]) -> None:
        self._db = connection
        self._sequence_oid: int | None = None
        self.routing = RoutingStore(connection)
        self.filters = FilterStore(connection)

    async def check(self) -> None:
        """Hold the sequence to what the cursor relies on.

        Raises:
            CursorBroken: it was altered, or this server is a standby.
        """
        row = await self._db.fetchrow(SEQUENCE)
        if row is None:
            raise SchemaMissing('outbox.id has no sequence; was "outbox migrate" run?')
        self._sequence_oid = row["oid"]
        if not row["primary"]:
            raise CursorBroken("this server is a standby; connect to the primary")
        if not row["plain"] or not row["logged"]:
            raise CursorBroken(
                "the sequence of outbox.id must be LOGGED with CACHE 1, INCREMENT 1, NO CYCLE; "
                "put it back with ALTER SEQUENCE"
            )

    def transaction(self) -> Transaction:
        """A batch's transaction.

        Its isolation is set here, whatever the server's default: under
        REPEATABLE READ all statements would share the first one's snapshot
        and events would be lost.
        """
        return self._db.transaction(isolation=self.ISOLATION)

    async def lock(self) -> Lock | None:
        """Take the cursor row; None when another replica holds it."""
        row = await self._db.fetchrow(LOCK_CURSOR)
        return row and Lock(row["writer"], row["version"])

    async def state(self) -> CursorState:
        """The cursor as the tables tell it."""
        row = await self._db.fetchrow(READ_STATE)
        old = await self._db.fetch(READ_OLD_GAPS)
        return CursorState(
            batch=row["batch"],
            high=row["high"],
            young=tuple((r.lower, r.upper - 1) for r in row["young"]),
            old=tuple((r["lo"], r["hi"]) for r in old),
        )

    async def holders(self) -> Holders:
        """Everyone who may still insert an id allocated by now."""
        rows = await self._db.fetch(HOLDERS, self._sequence_oid)
        return frozenset(r["virtualtransaction"] for r in rows)

    async def read(self, high: int, gaps: Sequence[Range], limit: int) -> list[Sighting]:
        """Committed events in the gaps and above `high`, by id, at most `limit`."""
        rows = await self._db.fetch(
            READ_EVENTS, high, [lo for lo, _ in gaps], [hi for _, hi in gaps], limit
        )
        return [Sighting(r["id"], r["tenant"], r["type"], r["spread"]) for r in rows]

    async def look(self) -> Look:
        """The sequence, the wake-up flag and the holders after a read."""
        row = await self._db.fetchrow(LOOK, self._sequence_oid)
        return Look(row["last_id"], row["wakeup"], frozenset(row["holders"]))

    async def last_id(self) -> int:
        """The last id that was given to anybody, committed or not."""
        last_id: int = await self._db.fetchval(READ_LAST_ID, self._sequence_oid)
        return last_id

    async def running(self) -> Holders:
        """Everyone whose rows no read before this one can have seen."""
        rows = await self._db.fetch(READ_RUNNING)
        return frozenset(r["virtualtransaction"] for r in rows)

    async def counters(self, lane_ids: Collection[int]) -> dict[int, int]:
        """The last number of each lane."""
        rows = await self._db.fetch(READ_COUNTERS, list(lane_ids))
        return {r["lane_id"]: r["last_seq"] for r in rows}

    async def write(
        self, batch: int, step: Step, events: int, deliveries: Deliveries, writer: int
    ) -> None:
        """Write one batch: its row, its deliveries, counters and gaps.

        When it commits, other replicas are told that their lanes have something.
        """
        await self._db.execute(
            WRITE_BATCH,
            batch,
            step.high,
            _multirange(step.young),
            _multirange(step.found),
            _multirange(step.dead),
            events,
            list(deliveries.counters),
            list(deliveries.counters.values()),
            deliveries.lane_ids,
            deliveries.seqs,
            deliveries.outbox_ids,
            writer,
            deliveries.replay_ids,
            deliveries.replay_seqs,
        )
        if step.old_closed:
            await self._db.execute(CLOSE_OLD_GAPS, [lo for lo, _ in step.old_closed])
        if step.old_opened:
            await self._db.execute(
                OPEN_OLD_GAPS,
                [lo for lo, _ in step.old_opened],
                [hi for _, hi in step.old_opened],
            )

    async def sign(self, writer: int) -> None:
        """Put the writer's name on the cursor row."""
        await self._db.execute(SIGN_CURSOR, writer)

    async def set_wakeup(self, value: int) -> None:
        """Set the wake-up flag; only while holding the cursor row."""
        await self._db.execute(SET_WAKEUP, value)

    async def set_asleep(self, for_s: int) -> int:
        """Say that the relay may be asleep for the next seconds; returns the flag."""
        until: int = await self._db.fetchval(SLEEP_UNTIL, for_s)
        await self.set_wakeup(until)
        return until


def _multirange(ranges: Iterable[Range]) -> list[PgRange]:
    return [PgRange(lo, hi + 1) for lo, hi in ranges]

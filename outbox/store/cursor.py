"""The sequencer's SQL: the cursor row, the gaps, the batch.

All of it runs on one connection as separate statements: each needs a snapshot
of its own, and their order is the argument of `outbox.core.sequencing.gaps`.  Who holds the
cursor row over several of them does so in a READ COMMITTED transaction.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from asyncpg import Range as PgRange

from outbox.core.delivery.operational_events import LAGGING_EVERY_S, LAGGING_S
from outbox.core.sequencing.gaps import CursorState, Holders, Range, Step
from outbox.errors import CursorBroken, SchemaMissing
from outbox.store import timeline
from outbox.store.array_params import as_text, sparse
from outbox.store.channels import WAKE_OWNERS
from outbox.store.event_reads import AWAKE, HOLDERS, READ, READ_RUNNING, reading_of
from outbox.store.filters import FilterStore
from outbox.store.lanes import EVENT, READ_COUNTERS, delivery_of
from outbox.store.operational_events import END_LAGGING, TELL_LAGGING
from outbox.store.records import Fenced
from outbox.store.replay_feed import ReplayingStore
from outbox.store.routing import RoutingStore

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from datetime import datetime

    from asyncpg import Connection
    from asyncpg.transaction import Transaction

    from outbox.core.delivery.message import Delivery
    from outbox.core.sequencing.router import Deliveries
    from outbox.store.event_reads import Reading
    from outbox.store.lanes import LoadedLane

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
LOCK_CURSOR = """
SELECT writer, version, timeline, server_timeline() AS server_timeline,
       (SELECT max(batch) FROM batch) AS batch
  FROM cursor FOR UPDATE SKIP LOCKED
"""

# The newest batch is the cursor's state.
READ_STATE = "SELECT batch, high, young FROM batch ORDER BY batch DESC LIMIT 1"

READ_OLD_GAPS = "SELECT lo, hi FROM gap"

# Who leads, whether it may be replaced, and whether it has left events lying.
# Late events in old gaps are not looked for: there can be very many of those.
READ_STANDING = """
SELECT c.writer AS leader, b.batch,
       c.writer IS NULL OR c.writer = $1
           OR NOT EXISTS (SELECT FROM replica r
                           WHERE r.id = c.writer AND r.expires_at > clock_timestamp()) AS free,
       EXISTS (SELECT FROM outbox WHERE id > b.high)
           OR EXISTS (SELECT FROM unnest(b.young) AS gap(ids)
                       CROSS JOIN LATERAL (
                             SELECT FROM outbox
                              WHERE id >= lower(gap.ids) AND id < upper(gap.ids) LIMIT 1) o)
           AS behind
  FROM cursor c, (SELECT batch, high, young FROM batch ORDER BY batch DESC LIMIT 1) b
"""

GIVEN_BYTES_MAX = 32 << 10
"""Payloads and headers that come back with a batch."""

# The whole batch: its row, the deliveries, and the counters they came from; by the
# leader alone, only while nobody changed who gets what, and on the server that all
# of it was read from: a proxy may have led us to one that does not know our last
# batches.  No row at all says that nothing was done.  Other replicas, if there are
# any and they are to be told, hear of it when it commits.  Some lanes get their
# events back, so that these need not be read again; but no more than the
# connection's buffers take, whoever reads them or not: the row is locked until all
# of it is sent, and a relay that is frozen must not hold it.
WRITE_BATCH = f"""
WITH held AS MATERIALIZED (
    SELECT FROM cursor
     WHERE writer = $12 AND version = $15 AND ($25::bigint IS NULL OR server_timeline() = $25)
       AND EXISTS (SELECT FROM batch WHERE batch = $1::bigint - 1)
       FOR UPDATE SKIP LOCKED),
row AS (
    INSERT INTO batch (batch, high, young, found, dead, events, deliveries, lanes, writer,
                       committed_after)
    SELECT $1, $2, $3, $4, $5, $6, $24::bigint, $7, $12, $22 FROM held),
risen AS MATERIALIZED (
    SELECT n.*
      FROM held, unnest($7::bigint[], $23::bigint[], $8::bigint[]) AS n(lane_id, was, last_seq)),
counted AS MATERIALIZED (
    SELECT count_on(lane_id, was, last_seq) FROM risen),
given AS (
    INSERT INTO delivery (lane_id, batch, seq, outbox_id, replay_id, replay_seq, backfill_id,
                          copy_id, was_backfill_id)
    SELECT d.lane_id, $1, d.seq, d.outbox_id, d.replay_id, d.replay_seq, d.backfill_id, d.copy_id,
           d.was_backfill_id
      FROM held, unnest($9::text::bigint[], $10::text::bigint[], $11::text::bigint[],
                        $13::bigint[], $14::bigint[], $19::bigint[], $20::bigint[], $21::bigint[])
           AS d(lane_id, seq, outbox_id, replay_id, replay_seq, backfill_id, copy_id,
                was_backfill_id)
    RETURNING lane_id, batch, seq, outbox_id),
awake AS MATERIALIZED (SELECT setval('wakeup', {AWAKE}) FROM held WHERE $16),
told AS MATERIALIZED (
    {WAKE_OWNERS.replace("$1", "$18")} FROM held
     WHERE $18::text IS NOT NULL AND $24 > 0
       AND EXISTS (SELECT FROM replica WHERE id <> $12))
SELECT lane_id, seq, batch, outbox_id, {EVENT},
       NULL::bigint AS backfill_id, false AS is_copy, NULL::bigint AS was_backfill_id,
       date_part('epoch', $22::timestamptz) AS committed_after, NULL::uuid AS was_endpoint_id,
       NULL::bigint AS was_generation, NULL::bigint AS was_slot, NULL::bigint AS was_seq,
       (SELECT count(*) FROM awake) + (SELECT count(*) FROM told)
           + (SELECT count(*) FROM counted) AS done
  FROM held
  LEFT JOIN LATERAL (
       SELECT given.*, o.*,
              sum(octet_length(o.payload::text) + coalesce(octet_length(o.headers::text), 0))
                  OVER (ORDER BY given.lane_id, given.seq ROWS UNBOUNDED PRECEDING) AS bytes
         FROM given
        CROSS JOIN LATERAL (
              SELECT event_id, tenant, type, key, payload, headers,
                     created_at AS published_at, expires_at
                FROM outbox WHERE id = given.outbox_id LIMIT 1) o
        WHERE given.lane_id = ANY ($17::bigint[])) found
       ON bytes <= {GIVEN_BYTES_MAX} AND payload IS NOT NULL
 ORDER BY lane_id, seq
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
    timeline: int | None
    """The server's, when it was last sequenced; None: nobody knew it."""
    server_timeline: int | None
    """The server's now; None: it does not say."""
    batch: int
    """The newest."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How the replica that leads is doing."""

    leader: int | None
    batch: int
    free: bool
    """Nobody leads, or whoever does is gone, or it is who asks."""
    behind: bool
    """There are events that are not sequenced."""


class CursorStore:
    """The sequencer's side of the database, on one connection.

    Not safe for concurrent use; asyncpg's errors pass through.

    Args:
        timeline: the server's, when this replica registered; None: not known.

    Raises:
        Fenced: (from `lock` and `read`) this server is on another timeline, where
            this replica is nobody.
    """

    ISOLATION: Literal["read_committed"] = "read_committed"

    def __init__(self, connection: Connection[Any], timeline: int | None = None) -> None:
        self._db = connection
        self._timeline = timeline
        self._sequence_oid: int | None = None
        self.routing = RoutingStore(connection)
        self.replaying = ReplayingStore(connection)
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
        """A transaction that may hold the cursor row.

        Its isolation is set here, whatever the server's default: under
        REPEATABLE READ all statements would share the first one's snapshot
        and events would be lost.  (A statement of its own has one snapshot under
        any isolation.)
        """
        return self._db.transaction(isolation=self.ISOLATION)

    async def lock(self) -> Lock | None:
        """Take the cursor row; None when another replica holds it."""
        row = await self._db.fetchrow(LOCK_CURSOR)
        if row is None:
            return None
        self._check_timeline(row["server_timeline"])
        return Lock(**dict(row))

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

    async def read(
        self, high: int, gaps: Sequence[Range], limit: int, *, more_gaps: bool
    ) -> Reading:
        """Committed events in the gaps and above `high`, by id, at most `limit`.

        Args:
            more_gaps: there are gaps that are not to be read.
        """
        rows = await self._db.fetch(
            READ,
            high,
            [lo for lo, _ in gaps],
            [hi for _, hi in gaps],
            limit,
            self._sequence_oid,
            more_gaps,
        )
        reading = reading_of(rows)
        self._check_timeline(reading.server_timeline)
        return reading

    async def running(self) -> Holders:
        """Everyone whose rows no read before this one can have seen."""
        rows = await self._db.fetch(READ_RUNNING)
        return frozenset(r["virtualtransaction"] for r in rows)

    async def counters(self, lane_ids: Collection[int]) -> dict[int, int]:
        """The last number of each lane."""
        rows = await self._db.fetch(READ_COUNTERS, list(lane_ids))
        return {r["lane_id"]: r["last_seq"] for r in rows}

    async def standing(self, me: int) -> Standing:
        """How the leader is doing, as replica `me` sees it."""
        row = await self._db.fetchrow(READ_STANDING, me)
        return Standing(row["leader"], row["batch"], row["free"], row["behind"])

    async def write(
        self,
        batch: int,
        step: Step,
        events: int,
        deliveries: Deliveries,
        writer: int,
        version: int,
        *,
        committed_after: datetime | None,
        awake: bool,
        wanted: Mapping[int, LoadedLane],
        tell: str | None,
    ) -> dict[int, list[Delivery]] | None:
        """Write one batch: its row, its deliveries and counters.

        Args:
            writer: must lead, or nothing is done;
            version: so must this be the version of who gets what.
            committed_after: see the table.
            awake: set the wake-up flag to "awake".
            wanted: lanes that want what they were given now.
            tell: what to tell other replicas when it commits, if lanes have something.

        Returns:
            What the wanted lanes were given, up to some bytes; None: nothing was done.
        """
        new = Counter(deliveries.lane_ids)
        rows = await self._db.fetch(
            WRITE_BATCH,
            batch,
            step.high,
            _multirange(step.young),
            _multirange(step.found),
            _multirange(step.dead),
            events,
            list(deliveries.counters),
            list(deliveries.counters.values()),
            as_text(deliveries.lane_ids),
            as_text(deliveries.seqs),
            as_text(deliveries.outbox_ids),
            writer,
            sparse(deliveries.replay_ids),
            sparse(deliveries.replay_seqs),
            version,
            awake,
            list(wanted),
            tell,
            sparse(deliveries.backfill_ids),
            sparse(deliveries.copy_ids),
            sparse(deliveries.was_backfill_ids),
            committed_after,
            [last_seq - new[lane_id] for lane_id, last_seq in deliveries.counters.items()],
            len(deliveries),
            self._timeline,
        )
        if not rows:
            return None
        given: dict[int, list[Delivery]] = {}
        for row in rows:
            if row["lane_id"] is not None:
                delivery = delivery_of(wanted[row["lane_id"]], row)
                given.setdefault(row["lane_id"], []).append(delivery)
        return given

    async def write_old_gaps(self, step: Step) -> None:
        """Write what a batch did to the table of old gaps, in its transaction."""
        await self._db.execute(CLOSE_OLD_GAPS, [lo for lo, _ in step.old_closed])
        await self._db.execute(
            OPEN_OLD_GAPS,
            [lo for lo, _ in step.old_opened],
            [hi for _, hi in step.old_opened],
        )

    async def sign(self, writer: int | None) -> None:
        """Put the writer's name on the cursor row."""
        await self._db.execute(SIGN_CURSOR, writer)

    async def begin_timeline(self, lock: Lock, actor: str) -> Lock:
        """Go on upon the server's timeline, with new lanes if there was another before.

        Only while holding the cursor row.
        """
        assert lock.server_timeline is not None
        if lock.timeline is None:
            await timeline.note(self._db, lock.server_timeline)
            return replace(lock, timeline=lock.server_timeline)
        await timeline.begin(self._db, lock.batch + 1, lock.timeline, lock.server_timeline, actor)
        return replace(lock, timeline=lock.server_timeline, version=lock.version + 1)

    async def tell_lagging(self, leader: int) -> bool:
        """Tell that events have waited for too long, if they have; whether it was told.

        Not if another one leads, or soon after it was told before.
        """
        told = await self._db.fetchval(
            TELL_LAGGING, leader, LAGGING_S, LAGGING_EVERY_S, self._timeline
        )
        return told is not None

    async def end_lagging(self, leader: int) -> bool:
        """Remember that they do not any more; False: the row is taken just now."""
        return await self._db.fetchval(END_LAGGING, leader) is not None

    async def set_wakeup(self, value: int) -> None:
        """Set the wake-up flag; only while holding the cursor row."""
        await self._db.execute(SET_WAKEUP, value)

    async def set_asleep(self, for_s: int) -> int:
        """Say that the relay may be asleep for the next seconds; returns the flag."""
        until: int = await self._db.fetchval(SLEEP_UNTIL, for_s)
        await self.set_wakeup(until)
        return until

    def _check_timeline(self, server_timeline: int | None) -> None:
        if self._timeline is not None and server_timeline != self._timeline:
            raise Fenced


def _multirange(ranges: Iterable[Range]) -> list[PgRange]:
    return [PgRange(lo, hi + 1) for lo, hi in ranges]

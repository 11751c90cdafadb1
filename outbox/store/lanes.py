"""The dispatcher's SQL: endpoints, lanes and what they owe."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from outbox.core.delivery.commands import Gone, Progress
from outbox.core.delivery.message import Delivery
from outbox.core.model.ids import lane_name
from outbox.store import endpoints as destinations
from outbox.store.connection.secrets import CLEAR

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.store.connection.secrets import Vault
    from outbox.store.endpoints import Endpoint

READ_LAST_BATCH = "SELECT max(batch) FROM batch"

# Checkpoint and counter of every lane that still owes something or may, or holds
# newer ones until an operator decides, and when the first delivery that it owes
# was given its number.  A lane has ended when there is a newer generation, or when
# whoever sequences next will begin one because the server's timeline changed.
READ_LANES = """
SELECT l.id, l.endpoint_id, l.generation, l.slot,
       l.generation < e.generation
           OR EXISTS (SELECT FROM cursor WHERE timeline <> server_timeline()) AS ended,
       c.last_seq, p.acked_seq, p.delivered_seq, p.floor_batch, p.head_seq, p.attempts, p.spent,
       p.first_attempt_at, p.next_attempt_at, p.last_answer, p.success_at,
       b.lane_id IS NOT NULL AS blocked,
       CASE WHEN c.last_seq > p.acked_seq THEN (
           SELECT batch.at
             FROM (SELECT d.batch FROM delivery d
                    WHERE d.lane_id = l.id AND d.batch >= p.floor_batch AND d.seq > p.acked_seq
                    ORDER BY d.batch, d.seq LIMIT 1) head
             JOIN batch USING (batch)) END AS owed_since
  FROM endpoint e
  JOIN lane l ON l.endpoint_id = e.id
  JOIN lane_progress p ON p.lane_id = l.id
 CROSS JOIN LATERAL (
       SELECT last_seq FROM lane_counter
        WHERE lane_id = l.id ORDER BY last_seq DESC LIMIT 1) c
  LEFT JOIN lane_block b ON b.lane_id = l.id
 WHERE e.id = ANY ($1)
   AND (l.generation = e.generation OR c.last_seq > p.acked_seq OR b.lane_id IS NOT NULL)
"""

# What was acknowledged after the checkpoint.  OFFSET 0 keeps it a look into each
# lane's own partitions: as a join it would be hashed against the whole log.
READ_TAIL = """
SELECT lane.id, a.seq, a.batch, a.started_at
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS lane(id, floor_batch, acked_seq)
 CROSS JOIN LATERAL (
       SELECT seq, batch, started_at FROM attempt
        WHERE lane_id = lane.id AND batch >= lane.floor_batch AND seq > lane.acked_seq
          AND outcome = 'delivered' OFFSET 0) a
"""

# What is read of an event.  Times are kept to those that Python has a name for;
# PostgreSQL knows others (infinity).  They come as epoch seconds, exact to the microsecond
# for a few centuries: asyncpg takes as long to make a time as for the rest of a row.
EVENT = """event_id, type, tenant, key,
       date_part('epoch', greatest(least(published_at, '9999-12-30'), '0001-01-02'))
           AS published_at,
       date_part('epoch', greatest(least(expires_at, '9999-12-30'), '0001-01-02')) AS expires_at,
       payload::text AS payload, headers::text AS headers"""

# Deliveries with their events.  `batch >=` keeps each lane to the partitions
# that can hold something for it.  An event that is gone is taken from the copy of
# the dead letter that this came of, and is otherwise left empty.
# LIMIT 1 keeps the events to a look by id: a join would hash the whole outbox.
# Large payloads come in smaller helpings, measured as they are stored.
# The columns come in the order of `delivery_of`.
READ_DELIVERIES = f"""
SELECT lane_id, seq, batch, outbox_id, {EVENT},
       backfill_id, is_copy, was_backfill_id,
       date_part('epoch', committed_after) AS committed_after,
       was_endpoint_id, was_generation, was_slot, was_seq
  FROM (SELECT lane.id AS lane_id, d.batch, d.seq, d.outbox_id, d.backfill_id,
               d.was_backfill_id, d.backfill_id IS NOT NULL AND EXISTS (
                   SELECT FROM replay_job WHERE id = d.backfill_id AND kind = 'lane') AS is_copy,
               coalesce(o.event_id, x.event_id) AS event_id,
               coalesce(o.tenant, x.tenant) AS tenant,
               coalesce(o.type, x.type) AS type,
               coalesce(o.key, x.key) AS key,
               coalesce(o.payload, x.payload) AS payload,
               coalesce(o.headers, x.headers) AS headers,
               coalesce(o.created_at, x.published_at) AS published_at,
               CASE WHEN coalesce(d.replay_id, d.backfill_id) IS NULL THEN o.expires_at END
                   AS expires_at,
               w.was_endpoint_id, w.was_generation, w.was_slot, w.was_seq, b.committed_after,
               sum(pg_column_size(coalesce(o.payload, x.payload))) OVER (
                   PARTITION BY lane.id ORDER BY d.seq
                   ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
          FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::int[])
               AS lane(id, floor_batch, after_seq, rows_max)
         CROSS JOIN LATERAL (
               SELECT batch, seq, outbox_id, replay_id, replay_seq, backfill_id, copy_id,
                      was_backfill_id
                 FROM delivery
                WHERE lane_id = lane.id AND batch >= lane.floor_batch AND seq > lane.after_seq
                ORDER BY batch, seq LIMIT lane.rows_max) d
          LEFT JOIN LATERAL (
               SELECT committed_after FROM batch WHERE batch = d.batch LIMIT 1) b ON true
          LEFT JOIN LATERAL (
               SELECT * FROM outbox WHERE id = d.outbox_id LIMIT 1) o ON true
          LEFT JOIN LATERAL (
               SELECT * FROM dead_letter WHERE id = d.copy_id LIMIT 1) x ON true
          LEFT JOIN LATERAL (
               SELECT was.endpoint_id AS was_endpoint_id,
                      was.generation AS was_generation, was.slot AS was_slot,
                      d.replay_seq AS was_seq
                 FROM replay
                 JOIN replay_job job ON job.id = replay.job_id
                 LEFT JOIN dead_letter dead ON dead.id = replay.dead_id
                 JOIN lane was ON was.id = coalesce(job.lane_id, dead.lane_id)
                WHERE replay.id = d.replay_id LIMIT 1) w ON true) found
 WHERE coalesce(bytes_before, 0) < $5
 ORDER BY lane_id, seq
"""  # noqa: S608 (constants only)

# Lanes that wait for an operator.
READ_BLOCKED = "SELECT lane_id FROM lane_block WHERE lane_id = ANY ($1)"

# What other replicas sequenced: the lanes that got something, and their counters.
# OFFSET 0 keeps those to a look by lane.
READ_NEWS = """
WITH news AS MATERIALIZED (
    SELECT batch, lanes FROM batch WHERE batch > $1 ORDER BY batch LIMIT $2)
SELECT (SELECT max(batch) FROM news) AS batch, (SELECT count(*) FROM news) AS batches,
       array_agg(c.lane_id) AS lanes, array_agg(c.last_seq) AS last_seqs
  FROM (SELECT DISTINCT unnest(lanes) AS id FROM news) lane
 CROSS JOIN LATERAL (
       SELECT lane_id, last_seq FROM lane_counter
        WHERE lane_id = lane.id ORDER BY last_seq DESC LIMIT 1) c
"""
NEWS_MAX = 1000

# From the top: see the table.
READ_COUNTERS = """
SELECT lane.id AS lane_id, c.last_seq
  FROM unnest($1::bigint[]) AS lane(id)
 CROSS JOIN LATERAL (
       SELECT last_seq FROM lane_counter
        WHERE lane_id = lane.id ORDER BY last_seq DESC LIMIT 1) c
"""


@dataclass(frozen=True, slots=True)
class LoadedLane:
    """A lane as its checkpoint, counter and tail tell it."""

    id: int
    endpoint_id: UUID
    name: str
    generation: int
    ended: bool
    """A newer generation took its place."""
    blocked: bool
    last_seq: int
    owed_since: float | None
    """Epoch seconds; None: it owes nothing."""
    progress: Progress
    tail: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True, slots=True)
class Sequenced:
    """Batches that were sequenced."""

    batch: int
    """The newest of them."""
    last_seqs: dict[int, int]
    """Of every lane that got something, the last number given out by now."""
    more: bool
    """There may be newer batches."""


class LaneStore:
    """Reads lanes, on one connection; asyncpg's errors pass through."""

    def __init__(self, connection: Connection[Any], vault: Vault = CLEAR) -> None:
        self._db = connection
        self._vault = vault

    async def endpoints(self, endpoint_ids: Collection[UUID]) -> list[Endpoint]:
        """The endpoints as they are set up now."""
        return await destinations.read(self._db, endpoint_ids, self._vault)

    async def last_batch(self) -> int:
        """The newest batch."""
        batch: int = await self._db.fetchval(READ_LAST_BATCH)
        return batch

    async def lanes(self, endpoint_ids: Collection[UUID]) -> list[LoadedLane]:
        """All lanes of the endpoints; call it after claiming them."""
        rows = await self._db.fetch(READ_LANES, list(endpoint_ids))
        tails: dict[int, list[tuple[int, int, float]]] = {}
        for r in await self._db.fetch(
            READ_TAIL,
            [r["id"] for r in rows],
            [r["floor_batch"] for r in rows],
            [r["acked_seq"] for r in rows],
        ):
            tails.setdefault(r["id"], []).append(
                (r["seq"], r["batch"], r["started_at"].timestamp())
            )
        return [
            LoadedLane(
                r["id"],
                r["endpoint_id"],
                lane_name(r["endpoint_id"], r["generation"], r["slot"]),
                r["generation"],
                r["ended"],
                r["blocked"],
                r["last_seq"],
                _seconds(r["owed_since"]),
                Progress(
                    r["acked_seq"],
                    r["delivered_seq"],
                    r["floor_batch"],
                    r["head_seq"],
                    r["attempts"],
                    r["spent"],
                    _seconds(r["first_attempt_at"]),
                    _seconds(r["next_attempt_at"]),
                    r["last_answer"] and orjson.loads(r["last_answer"]),
                    _seconds(r["success_at"]),
                ),
                tuple(tails.get(r["id"], ())),
            )
            for r in rows
        ]

    async def deliveries(
        self,
        lanes: Sequence[LoadedLane],
        floor_batches: Sequence[int],
        after_seqs: Sequence[int],
        rows_max: Sequence[int],
        bytes_max: int,
    ) -> dict[int, list[Delivery | Gone]]:
        """The next deliveries of each lane, of each at most so many.

        A lane gets at least one, and further ones until it has `bytes_max` of
        payloads, as they are stored.
        """
        names = {lane.id: lane for lane in lanes}
        found: dict[int, list[Delivery | Gone]] = {lane.id: [] for lane in lanes}
        for r in await self._db.fetch(
            READ_DELIVERIES,
            [lane.id for lane in lanes],
            floor_batches,
            after_seqs,
            rows_max,
            bytes_max,
        ):
            lane = names[r["lane_id"]]
            found[lane.id].append(_delivery(lane, r))
        return found

    async def news(self, after_batch: int) -> Sequenced | None:
        """What was sequenced after a batch; None: nothing was."""
        row = await self._db.fetchrow(READ_NEWS, after_batch, NEWS_MAX)
        if not row["batches"]:
            return None
        last_seqs = dict(zip(row["lanes"] or (), row["last_seqs"] or (), strict=True))
        return Sequenced(row["batch"], last_seqs, more=row["batches"] == NEWS_MAX)

    async def counters(self, lane_ids: Collection[int]) -> dict[int, int]:
        """The last number given out in each lane."""
        rows = await self._db.fetch(READ_COUNTERS, list(lane_ids))
        return {r["lane_id"]: r["last_seq"] for r in rows}

    async def blocked(self, lane_ids: Collection[int]) -> set[int]:
        """Those of the lanes that wait for an operator."""
        rows = await self._db.fetch(READ_BLOCKED, list(lane_ids))
        return {r["lane_id"] for r in rows}


def _seconds(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


def _delivery(lane: LoadedLane, row: Any) -> Delivery | Gone:
    if row["payload"] is None:
        return Gone(
            lane.endpoint_id, row["seq"], row["batch"], row["outbox_id"], row["backfill_id"]
        )
    return delivery_of(lane, row)


class Named(Protocol):
    """A lane, as far as receivers see it."""

    @property
    def endpoint_id(self) -> UUID: ...
    @property
    def name(self) -> str: ...


def delivery_of(lane: Named, row: Any) -> Delivery:
    """A delivery from a row that begins with the columns of `READ_DELIVERIES`.

    By place: to look up each by its name took longer than all else that is done with a row.
    """
    found = tuple(row.values())
    published_at, expires_at, payload, headers = found[8:12]
    committed_after = found[15]
    was_endpoint_id, was_generation, was_slot, was_seq = found[16:20]
    replay_of = None
    if was_seq is not None:
        replay_of = (lane_name(was_endpoint_id, was_generation, was_slot), was_seq)
    return Delivery._make(
        (
            lane.endpoint_id,
            lane.name,
            *found[1:8],
            _time(published_at),
            None if expires_at is None else _time(expires_at),
            payload.encode(),
            None if headers is None else headers.encode(),
            replay_of,
            *found[12:15],
            None if committed_after is None else _time(committed_after),
        )
    )


@lru_cache(1024)
def _time(epoch_s: float) -> datetime:
    """Remembered: all events of a transaction have one, and so have all of a batch."""
    return datetime.fromtimestamp(epoch_s, UTC)

"""SQL of the dispatcher: endpoints, lanes and their pending deliveries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from outbox.core.brokers.repair import Repair, RepairKind
from outbox.core.delivery.commands import LaneSnapshot, Progress
from outbox.core.model.delivery import Delivery, epoch_seconds
from outbox.core.model.ids import lane_name, message_id
from outbox.store.connection.row_security import (
    require_unprotected,
    rows_hidden,
    stop_hidden,
)
from outbox.store.connection.secrets import CLEAR
from outbox.store.delivery.delivery_reads import DeliveryReads, LaneRead
from outbox.store.delivery.endpoints import read_endpoints
from outbox.store.refused_rows import IS_REFUSED_SUCCESS
from outbox.store.sql.expressions import RUN_LENGTH

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.delivery.commands import ErasedEvent
    from outbox.core.delivery.endpoint import Endpoint
    from outbox.core.delivery.event_cache import EventCache
    from outbox.store.connection.secrets import Vault

# 0 if the table was emptied: the sequencer reports that, and delivery goes on.
READ_LAST_BATCH = "SELECT coalesce(max(batch), 0) FROM batch"


BROKER = "e.url !~ '^https?:'"
"""Whether the destination of an endpoint `e` is a broker."""


def lacks_end(lane: str) -> str:
    """Whether a lane of an older generation lacks its end entry in the stream of a broker.

    Args:
        lane: the alias of its `lane_progress`; `e` is that of its endpoint.
    """
    return f"({lane}.end_seq IS NULL AND {BROKER})"


# Checkpoint and counter of every current lane, and of every ended lane that has pending
# deliveries, is blocked, or lacks its end entry in a broker's stream; and when the first pending
# delivery was sequenced.  A lane has ended when there is a newer generation, or when the next
# leader will begin one because the server's timeline changed, or the database was restored.
# The number of lanes of a generation is its last slot's, by the index.
READ_LANES = f"""
SELECT l.id, l.endpoint_id, l.generation, l.slot,
       coalesce(l.skip_seq, 0) AS skip_seq,
       l.generation < e.generation
           OR (SELECT history_changed()) AS ended,
       c.last_seq, p.acked_seq, p.delivered_seq, p.floor_batch, p.retry_seq, p.attempts, p.spent,
       p.first_attempt_at, p.next_attempt_at, p.last_response, p.success_at,
       b.lane_id IS NOT NULL AS blocked,
       (SELECT receipt FROM lane_receipt WHERE lane_id = l.id) AS receipt,
       p.end_seq IS NOT NULL AS end_written,
       CASE WHEN {BROKER} THEN (
           SELECT slot + 1 FROM lane g
            WHERE g.endpoint_id = l.endpoint_id AND g.generation = l.generation
            ORDER BY slot DESC LIMIT 1) END AS lanes,
       CASE WHEN c.last_seq > p.acked_seq THEN (
           SELECT batch.at
             FROM (SELECT d.batch FROM delivery d
                    WHERE d.lane_id = l.id AND d.batch >= p.floor_batch AND d.seq > p.acked_seq
                    ORDER BY d.batch, d.seq LIMIT 1) head
             JOIN batch USING (batch)) END AS pending_since,
       {rows_hidden("lane", "lane_block", "lane_counter", "lane_progress", "attempt_run")} AS hidden
  FROM endpoint e
  JOIN lane l ON l.endpoint_id = e.id
  JOIN lane_progress p ON p.lane_id = l.id
 CROSS JOIN LATERAL (
       SELECT last_seq FROM lane_counter
        WHERE lane_id = l.id ORDER BY last_seq DESC LIMIT 1) c
  LEFT JOIN lane_block b ON b.lane_id = l.id
 WHERE e.id = ANY ($1)
   AND (l.generation = e.generation OR c.last_seq > p.acked_seq OR b.lane_id IS NOT NULL
        OR {lacks_end("p")})
"""  # noqa: S608 (constants only)

# Acknowledgements after the checkpoint.  OFFSET 0 keeps it an index lookup in each lane's own
# partitions: as a join, the planner would hash the whole log.
READ_ACKNOWLEDGED = """
SELECT lane.id, a.seq, a.batch, a.started_at
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS lane(id, floor_batch, acked_seq)
 CROSS JOIN LATERAL (
       SELECT seq, batch, started_at FROM attempt
        WHERE lane_id = lane.id AND batch >= lane.floor_batch AND seq > lane.acked_seq
          AND outcome = 'delivered' OFFSET 0) a
"""

# The identity of this database, which a broker's fence names.  Without the right to read it, it is
# the same for all databases.
READ_IDENTITY = "SELECT coalesce(server_identity(), 'unknown')"

# What the X-Delivery of a lane's delivery is derived from.  The delivery itself may be gone.
READ_DELIVERY_AT = f"""
SELECT d.batch, d.outbox_id, d.backfill_id, coalesce(o.event_id, x.event_id) AS event_id
  FROM (SELECT batch, outbox_id + coalesce(offsets[$2 - seq + 1], 0) AS outbox_id, backfill_id,
               copy_id
          FROM delivery_run
         WHERE lane_id = $1 AND seq <= $2 AND seq + {RUN_LENGTH} > $2) d
  LEFT JOIN LATERAL (SELECT event_id FROM outbox WHERE id = d.outbox_id LIMIT 1) o ON true
  LEFT JOIN LATERAL (SELECT event_id FROM dead_letter WHERE id = d.copy_id LIMIT 1) x ON true
"""  # noqa: S608 (constants only)

# What operators request for held lanes of brokers.
READ_REPAIR = "SELECT repair, repair_seq FROM lane WHERE id = $1 AND repair IS NOT NULL"
READ_REPAIRS = """
SELECT id, repair, repair_seq FROM lane WHERE endpoint_id = ANY ($1) AND repair IS NOT NULL
"""

# Which sequences of a lane were delivered, by the attempt log, or by the journal, which has those
# that a trigger or constraint kept out of the log.
READ_DELIVERED = f"""
SELECT DISTINCT seq FROM attempt
 WHERE lane_id = $1 AND batch >= $2 AND seq BETWEEN $3 AND $4 AND outcome = 'delivered'
 UNION
SELECT n FROM journal, generate_series(greatest((data ->> 'sequence')::bigint, $3),
                                       least((data ->> 'to_sequence')::bigint, $4)) AS n
 WHERE {IS_REFUSED_SUCCESS} AND (data ->> 'lane')::bigint = $1
 UNION ALL SELECT NULL WHERE {rows_hidden("attempt_run", "journal")}
"""  # noqa: S608 (constants only)

# Lanes blocked by a dead letter.
READ_BLOCKED = f"""
SELECT lane_id, {rows_hidden("lane_block")} AS hidden
  FROM unnest($1::bigint[]) AS lane(id) LEFT JOIN lane_block b ON b.lane_id = lane.id
"""  # noqa: S608 (constants only)

# The deliveries of the endpoints' lanes that operators skipped last; most of them have ended.
READ_SKIPPED = """
SELECT id, skip_seq FROM lane WHERE endpoint_id = ANY ($1) AND skip_seq IS NOT NULL
"""

# Batches sequenced by other replicas: the lanes with new deliveries, and their counters.
#   new_batches: MATERIALIZED, so that it is read once.
# LIMIT 1 on the counter: see READ_COUNTERS.
READ_NEW_BATCHES = """
WITH new_batches AS MATERIALIZED (
    SELECT batch, lanes FROM batch WHERE batch > $1 ORDER BY batch LIMIT $2)
SELECT (SELECT max(batch) FROM new_batches) AS batch, (SELECT count(*) FROM new_batches) AS batches,
       array_agg(c.lane_id) AS lanes, array_agg(c.last_seq) AS last_seqs
  FROM (SELECT DISTINCT unnest(lanes) AS id FROM new_batches) lane
 CROSS JOIN LATERAL (
       SELECT lane_id, last_seq FROM lane_counter
        WHERE lane_id = lane.id ORDER BY last_seq DESC LIMIT 1) c
"""
NEW_BATCHES_MAX = 1000

# Lane counters, by a backward index scan: see the table.
READ_COUNTERS = """
SELECT lane.id AS lane_id, c.last_seq
  FROM unnest($1::bigint[]) AS lane(id)
 CROSS JOIN LATERAL (
       SELECT last_seq FROM lane_counter
        WHERE lane_id = lane.id ORDER BY last_seq DESC LIMIT 1) c
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLane(LaneSnapshot):
    """A lane as it was read, with its identity."""

    endpoint_id: UUID
    name: str
    generation: int
    receipt: str | None = None
    """The receipt of the last durable append to a broker."""
    end_written: bool = False
    """The broker's stream has its end entry."""
    lanes: int | None = None
    """The number of lanes in its generation; None: its destination is an HTTP receiver."""


class FoundDelivery(NamedTuple):
    """A delivery of a lane."""

    batch: int
    delivery: str | None
    """Its X-Delivery; None: its event is gone."""


class LostDeliveries(NamedTuple):
    """Deliveries that a stream has lost, in sequence order."""

    through_seq: int
    """The last sequence that was read."""
    deliveries: list[Delivery]
    """The deliveries, without dead letters and erased events."""


@dataclass(frozen=True, slots=True)
class NewBatches:
    """Batches that were sequenced."""

    batch: int
    """The newest of them."""
    last_seqs: dict[int, int]
    """The last sequence number of each lane with new deliveries."""
    more: bool
    """There may be newer batches."""


class LaneStore:
    """Reads lanes, on one connection; asyncpg's errors propagate."""

    def __init__(self, connection: Connection[Any], vault: Vault = CLEAR) -> None:
        self._db = connection
        self._vault = vault
        self._reads = DeliveryReads(connection)

    async def endpoints(self, endpoint_ids: Collection[UUID]) -> list[Endpoint]:
        """The current configuration and state of endpoints."""
        return await read_endpoints(self._db, endpoint_ids, self._vault)

    async def last_batch(self) -> int:
        """The newest batch."""
        batch: int = await self._db.fetchval(READ_LAST_BATCH)
        return batch

    async def lanes(self, endpoint_ids: Collection[UUID]) -> list[LoadedLane]:
        """All lanes of the endpoints; call it after claiming them."""
        rows = await self._db.fetch(READ_LANES, list(endpoint_ids))
        if not rows:
            # Every endpoint has lanes.
            await require_unprotected(self._db)
        await self._require_visible(rows)
        tails: dict[int, list[tuple[int, int, float]]] = {}
        for r in await self._db.fetch(
            READ_ACKNOWLEDGED,
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
                r["last_seq"],
                Progress(
                    r["acked_seq"],
                    r["delivered_seq"],
                    r["floor_batch"],
                    r["retry_seq"],
                    r["attempts"],
                    r["spent"],
                    epoch_seconds(r["first_attempt_at"]),
                    epoch_seconds(r["next_attempt_at"]),
                    r["last_response"] and orjson.loads(r["last_response"]),
                    epoch_seconds(r["success_at"]),
                ),
                tails.get(r["id"], ()),
                epoch_seconds(r["pending_since"]),
                r["blocked"],
                r["ended"],
                r["skip_seq"],
                endpoint_id=r["endpoint_id"],
                name=lane_name(r["endpoint_id"], r["generation"], r["slot"]),
                generation=r["generation"],
                receipt=r["receipt"],
                end_written=r["end_written"],
                lanes=r["lanes"],
            )
            for r in rows
        ]

    async def deliveries(
        self, requested: Sequence[LaneRead], events: EventCache | None = None
    ) -> dict[int, list[Delivery | ErasedEvent]]:
        """The next deliveries of each lane, by its id.

        Args:
            events: events that need not be read, to which those that are read are added.
        """
        return await self._reads.read(requested, events)

    async def identity(self) -> str:
        """The identity of this database, for a broker's fence."""
        identity: str = await self._db.fetchval(READ_IDENTITY)
        return identity

    async def delivery_at(self, lane: LoadedLane, seq: int) -> FoundDelivery | None:
        """The delivery with a sequence; None: retention has removed it, or there was none."""
        row = await self._db.fetchrow(READ_DELIVERY_AT, lane.id, seq)
        if row is None:
            return None
        if row["event_id"] is None:
            return FoundDelivery(row["batch"], None)
        parts = lane.endpoint_id, row["outbox_id"], row["event_id"], row["backfill_id"]
        return FoundDelivery(row["batch"], message_id(*parts))

    async def repair(self, lane_id: int) -> Repair | None:
        """What an operator has requested last for a held lane, if the owner has not done it."""
        row = await self._db.fetchrow(READ_REPAIR, lane_id)
        return None if row is None else Repair(RepairKind(row["repair"]), row["repair_seq"])

    async def lost_deliveries(
        self, lane: LoadedLane, after_seq: int, through_seq: int, rows_max: int, bytes_max: int
    ) -> LostDeliveries | None:
        """The next deliveries of a lane that were delivered before; None: they are gone.

        Args:
            after_seq: the sequence before the first one.
            rows_max, bytes_max: see `deliveries`.
        """
        found = await self.delivery_at(lane, after_seq + 1)
        if found is None:
            return None
        read = LaneRead(lane, found.batch, after_seq, rows_max, bytes_max)
        some = await self.deliveries([read])
        rows = [row for row in some[lane.id] if row.seq <= through_seq]
        if not rows or rows[0].seq != after_seq + 1:
            return None
        last_seq = rows[-1].seq
        delivered: set[int | None] = {
            row["seq"]
            for row in await self._db.fetch(
                READ_DELIVERED, lane.id, found.batch, after_seq + 1, last_seq
            )
        }
        if None in delivered:
            await stop_hidden(self._db)
        kept = []
        for row in rows:
            if row.seq not in delivered:
                continue  # A dead letter.
            if isinstance(row, Delivery):
                kept.append(row)
                continue
            found = await self.delivery_at(lane, row.seq)
            if found is None or found.delivery is None:
                return None  # Not erased: retention has removed its event.
        return LostDeliveries(last_seq, kept)

    async def new_batches(self, after_batch: int) -> NewBatches | None:
        """The batches sequenced after a batch; None: there are none."""
        row = await self._db.fetchrow(READ_NEW_BATCHES, after_batch, NEW_BATCHES_MAX)
        if not row["batches"]:
            return None
        last_seqs = dict(zip(row["lanes"] or (), row["last_seqs"] or (), strict=True))
        return NewBatches(row["batch"], last_seqs, more=row["batches"] == NEW_BATCHES_MAX)

    async def counters(self, lane_ids: Collection[int]) -> dict[int, int]:
        """The last sequence number of each lane."""
        rows = await self._db.fetch(READ_COUNTERS, list(lane_ids))
        return {r["lane_id"]: r["last_seq"] for r in rows}

    async def blocked(self, lane_ids: Collection[int]) -> set[int]:
        """Those of the lanes that are blocked by a dead letter."""
        rows = await self._db.fetch(READ_BLOCKED, list(lane_ids))
        await self._require_visible(rows)
        return {r["lane_id"] for r in rows if r["lane_id"] is not None}

    async def _require_visible(self, rows: Sequence[Any]) -> None:
        if any(r["hidden"] for r in rows):
            await stop_hidden(self._db)

    async def skipped(self, endpoint_ids: Collection[UUID]) -> dict[int, int]:
        """The sequence number that an operator skipped last, by lane; most lanes have none."""
        rows = await self._db.fetch(READ_SKIPPED, list(endpoint_ids))
        return {r["id"]: r["skip_seq"] for r in rows}

    async def repairs(self, endpoint_ids: Collection[UUID]) -> dict[int, Repair]:
        """What an operator has requested, by lane; most lanes have none."""
        rows = await self._db.fetch(READ_REPAIRS, list(endpoint_ids))
        return {r["id"]: Repair(RepairKind(r["repair"]), r["repair_seq"]) for r in rows}

"""SQL of the dispatcher: endpoints, lanes and their pending deliveries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from outbox.core.brokers.repair import Repair, RepairKind
from outbox.core.delivery.commands import ErasedEvent, LaneSnapshot, MissingEvent, Progress
from outbox.core.model.delivery import Delivery, earliest_commit, epoch_seconds
from outbox.core.model.ids import lane_name, message_id
from outbox.core.sequencing.partition_window import WIDTH
from outbox.store.connection.row_security import (
    require_unprotected,
    rows_hidden,
    stop_hidden,
)
from outbox.store.connection.secrets import CLEAR
from outbox.store.delivery.endpoints import read_endpoints
from outbox.store.refused_rows import IS_REFUSED_SUCCESS
from outbox.store.sql.expressions import PAYLOAD_BYTES, epoch_s

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.delivery.endpoint import Endpoint
    from outbox.core.delivery.inline_deliveries import LaneIdentity
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
       {rows_hidden("lane", "lane_block", "lane_counter", "lane_progress", "attempt")} AS hidden
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


# The columns of an event.
EVENT_COLUMNS = f"""event_id, type, tenant, key,
       {epoch_s("published_at")} AS published_at,
       {epoch_s("expires_at")} AS expires_at,
       {PAYLOAD_BYTES} AS payload, headers::text AS headers, content_type"""

# Deliveries with their events.  `batch >=` limits each lane to the partitions that can contain
# its deliveries.  An event whose row is gone is taken from the dead letter's copy, and is
# otherwise empty; is_recorded: it was erased, or dropped with its period.  LIMIT 1 keeps the event
# an index lookup: a join would hash the whole outbox.  bytes_before bounds a chunk by the size that
# its payloads and headers have in memory, which may be a hundred times the compressed one; OFFSET 0
# converts each of them once.  LATERAL would do so as well, but the planner memoizes its result, and
# looks for it by the whole payload.  The deliveries are sorted before their payloads are there:
# with them, 1,000 of 4 KiB would be sorted on the disk.  IS NOT NULL keeps the look-ups of dead
# letters and replays, which few deliveries need, from being begun.  hidden: row security may have
# hidden events.  The columns have the order of `build_delivery`.
READ_DELIVERIES = f"""
SELECT lane_id, seq, batch, outbox_id, {EVENT_COLUMNS},
       backfill_id, date_part('epoch', committed_after) AS committed_after,
       was_endpoint_id, was_generation, was_slot, was_seq,
       CASE WHEN num_nonnulls(payload, body) = 0
            THEN is_erased OR EXISTS (
                 SELECT FROM period WHERE kind = 'events' AND number = outbox_id / {WIDTH}
                                      AND dropped_at IS NOT NULL) END AS is_recorded,
       {rows_hidden("outbox", "dead_letter", "period")} AS hidden
  FROM (SELECT *, sum(bytes) OVER (
                   PARTITION BY lane_id ORDER BY seq
                   ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
          FROM (SELECT *, coalesce(octet_length(body), 0) + coalesce(octet_length(headers), 0)
                              AS bytes
                  FROM (
        SELECT d.id AS lane_id, d.bytes_max, d.batch, d.seq, d.outbox_id, d.backfill_id,
               coalesce(o.event_id, x.event_id) AS event_id,
               coalesce(o.tenant, x.tenant) AS tenant,
               coalesce(o.type, x.type) AS type,
               coalesce(o.key, x.key) AS key,
               NULL::jsonb AS payload,
               coalesce(o.body, x.body,
                        convert_to(coalesce(o.payload, x.payload)::text, 'UTF8')) AS body,
               coalesce(o.content_type, x.content_type) AS content_type,
               coalesce(o.headers, x.headers)::text AS headers,
               coalesce(o.created_at, x.published_at) AS published_at,
               o.erased_at IS NOT NULL OR x.erased_at IS NOT NULL AS is_erased,
               CASE WHEN coalesce(d.replay_id, d.backfill_id) IS NULL THEN o.expires_at END
                   AS expires_at,
               w.was_endpoint_id, w.was_generation, w.was_slot, w.was_seq, b.committed_after
          FROM (
               SELECT lane.id, lane.bytes_max, n.*
                 FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::int[], $5::bigint[])
                      AS lane(id, floor_batch, after_seq, rows_max, bytes_max)
                CROSS JOIN LATERAL (
                      SELECT batch, seq, outbox_id, replay_id, replay_seq, backfill_id, copy_id
                        FROM delivery
                       WHERE lane_id = lane.id AND batch >= lane.floor_batch
                         AND seq > lane.after_seq
                       ORDER BY batch, seq LIMIT lane.rows_max) n
                ORDER BY lane.id, n.seq OFFSET 0) d
          LEFT JOIN LATERAL (
               SELECT committed_after FROM batch WHERE batch = d.batch LIMIT 1) b ON true
          LEFT JOIN LATERAL (
               SELECT * FROM outbox WHERE id = d.outbox_id LIMIT 1) o ON true
          LEFT JOIN LATERAL (
               SELECT * FROM dead_letter
                WHERE d.copy_id IS NOT NULL AND id = d.copy_id LIMIT 1) x ON true
          LEFT JOIN LATERAL (
               SELECT was.endpoint_id AS was_endpoint_id,
                      was.generation AS was_generation, was.slot AS was_slot,
                      d.replay_seq AS was_seq
                 FROM replay
                 JOIN dead_letter dead ON dead.id = replay.dead_id
                 JOIN lane was ON was.id = dead.lane_id
                WHERE d.replay_id IS NOT NULL AND replay.id = d.replay_id LIMIT 1) w ON true
         ORDER BY d.id, d.seq OFFSET 0) converted) sized) found
 WHERE bytes_before IS NULL OR bytes_before + bytes <= bytes_max
 ORDER BY lane_id, seq
"""  # noqa: S608 (constants only)

# The identity of this database, which a broker's fence names.  Without the right to read it, it is
# the same for all databases.
READ_IDENTITY = "SELECT coalesce(server_identity(), 'unknown')"

# What the X-Delivery of a lane's delivery is derived from.  The delivery itself may be gone.
READ_DELIVERY_AT = """
SELECT d.batch, d.outbox_id, d.backfill_id, coalesce(o.event_id, x.event_id) AS event_id
  FROM delivery d
  LEFT JOIN LATERAL (SELECT event_id FROM outbox WHERE id = d.outbox_id LIMIT 1) o ON true
  LEFT JOIN LATERAL (SELECT event_id FROM dead_letter WHERE id = d.copy_id LIMIT 1) x ON true
 WHERE d.lane_id = $1 AND d.seq = $2
"""

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
 UNION ALL SELECT NULL WHERE {rows_hidden("attempt", "journal")}
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
        self,
        lanes: Sequence[LoadedLane],
        floor_batches: Sequence[int],
        after_seqs: Sequence[int],
        rows_max: Sequence[int],
        bytes_max: Sequence[int],
    ) -> dict[int, list[Delivery | ErasedEvent]]:
        """The next deliveries of each lane.

        Args:
            rows_max: maximum number per lane.
            bytes_max: maximum bytes of payloads and headers per lane, uncompressed; at least
                one delivery, whatever its size.
        """
        names = {lane.id: lane for lane in lanes}
        found: dict[int, list[Delivery | ErasedEvent]] = {lane.id: [] for lane in lanes}
        for r in await self._db.fetch(
            READ_DELIVERIES,
            [lane.id for lane in lanes],
            floor_batches,
            after_seqs,
            rows_max,
            bytes_max,
        ):
            if r["hidden"]:
                await stop_hidden(self._db)
            lane = names[r["lane_id"]]
            exists = r["payload"] is not None
            found[lane.id].append(build_delivery(lane, r) if exists else _erased(lane, r))
        return found

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
        some = await self.deliveries([lane], [found.batch], [after_seq], [rows_max], [bytes_max])
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


def _erased(lane: LoadedLane, row: Any) -> ErasedEvent:
    kind = ErasedEvent if row["is_recorded"] else MissingEvent
    return kind(lane.endpoint_id, row["seq"], row["batch"], row["outbox_id"], row["backfill_id"])


def build_delivery(lane: LaneIdentity, row: Any) -> Delivery:
    """Build a delivery from a row that begins with the columns of `READ_DELIVERIES`.

    By position: looking up each column by name took longer than everything else.
    """
    found = tuple(row.values())
    published_at = found[8]
    headers, content_type, backfill_id, committed_after = found[11:15]
    was_endpoint_id, was_generation, was_slot, was_seq = found[15:19]
    replay_of = waits_since = None
    if was_seq is not None:
        replay_of = (lane_name(was_endpoint_id, was_generation, was_slot), was_seq)
    elif backfill_id is None:
        waits_since = earliest_commit(published_at, committed_after)
    return Delivery._make(
        (
            lane.endpoint_id,
            lane.name,
            *found[1:11],
            None if headers is None else headers.encode(),
            content_type,
            replay_of,
            backfill_id,
            waits_since,
        )
    )

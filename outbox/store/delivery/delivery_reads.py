"""Reads of pending deliveries with their events.

A delivery that repeats no other one takes its content from its event, which is read once for all
lanes: its place is read from the runs of its lane, and its event by its id, unless it was read
lately.  What such a read does not return, and what repeats another delivery, is read by
`READ_DELIVERIES`, which knows copies of dead letters and erased events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from outbox.core.delivery.commands import ErasedEvent, MissingEvent
from outbox.core.model.delivery import Delivery, EventContent, earliest_commit
from outbox.core.model.ids import lane_name
from outbox.core.sequencing.partition_window import WIDTH
from outbox.store.connection.row_security import rows_hidden, stop_hidden
from outbox.store.sql.expressions import PAYLOAD_BYTES, RUN_LENGTH, epoch_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Connection

    from outbox.core.delivery.event_cache import EventCache, LaneIdentity, Placed

# The columns of an event.
EVENT_COLUMNS = f"""event_id, type, tenant, key,
       {epoch_s("published_at")} AS published_at,
       {epoch_s("expires_at")} AS expires_at,
       {PAYLOAD_BYTES} AS payload, headers::text AS headers, content_type"""

# When the event of a delivery was committed at the earliest; a fed one was in an earlier batch.
_COMMITTED_AFTER = "CASE WHEN {}.feed_id IS NULL THEN b.committed_after ELSE 'infinity' END"

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
               w.was_endpoint_id, w.was_generation, w.was_slot, w.was_seq,
               {_COMMITTED_AFTER.format("d")} AS committed_after
          FROM (
               SELECT lane.id, lane.bytes_max, n.*
                 FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::int[], $5::bigint[])
                      AS lane(id, floor_batch, after_seq, rows_max, bytes_max)
                CROSS JOIN LATERAL (
                      SELECT batch, seq, outbox_id, replay_id, replay_seq, backfill_id, copy_id,
                             feed_id
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

# The runs of lanes from a sequence on, without deliveries that repeat others.
READ_RUNS = f"""
SELECT lane.id, r.batch, r.seq, r.outbox_id, r.offsets,
       date_part('epoch', {_COMMITTED_AFTER.format("r")}) AS committed_after
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::int[])
       AS lane(id, floor_batch, next_seq, runs_max)
 CROSS JOIN LATERAL (
       SELECT * FROM delivery_run
        WHERE lane_id = lane.id AND batch >= lane.floor_batch
          AND seq + {RUN_LENGTH} > lane.next_seq
        ORDER BY batch, seq LIMIT lane.runs_max) r
  LEFT JOIN LATERAL (SELECT committed_after FROM batch WHERE batch = r.batch LIMIT 1) b ON true
 WHERE num_nonnulls(r.replay_id, r.backfill_id, r.copy_id) = 0
 ORDER BY lane.id, r.batch, r.seq
"""  # noqa: S608 (constants only)

# The content of events.  Like READ_DELIVERIES it is bounded by the size in memory, and each is
# found by the index.
READ_EVENTS = f"""
SELECT id, {EVENT_COLUMNS}
  FROM (SELECT *, sum(bytes) OVER (ORDER BY n ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
                      AS bytes_before
          FROM (SELECT *, octet_length(body) + coalesce(octet_length(headers), 0) AS bytes
                  FROM (
        SELECT wanted.n, o.id, o.event_id, o.tenant, o.type, o.key, NULL::jsonb AS payload,
               coalesce(o.body, convert_to(o.payload::text, 'UTF8')) AS body, o.content_type,
               o.headers::text AS headers, o.created_at AS published_at, o.expires_at
          FROM unnest($1::bigint[]) WITH ORDINALITY AS wanted(id, n)
         CROSS JOIN LATERAL (SELECT * FROM outbox WHERE id = wanted.id LIMIT 1) o
         WHERE num_nonnulls(o.payload, o.body) > 0 OFFSET 0) converted) sized) found
 WHERE bytes_before IS NULL OR bytes_before + bytes <= $2
"""  # noqa: S608 (constants only)


class LaneRead(NamedTuple):
    """What is to be read of a lane."""

    lane: LaneIdentity
    floor_batch: int
    """Its next delivery is in no earlier batch."""
    after_seq: int
    rows_max: int
    bytes_max: int
    """Maximum bytes of payloads and headers, uncompressed; at least one delivery is read, whatever
    its size."""


LENGTHS_MAX = 10_000
"""Lanes of which the length of a run is remembered."""


class DeliveryReads:
    """The reads of one connection."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._db = connection
        # Deliveries in the last run that was read of each lane: it needs so many runs.
        self._lengths: dict[int, int] = {}

    async def read(
        self, requested: Sequence[LaneRead], events: EventCache | None
    ) -> dict[int, list[Delivery | ErasedEvent]]:
        """The next deliveries of some lanes; see `LaneStore.deliveries`."""
        found = await self._read_new(requested, events) if events is not None else {}
        rest = [each for each in requested if not found.get(each.lane.id)]
        if not rest:
            return found
        found |= {each.lane.id: [] for each in rest}
        lanes = {each.lane.id: each.lane for each in rest}
        columns = zip(*((each.lane.id, *each[1:]) for each in rest), strict=True)
        for row in await self._db.fetch(READ_DELIVERIES, *map(list, columns)):
            if row["hidden"]:
                await stop_hidden(self._db)
            build = _erased if row["payload"] is None else build_delivery
            found[row["lane_id"]].append(build(lanes[row["lane_id"]], row))
        return found

    async def _read_new(
        self, requested: Sequence[LaneRead], events: EventCache
    ) -> dict[int, list[Delivery | ErasedEvent]]:
        """The next deliveries of each lane up to the first one that repeats another."""
        placed: dict[int, list[Placed]] = {each.lane.id: [] for each in requested}
        if len(self._lengths) > LENGTHS_MAX:
            self._lengths.clear()
        bounds = {each.lane.id: (each.after_seq + 1, each.rows_max) for each in requested}
        next_seqs = [each.after_seq + 1 for each in requested]
        runs_max = [each.rows_max // self._lengths.get(each.lane.id, 1) + 2 for each in requested]
        floor_batches = [each.floor_batch for each in requested]
        rows = await self._db.fetch(READ_RUNS, list(placed), floor_batches, next_seqs, runs_max)
        for lane_id, batch, first_seq, first_id, offsets, after in rows:
            mine, (next_seq, rows_max) = placed[lane_id], bounds[lane_id]
            self._lengths[lane_id] = len(offsets or "1")
            if first_seq <= (at := next_seq + len(mine)):  # Not behind one that repeats another.
                some = (offsets or (0,))[at - first_seq :][: rows_max - len(mine)]
                mine += [(seq, batch, first_id + add, after) for seq, add in enumerate(some, at)]
        # In their order, each once.
        ids = dict.fromkeys(outbox_id for some in placed.values() for _, _, outbox_id, _ in some)
        contents: dict[int, EventContent] = {}
        if wanted := [outbox_id for outbox_id in ids if outbox_id not in events]:
            bytes_max = sum(each.bytes_max for each in requested)
            for row in await self._db.fetch(READ_EVENTS, wanted, bytes_max):
                outbox_id, *content = row.values()
                contents[outbox_id] = event_content(content)
            events.add(contents)
        return {
            lane.id: [*events.deliveries(lane, placed[lane.id], bytes_max, contents)]
            for lane, *_, bytes_max in requested
        }


def event_content(columns: Sequence[Any]) -> EventContent:
    """The content of an event, from its `EVENT_COLUMNS`."""
    if columns[7] is not None:
        columns = *columns[:7], columns[7].encode(), columns[8]
    return EventContent._make(columns)


def _erased(lane: LaneIdentity, row: Any) -> ErasedEvent:
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

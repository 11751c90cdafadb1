"""SQL of the recorder: writes attempts, progress and dead letters.

Everything written for a lane is one statement that begins with the *fence*: the replica's
own row, locked FOR KEY SHARE while its lease runs (see `fence`).  A replica that takes over
deletes that row first, so a stale statement finds no fence and writes nothing.  Because it
is sent as one message, no lock is held while the database waits for this process.
"""

from __future__ import annotations

from itertools import starmap
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.delivery.commands import DeadRange
from outbox.core.delivery.delivery_history import HISTORY_INTERVAL_S, INTERVALS
from outbox.errors import CannotRun
from outbox.store.absence_proof import AbsenceProof
from outbox.store.cluster.replicas import fence
from outbox.store.errors import Fenced, ResponseLost
from outbox.store.operational_events import (
    DEAD_LETTER_COLUMNS,
    DEAD_LETTER_CREATED_EVENT,
    HAS_OPERATIONAL_SUBSCRIBER,
    IS_ORDINARY,
    LANE_BLOCKED_EVENT,
    LANE_STUCK_EVENT,
    PUBLISH_REPORTED_EVENTS,
)
from outbox.store.routing_change import ADD_TO_JOURNAL
from outbox.store.sql.message import WriteStatement
from outbox.store.sql.row_params import composite_array, composite_number, composite_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from outbox.core.brokers.repair import Repair
    from outbox.core.delivery.commands import DeadLetter, Progress, Record, RunResults
    from outbox.core.delivery.delivery_history import CountedDeliveries
    from outbox.store.connection.store_connection import StoreConnection
    from outbox.store.refused_rows import RefusedRow
    from outbox.store.sql.message import WriteCall

RANGE_GROWTH_MAX_S = 3600
"""Maximum time for which a dead-letter range is extended; it bounds how much too early the
deliveries in it may be dropped."""

_ATTEMPTS = """
       (SELECT lane_id, batch, seq, attempt, outcome, status, error,
               to_timestamp(started_us / float8 '1e6') AS started_at,
               elapsed_us / real '1000' AS elapsed_ms, response
          FROM unnest($2::attempt_row[])) AS a
"""

# Whether a trigger or a rule of the application's may suppress attempts.
#   tgtype: 1 is FOR EACH ROW, 4 is INSERT, 2 is BEFORE, 64 is INSTEAD OF.  ev_type 3 is INSERT.
MAY_SUPPRESS_ATTEMPTS = """
WITH relation AS (SELECT 'attempt'::regclass AS oid UNION
                  SELECT relid FROM pg_partition_tree('attempt'))
SELECT EXISTS (SELECT FROM relation r JOIN pg_trigger t ON t.tgrelid = r.oid
                WHERE t.tgtype & 5 = 5 AND t.tgtype & 66 <> 0)
    OR EXISTS (SELECT FROM relation r JOIN pg_rewrite w ON w.ev_class = r.oid
                WHERE w.ev_type = '3')
"""

_INSERT_ATTEMPTS = f"""
INSERT INTO attempt (lane_id, batch, seq, attempt, outcome, status, error, started_at,
                     elapsed_ms, response, replica_id)
SELECT a.*, $1::bigint FROM fence, {_ATTEMPTS}
"""  # noqa: S608 (constants only)

# Writes a group of acknowledgements: the successful attempts $2.
# A row for each of them, unless this replica is fenced.
WRITE_ACKNOWLEDGEMENTS = WriteStatement(
    "write_acknowledgements", f"{fence('$3')} {_INSERT_ATTEMPTS}"
)

# The same where a trigger may suppress an attempt: it fails unless $4 were written.  Counting
# takes an eighth to a quarter more of the server's time, so it is done only there.
# One row, unless this replica is fenced.
WRITE_COUNTED_ACKNOWLEDGEMENTS = WriteStatement(
    "write_counted_acknowledgements",
    f"""{fence("$3")},
logged AS ({_INSERT_ATTEMPTS} RETURNING 1)
SELECT require_stored((SELECT count(*) FROM logged) = $4::bigint, 'attempt') FROM fence
""",  # noqa: S608 (constants only)
)

# Writes a group of attempts with lane progress and dead letters.
#   progress: the new progress of lanes.  MATERIALIZED: the array is parsed once.
#   moved: advances the progress of the lanes.  Fencing by epoch: for a lane that this
#     replica no longer owns, nothing at all is written.
#   logged: the attempts, except those of lanes that were not moved.
#   dead_lettered: the dead letters of moved lanes.  The event's content is copied from where
#     the delivery was read, because arguments appear in the server's log if the message fails.
#   preceding: the range directly before a new range of the same reason, because a backlog is
#     trimmed repeatedly.  Only a recent one: a range is as old as its beginning, and one that
#     never aged would keep its events for ever.  SKIP LOCKED: acknowledgements must not wait
#     for an operator who is deciding about it.
#   extended: extends that range.
#   created: inserts all other dead letters.
#   blocked: blocks lanes of endpoints with on_dead_letter = block.
#   journalled: journal entries for dead-lettered backlogs, abandoned lanes and missing events.
#   new: the dead letters to report: the created ones, and an extended range when it
#     receives its first ordinary event.  MATERIALIZED: evaluated once for two readers.
#   stuck: the lanes to report as stuck ($6), with what their deliveries were read from; an end
#     entry is no delivery.
#   reported: the operational events for them.
# One row for each lane that was moved.  It fails if a trigger suppresses a dead letter, the
# progress of a lane of this replica, or one of the $7 attempts while all lanes are moved.
WRITE_RECORDS = WriteStatement(
    "write_records",
    f"""{fence("$5")},
progress AS MATERIALIZED (
    SELECT * FROM unnest($3::progress_row[])),
moved AS (
    UPDATE lane_progress p
       SET acked_seq = v.acked_seq, delivered_seq = v.delivered_seq,
           floor_batch = v.floor_batch, retry_seq = v.retry_seq, attempts = v.attempts,
           spent = v.spent, first_attempt_at = to_timestamp(v.first_attempt_at),
           next_attempt_at = to_timestamp(v.next_attempt_at), last_response = v.last_response,
           success_at = to_timestamp(v.success_at)
      FROM fence, progress v
     WHERE p.lane_id = v.lane_id AND p.epoch = v.epoch AND p.acked_seq <= v.acked_seq
    RETURNING p.*),
logged AS (
    INSERT INTO attempt (lane_id, batch, seq, attempt, outcome, status, error, started_at,
                         elapsed_ms, response, replica_id)
    SELECT a.*, $1 FROM fence, {_ATTEMPTS}
     WHERE a.lane_id NOT IN (SELECT lane_id FROM progress)
        OR a.lane_id IN (SELECT lane_id FROM moved)
    RETURNING 1),
dead_lettered AS (
    SELECT d.*, moved.endpoint_id, event.*
      FROM unnest($4::json[]) AS document CROSS JOIN json_to_record(document)
           AS d(lane_id bigint, batch bigint, seq bigint, to_seq bigint, reason text,
                attempts integer, last_response jsonb, blocks boolean, outbox_id bigint,
                backfill_id bigint)
      JOIN moved USING (lane_id)
      LEFT JOIN LATERAL (
           SELECT coalesce(o.event_id, x.event_id) AS event_id,
                  coalesce(o.tenant, x.tenant) AS tenant, coalesce(o.type, x.type) AS type,
                  coalesce(o.key, x.key) AS key, coalesce(o.payload, x.payload) AS payload,
                  coalesce(o.headers, x.headers) AS headers,
                  coalesce(o.body, x.body) AS body,
                  coalesce(o.content_type, x.content_type) AS content_type,
                  coalesce(o.created_at, x.published_at) AS published_at,
                  CASE WHEN coalesce(n.replay_id, n.backfill_id) IS NULL THEN o.expires_at END
                      AS expires_at
             FROM delivery n
             LEFT JOIN LATERAL (SELECT * FROM outbox WHERE id = n.outbox_id LIMIT 1) o ON true
             LEFT JOIN LATERAL (SELECT * FROM dead_letter WHERE id = n.copy_id LIMIT 1) x ON true
            WHERE d.outbox_id IS NOT NULL AND n.lane_id = d.lane_id AND n.batch = d.batch
              AND n.seq = d.seq
              AND num_nonnulls(o.payload, o.body, x.payload, x.body) > 0 LIMIT 1) event
           ON true),
preceding AS MATERIALIZED (
    SELECT x.id, x.lane_id, x.batch, x.seq, x.to_seq AS was_to_seq, g.to_seq
      FROM dead_lettered g CROSS JOIN LATERAL (
           SELECT id, lane_id, batch, seq, to_seq, outbox_id, reason, state, began_at
             FROM dead_letter
            WHERE lane_id = g.lane_id AND seq < g.seq
            ORDER BY seq DESC LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED) x
     WHERE g.outbox_id IS NULL AND x.to_seq = g.seq - 1 AND x.outbox_id IS NULL
       AND x.reason = g.reason AND x.state = 'dead'
       AND x.began_at BETWEEN clock_timestamp() - make_interval(secs => {RANGE_GROWTH_MAX_S})
                          AND clock_timestamp()),
extended AS (
    UPDATE dead_letter x SET to_seq = p.to_seq, at = clock_timestamp()
      FROM preceding p WHERE x.id = p.id
    RETURNING x.lane_id, x.endpoint_id, x.event_id, x.type, x.reason, x.attempts, x.last_response),
created AS (
    INSERT INTO dead_letter (lane_id, endpoint_id, batch, seq, to_seq, reason, attempts,
           last_response, outbox_id, event_id, tenant, type, key, payload, headers, body,
           content_type, published_at, expires_at, backfill_id, replica_id, erased_at)
    SELECT lane_id, endpoint_id, batch, seq, to_seq, reason, attempts,
           last_response, outbox_id, event_id, tenant, type, key, payload, headers, body,
           content_type, published_at, expires_at, backfill_id, $1,
           CASE reason WHEN 'erased' THEN clock_timestamp() END
      FROM dead_lettered
     WHERE outbox_id IS NOT NULL OR lane_id NOT IN (SELECT lane_id FROM extended)
    RETURNING {DEAD_LETTER_COLUMNS}),
blocked AS (
    INSERT INTO lane_block (lane_id, seq) SELECT lane_id, seq FROM dead_lettered WHERE blocks
    RETURNING lane_id),
journalled AS (
    INSERT INTO journal (kind, actor, endpoint_id, data)
    SELECT CASE reason WHEN 'adopted' THEN 'lane_abandoned' WHEN 'missing' THEN 'events_missing'
                       ELSE 'backlog_dead_lettered' END,
           'replica ' || $1::bigint, endpoint_id,
           jsonb_build_object('lane', lane_id, 'from', seq, 'to', to_seq)
      FROM dead_lettered WHERE outbox_id IS NULL),
new AS MATERIALIZED (
    SELECT * FROM created x WHERE {HAS_OPERATIONAL_SUBSCRIBER} AND {IS_ORDINARY}
     UNION ALL
    SELECT p.id, p.lane_id, e.endpoint_id, p.batch, p.seq, p.to_seq, e.event_id, e.type, e.reason,
           e.attempts, e.last_response
      FROM preceding p JOIN extended e USING (lane_id)
     WHERE {HAS_OPERATIONAL_SUBSCRIBER}
       AND NOT contains_ordinary_event(p.lane_id, p.batch, p.seq, p.was_to_seq)
       AND contains_ordinary_event(p.lane_id, p.batch, p.was_to_seq + 1, p.to_seq)),
stuck AS MATERIALIZED (
    SELECT moved.*, n.outbox_id, n.copy_id
      FROM moved LEFT JOIN LATERAL (
           SELECT outbox_id, copy_id FROM delivery
            WHERE lane_id = moved.lane_id AND batch = moved.floor_batch AND seq = moved.retry_seq
            LIMIT 1) n ON true
     WHERE moved.lane_id = ANY ($6::bigint[]) AND {HAS_OPERATIONAL_SUBSCRIBER}),
reported(type, endpoint_id, details) AS (
    SELECT {LANE_STUCK_EVENT}
      FROM stuck x JOIN lane l ON l.id = x.lane_id JOIN endpoint e ON e.id = x.endpoint_id
      LEFT JOIN LATERAL (
           SELECT event_id, type FROM outbox WHERE id = x.outbox_id
            UNION ALL
           SELECT event_id, type FROM dead_letter WHERE id = x.copy_id LIMIT 1) o ON true
     WHERE coalesce(o.type, '') NOT LIKE 'outbox.%'
     UNION ALL
    SELECT {DEAD_LETTER_CREATED_EVENT}
      FROM new x JOIN lane l ON l.id = x.lane_id
     UNION ALL
    SELECT {LANE_BLOCKED_EVENT}
      FROM new x JOIN blocked USING (lane_id) JOIN lane l ON l.id = x.lane_id)
SELECT require_stored((SELECT count(*) FROM logged) = $7::bigint
                      OR (SELECT count(*) FROM moved) < (SELECT count(*) FROM progress), 'attempt'),
       require_stored((SELECT count(*) FROM created) + (SELECT count(*) FROM extended)
                      = (SELECT count(*) FROM dead_lettered), 'dead_letter')
  FROM moved WHERE (SELECT count(*) FROM ({PUBLISH_REPORTED_EVENTS}) published) >= 0
 UNION ALL
SELECT NULL, NULL FROM fence
 WHERE require_stored(
           (SELECT count(*) FROM moved)
           = (SELECT count(*) FROM progress v JOIN lane_progress p ON p.lane_id = v.lane_id
               AND p.epoch = v.epoch AND p.acked_seq <= v.acked_seq), 'lane_progress') IS NULL
""",  # noqa: S608 (constants only)
)

# Advances checkpoints of lanes: they only move forward, and only in the owner's epoch (fencing).
#   counted: adds to the delivery history, in the interval that the database's clock is in.  A row
#     of another day is replaced: it is of the day before, or a wrong clock wrote it.  In the order
#     of the endpoints, because replicas write the row of the sum, and an endpoint may have moved.
WRITE_LANE_CHECKPOINTS = WriteStatement(
    "write_lane_checkpoints",
    f"""{fence("$3")},
counted AS (
    INSERT INTO delivery_history AS h (endpoint_id, slot, began_at, successes, failures, latencies)
    SELECT v.endpoint_id, i.n % {INTERVALS}, to_timestamp(i.n * {HISTORY_INTERVAL_S}),
           v.successes, v.failures, v.latencies
      FROM fence,
           (SELECT floor(extract(epoch FROM clock_timestamp())
                         / {HISTORY_INTERVAL_S})::bigint AS n) i,
           unnest($4::json[]) AS document CROSS JOIN json_to_record(document)
           AS v(endpoint_id uuid, successes bigint, failures bigint, latencies bigint[])
     ORDER BY v.endpoint_id
        ON CONFLICT (endpoint_id, slot) DO UPDATE
       SET began_at = excluded.began_at,
           successes = excluded.successes + h.successes * (h.began_at = excluded.began_at)::int,
           failures = excluded.failures + h.failures * (h.began_at = excluded.began_at)::int,
           latencies = CASE WHEN h.began_at <> excluded.began_at THEN excluded.latencies
                ELSE (SELECT array_agg(was + added ORDER BY n)
                        FROM unnest(h.latencies, excluded.latencies)
                             WITH ORDINALITY AS bucket(was, added, n)) END)
UPDATE lane_progress p
   SET acked_seq = v.acked_seq, delivered_seq = v.delivered_seq, floor_batch = v.floor_batch,
       retry_seq = NULL, attempts = 0, spent = 0, first_attempt_at = NULL,
       next_attempt_at = NULL, last_response = NULL, success_at = to_timestamp(v.success_at)
  FROM fence, unnest($2::progress_row[]) AS v
 WHERE p.lane_id = v.lane_id AND p.epoch = v.epoch AND p.acked_seq < v.acked_seq
""",  # noqa: S608 (constants only)
)

# Writes the receipts of brokers' lanes, after their checkpoints.  Fencing by epoch: a receipt that
# waits while the lane moves to another replica must not replace a later one.
WRITE_RECEIPTS = WriteStatement(
    "write_receipts",
    f"""{fence("$5")}
INSERT INTO lane_receipt (lane_id, receipt)
SELECT v.lane_id, v.receipt
  FROM fence, unnest($2::bigint[], $3::bigint[], $4::text[]) AS v(lane_id, epoch, receipt)
  JOIN lane_progress p ON p.lane_id = v.lane_id AND p.epoch = v.epoch
    ON CONFLICT (lane_id) DO UPDATE SET receipt = excluded.receipt
""",  # noqa: S608 (constants only)
    repeatable=True,
)

FOUND_DETAIL = "found in the stream when the lane was opened"

# Acknowledges the deliveries that a broker's stream has, although their responses were lost.
#   moved: advances the lane's progress, fenced by epoch.
#   unlogged, logged: an attempt for each of the deliveries, after those that were logged; if $8.
# One row, unless this replica is fenced.  It fails if a trigger suppresses an attempt.
WRITE_FOUND = WriteStatement(
    "write_found",
    f"""{fence("$7")},
moved AS (
    UPDATE lane_progress p
       SET acked_seq = $4, delivered_seq = $4, floor_batch = $5, retry_seq = NULL, attempts = 0,
           spent = 0, first_attempt_at = NULL, next_attempt_at = NULL, last_response = NULL,
           success_at = to_timestamp($6::float8)
      FROM fence, (SELECT floor_batch, acked_seq FROM lane_progress WHERE lane_id = $2) was
     WHERE p.lane_id = $2 AND p.epoch = $3 AND p.acked_seq < $4
    RETURNING was.floor_batch, was.acked_seq),
unlogged AS MATERIALIZED (
    SELECT d.batch, d.seq, coalesce(a.attempt, 0) + 1 AS attempt
      FROM moved
      JOIN delivery d ON d.lane_id = $2 AND d.batch >= moved.floor_batch
                     AND d.seq > moved.acked_seq AND d.seq <= $4
      LEFT JOIN LATERAL (
           SELECT max(attempt) AS attempt, bool_or(outcome = 'delivered') AS delivered
             FROM attempt WHERE lane_id = $2 AND batch = d.batch AND seq = d.seq) a ON true
     WHERE NOT coalesce(a.delivered, false) AND $8::boolean),
logged AS (
    INSERT INTO attempt (lane_id, batch, seq, attempt, outcome, error, started_at, elapsed_ms,
                         replica_id)
    SELECT $2, batch, seq, attempt, 'delivered', '{FOUND_DETAIL}', to_timestamp($6::float8), 0, $1
      FROM unlogged
    RETURNING 1)
SELECT require_stored((SELECT count(*) FROM logged) = (SELECT count(*) FROM unlogged), 'attempt')
  FROM moved
""",  # noqa: S608 (constants only)
    repeatable=True,
)

# Records that a broker's stream has the end entry of a lane, fenced by epoch.
# One row, unless this replica is fenced.
WRITE_END = WriteStatement(
    "write_end",
    f"""{fence("$5")}
UPDATE lane_progress p
   SET end_seq = $4, retry_seq = NULL, attempts = 0, spent = 0, first_attempt_at = NULL,
       next_attempt_at = NULL, last_response = NULL
  FROM fence WHERE p.lane_id = $2 AND p.epoch = $3
""",  # noqa: S608 (constants only)
    repeatable=True,
)

# Deletes the request for a lane that its owner has carried out, unless there is another one.
WRITE_REPAIRED = WriteStatement(
    "write_repaired",
    f"""{fence("$6")}
UPDATE lane l SET repair = NULL, repair_seq = NULL
  FROM fence, lane_progress p
 WHERE l.id = $2 AND p.lane_id = l.id AND p.epoch = $3 AND l.repair = $4 AND l.repair_seq = $5
""",  # noqa: S608 (constants only)
    repeatable=True,
)

# Whether a message was written whose response was lost: its first attempt or dead letter exists.
READ_ATTEMPT_WRITTEN = """
SELECT EXISTS (SELECT FROM attempt
                WHERE lane_id = $1 AND batch = $2 AND seq = $3 AND attempt = $4
                  AND replica_id = $5)
"""
READ_DEAD_LETTER_WRITTEN = """
SELECT EXISTS (SELECT FROM dead_letter WHERE lane_id = $1 AND $2 BETWEEN seq AND to_seq)
"""

# Which checkpoints of lanes were written, when not all were.
READ_LANE_CHECKPOINTS = """
SELECT lane_id FROM lane_progress
  JOIN unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS v(lane_id, epoch, acked_seq)
       USING (lane_id, epoch, acked_seq)
"""

# Finishes an endpoint that is being removed or disabled.
#   ended: sets the final state.
#   pending: advances its lanes past their pending deliveries.
#   created: dead-letters those deliveries as one range per lane; in lane order, as every
#     statement locks them.
#   unblocked, deleted_secrets: removes lane blocks, and the secrets of a removed endpoint.
#   journalled, reported: journal entry and operational events.
# One row, unless this replica is fenced.  It fails if a trigger suppresses a dead letter.
FINISH_ENDPOINT = WriteStatement(
    "finish_endpoint",
    f"""{fence("$5")},
ended AS (
    UPDATE endpoint e
       SET state = CASE e.state WHEN 'removing' THEN 'removed' ELSE 'disabled' END
      FROM fence WHERE e.id = $2 AND e.state IN ('removing', 'disabling')
    RETURNING e.id, e.state),
pending AS (
    UPDATE lane_progress p SET acked_seq = c.last_seq, retry_seq = NULL, attempts = 0, spent = 0,
           first_attempt_at = NULL, next_attempt_at = NULL, last_response = NULL
      FROM ended, lane_counter c, unnest($3::bigint[], $4::bigint[]) AS v(lane_id, acked_seq)
     WHERE p.lane_id = v.lane_id AND c.lane_id = v.lane_id AND c.last_seq > v.acked_seq
    RETURNING p.lane_id, p.endpoint_id, p.floor_batch, v.acked_seq + 1 AS seq,
              c.last_seq AS to_seq),
created AS (
    INSERT INTO dead_letter (lane_id, endpoint_id, batch, seq, to_seq, reason, attempts,
                             replica_id)
    SELECT lane_id, endpoint_id, floor_batch, seq, to_seq, ended.state, 0, $1 FROM pending, ended
     ORDER BY lane_id
    RETURNING {DEAD_LETTER_COLUMNS}),
unblocked AS (
    DELETE FROM lane_block b USING ended, lane l
     WHERE l.endpoint_id = ended.id AND b.lane_id = l.id),
deleted_secrets AS (
    DELETE FROM endpoint_secret s USING ended
     WHERE s.endpoint_id = ended.id AND ended.state = 'removed'),
journalled AS (
    INSERT INTO journal (kind, actor, endpoint_id, data)
    SELECT 'endpoint_' || ended.state, 'replica ' || $1::bigint, ended.id,
           jsonb_build_object('dead_lettered',
                              (SELECT coalesce(sum(to_seq - seq + 1), 0) FROM pending))
      FROM ended),
reported(type, endpoint_id, details) AS (
    SELECT {DEAD_LETTER_CREATED_EVENT}
      FROM created x JOIN lane l ON l.id = x.lane_id
     WHERE {HAS_OPERATIONAL_SUBSCRIBER} AND {IS_ORDINARY})
SELECT require_stored(
           (SELECT count(*) FROM created) = (SELECT count(*) FROM pending), 'dead_letter')
  FROM fence WHERE (SELECT count(*) FROM ({PUBLISH_REPORTED_EVENTS}) published) >= 0
""",  # noqa: S608 (constants only)
    repeatable=True,
)


class RecordStore:
    """Writes attempts, checkpoints of lanes and dead letters, on one connection.

    Args:
        server_fence: `server_fence()` when the replica registered; None: not known.

    Raises:
        Fenced: some or all rows were not written, because this replica is no longer the
            owner; it must stop.
    """

    def __init__(
        self, connection: StoreConnection, replica_id: int, server_fence: int | None = None
    ) -> None:
        self._db = connection
        self._replica_id = replica_id
        self._fence = server_fence
        self._counts_attempts: bool | None = None
        self.proof = AbsenceProof(connection, of_events=True)

    async def write(
        self,
        records: Sequence[Record],
        epochs: Sequence[int],
        runs: Sequence[tuple[int, RunResults]] = (),
        refused: RefusedRow | None = None,
    ) -> None:
        """Write a group of results atomically; when fenced, none is written.

        Events that are missing are dead-lettered with the proof that they are gone.  After a lost
        response the table decides whether to write it again.

        Args:
            epochs: the epochs of the records.
            runs: pairs of lane id and results of a delivery run; written before the records.
            refused: a row that the records leave out, which is reported.

        Raises:
            CursorBroken: missing events may be hidden; nothing was written.
            CannotRun: missing events exist; nothing was written.
        """
        while True:
            try:
                return await self._write(records, epochs, runs, refused)
            except ResponseLost:
                if await self._is_written(records, runs):
                    return None

    async def _is_written(
        self, records: Sequence[Record], runs: Sequence[tuple[int, RunResults]]
    ) -> bool:
        """Whether a message of `write` was executed; False if writing it again changes nothing."""
        for lane_id, run in runs:
            key = lane_id, run.batches[0], run.seqs[0], 1, self._replica_id
            return bool(await self._db.fetchval(READ_ATTEMPT_WRITTEN, *key))
        for record in records:
            if (row := record.attempt) is not None:
                key = record.lane_id, row.batch, row.seq, row.attempt, self._replica_id
                return bool(await self._db.fetchval(READ_ATTEMPT_WRITTEN, *key))
        for record in records:
            if record.dead is not None:
                dead = record.lane_id, record.seq
                return bool(await self._db.fetchval(READ_DEAD_LETTER_WRITTEN, *dead))
        return False

    async def _write(
        self,
        records: Sequence[Record],
        epochs: Sequence[int],
        runs: Sequence[tuple[int, RunResults]],
        refused: RefusedRow | None,
    ) -> None:
        attempts = _attempts(runs, records)
        logged = sum(r.attempt is not None for r in records) + sum(len(run) for _, run in runs)
        urgent = [(r, e) for r, e in zip(records, epochs, strict=True) if r.progress is not None]
        if not urgent:
            await self._acknowledge(attempts, logged, refused)
            return
        progress = composite_array(
            _progress_row(r.lane_id, epoch, r.progress)
            for r, epoch in urgent
            if r.progress is not None
        )
        dead = [_json(_dead_row(r, r.dead)) for r, _ in urgent if r.dead is not None]
        stuck = [record.lane_id for record, _ in urgent if record.stuck]
        call = (
            WRITE_RECORDS, self._replica_id, attempts, progress, dead, self._fence, stuck, logged
        )  # fmt: skip
        if missing := [(event_id, event_id) for r, _ in urgent for event_id in r.missing]:
            before = self.proof.contradictions
            moved = await self.proof.write(missing, *await self.proof.prove(missing), call)
            if self.proof.contradictions > before:
                raise CannotRun("events that were missing exist; they are read again")
        else:
            moved = await self._db.write_together(*self._reports(refused), call)
        if moved != len(urgent):
            raise Fenced

    async def _acknowledge(self, attempts: str, count: int, refused: RefusedRow | None) -> None:
        if self._counts_attempts is None:
            self._counts_attempts = bool(await self._db.fetchval(MAY_SUPPRESS_ATTEMPTS))
        counts = self._counts_attempts or refused is not None
        call: WriteCall = (WRITE_ACKNOWLEDGEMENTS, self._replica_id, attempts, self._fence)
        if counts:
            call = (WRITE_COUNTED_ACKNOWLEDGEMENTS, *call[1:], count)
        stored = await self._db.write_together(*self._reports(refused), call)
        if not stored:
            raise Fenced
        if not counts and stored != count:
            # The next session finds the trigger.
            raise CannotRun(f"of {count} attempts a trigger suppressed {count - stored}")

    async def write_found(
        self,
        lane_id: int,
        epoch: int,
        through_seq: int,
        batch: int,
        at: float,
        refused: RefusedRow | None = None,
    ) -> None:
        """Acknowledge a lane's pending deliveries that its stream has, up to `through_seq`.

        Args:
            batch: the batch of the delivery `through_seq`.
            at: epoch seconds.
            refused: their attempts, which are reported instead of logged.
        """
        progress = (lane_id, epoch, through_seq, batch, at)
        moved = await self._db.write_together(
            *self._reports(refused),
            (WRITE_FOUND, self._replica_id, *progress, self._fence, refused is None),
        )
        if not moved and not await self._db.fetch(
            READ_LANE_CHECKPOINTS, [lane_id], [epoch], [through_seq]
        ):
            raise Fenced

    def _reports(self, refused: RefusedRow | None) -> list[WriteCall]:
        return [] if refused is None else [refused.report(f"replica {self._replica_id}")]

    async def write_end(self, lane_id: int, epoch: int, seq: int) -> None:
        """Record that a broker's stream has the end entry of a lane.

        Args:
            seq: the sequence of the end entry.
        """
        if not await self._db.write(WRITE_END, self._replica_id, lane_id, epoch, seq, self._fence):
            raise Fenced

    async def write_repaired(self, lane_id: int, epoch: int, repair: Repair) -> None:
        """Delete an operator's request that was carried out."""
        await self._db.write(
            WRITE_REPAIRED,
            self._replica_id,
            lane_id,
            epoch,
            repair.kind.value,
            repair.delivered_seq,
            self._fence,
        )

    async def journal_refill(
        self, lane_id: int, endpoint_id: UUID, first_seq: int, last_seq: int
    ) -> None:
        """Record that a stream was refilled as its endpoint's setting says."""
        data = _json({"lane": lane_id, "sequence": first_seq, "to_sequence": last_seq})
        actor = f"replica {self._replica_id}"
        await self._db.write(ADD_TO_JOURNAL, "stream_refilled", actor, endpoint_id, data)

    async def write_receipts(self, rows: Sequence[tuple[int, int, str]]) -> None:
        """Write receipts (lane, epoch, receipt); those of lanes that moved are not written."""
        await self._db.write(
            WRITE_RECEIPTS,
            self._replica_id,
            [lane_id for lane_id, _, _ in rows],
            [epoch for _, epoch, _ in rows],
            [receipt for _, _, receipt in rows],
            self._fence,
        )

    async def checkpoint(
        self,
        rows: Sequence[tuple[int, int, Progress]],
        history: Sequence[CountedDeliveries] = (),
    ) -> set[int]:
        """Write checkpoints of lanes (lane, epoch, progress); returns the lanes that were accepted.

        Args:
            history: added to the delivery history, also of lanes that are not accepted.
        """
        progress = composite_array(starmap(_progress_row, rows))
        counted = [
            _json(
                {
                    "endpoint_id": str(each.endpoint_id),
                    "successes": each.counts.successes,
                    "failures": each.counts.failures,
                    "latencies": each.counts.latencies,
                }
            )
            for each in history
        ]
        call = WRITE_LANE_CHECKPOINTS, self._replica_id, progress, self._fence
        try:
            written = await self._db.write(*call, counted)
        except ResponseLost:
            # A history that may have been counted is not counted again.
            written = await self._db.write(*call, [])
        lane_ids = [lane_id for lane_id, _, _ in rows]
        if written == len(rows):
            return set(lane_ids)
        epochs, acked = [epoch for _, epoch, _ in rows], [p.acked_seq for _, _, p in rows]
        found = await self._db.fetch(READ_LANE_CHECKPOINTS, lane_ids, epochs, acked)
        return {r["lane_id"] for r in found}

    async def finish_endpoint(self, endpoint_id: UUID, lanes: Sequence[tuple[int, int]]) -> None:
        """Dead-letter the pending deliveries of an endpoint that ends.

        Args:
            lanes: pairs of lane id and acknowledged sequence number.
        """
        finished = await self._db.write(
            FINISH_ENDPOINT,
            self._replica_id,
            endpoint_id,
            [lane_id for lane_id, _ in lanes],
            [acked for _, acked in lanes],
            self._fence,
        )
        if not finished:
            raise Fenced


def _attempts(runs: Sequence[tuple[int, RunResults]], records: Sequence[Record]) -> str:
    """The array of `attempt_row`."""
    rows: list[str] = []
    for lane_id, run in runs:
        error = composite_text(run.error)
        # A run shares the dictionary of a repeated response, which is encoded once.
        responses = {id(each): each for each in run.responses}
        encoded = {key: _json_field(each) for key, each in responses.items()}
        columns = run.batches, run.seqs, run.statuses, run.started_at, run.elapsed_s, run.responses
        rows += [
            _attempt_row(
                lane_id,
                batch,
                seq,
                1,
                "delivered",
                status,
                error,
                started_at,
                elapsed_s,
                encoded[id(response)],
            )
            for batch, seq, status, started_at, elapsed_s, response in zip(*columns, strict=True)
        ]
    for record in records:
        if (row := record.attempt) is not None:
            rows.append(
                _attempt_row(
                    record.lane_id,
                    row.batch,
                    row.seq,
                    row.attempt,
                    row.outcome,
                    row.status,
                    composite_text(row.error),
                    row.started_at,
                    row.elapsed_s,
                    _json_field(row.response),
                )
            )
    return composite_array(rows)


def _attempt_row(
    lane_id: int,
    batch: int,
    seq: int,
    attempt: int,
    outcome: str,
    status: int | None,
    error: str,
    started_at: float,
    elapsed_s: float,
    response: str,
) -> str:
    """The fields in the order of the type `attempt_row`; error and response are encoded."""
    return (
        f"({lane_id},{batch},{seq},{attempt},{outcome},{composite_number(status)},"
        f"{error},{round(started_at * 1e6)},{round(elapsed_s * 1e6)},{response})"
    )


def _progress_row(lane_id: int, epoch: int, p: Progress) -> str:
    """The fields in the order of the type `progress_row`."""
    return (
        f"({lane_id},{epoch},{p.acked_seq},{p.delivered_seq},{p.floor_batch},"
        f"{composite_number(p.retry_seq)},{p.attempts},{p.spent},"
        f"{composite_number(p.first_attempt_at)},{composite_number(p.next_attempt_at)},"
        f"{_json_field(p.last_response)},{composite_number(p.success_at)})"
    )


def _dead_row(record: Record, dead: DeadLetter | DeadRange) -> dict[str, Any]:
    row = {
        "lane_id": record.lane_id,
        "reason": dead.reason,
        "attempts": dead.attempts,
        "last_response": dead.last_response,
        "blocks": record.blocks,
    }
    if isinstance(dead, DeadRange):
        return row | {"batch": dead.batch, "seq": dead.seq, "to_seq": dead.to_seq}
    d = dead.delivery
    row |= {"batch": d.batch, "seq": d.seq, "to_seq": d.seq}
    return row | {"outbox_id": d.outbox_id, "backfill_id": d.backfill_id}


def _json_field(value: dict[str, Any] | None) -> str:
    return "" if value is None else composite_text(_json(value))


def _json(value: object) -> str:
    return orjson.dumps(value).decode()

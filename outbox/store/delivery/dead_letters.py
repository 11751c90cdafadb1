"""Dead letters of a group, with what is reported about it, and those of an endpoint that ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.delivery.commands import DeadRange
from outbox.store.cluster.replicas import fence
from outbox.store.delivery.progress import MOVED
from outbox.store.operational_events import (
    DEAD_LETTER_COLUMNS,
    DEAD_LETTER_CREATED_EVENT,
    HAS_OPERATIONAL_SUBSCRIBER,
    IS_ORDINARY,
    LANE_BLOCKED_EVENT,
    LANE_STUCK_EVENT,
    PUBLISH_REPORTED_EVENTS,
)
from outbox.store.sql.message import WriteStatement
from outbox.store.sql.row_params import json_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.delivery.commands import DeadLetter, Record
    from outbox.store.sql.message import WriteCall

RANGE_GROWTH_MAX_S = 3600
"""Maximum time for which a dead-letter range is extended; it bounds how much too early the
deliveries in it may be dropped."""

# Writes the dead letters $4 of a group, after `WRITE_PROGRESS`.
#   dead_lettered: those of moved lanes.  The event's content is copied from where the delivery was
#     read, because arguments appear in the server's log if the message fails.
#   preceding: the range directly before a new range of the same reason, because a backlog is
#     trimmed repeatedly.  Only a recent one: a range is as old as its beginning, and one that
#     never aged would keep its events for ever.  SKIP LOCKED: acknowledgements must not wait
#     for an operator who is deciding about it.
#   extended: extends that range.
#   created: inserts all other dead letters.
#   blocked: blocks lanes of endpoints with on_dead_letter = block.
# One row for each lane that was moved.  It fails if a trigger suppresses a dead letter.
WRITE_DEAD_LETTERS = WriteStatement(
    "write_dead_letters",
    f"""{MOVED},
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
    SELECT x.id, g.to_seq
      FROM dead_lettered g CROSS JOIN LATERAL (
           SELECT id, to_seq, outbox_id, reason, state, began_at
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
    RETURNING x.lane_id),
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
    RETURNING 1),
blocked AS (
    INSERT INTO lane_block (lane_id, seq) SELECT lane_id, seq FROM dead_lettered WHERE blocks)
SELECT require_stored((SELECT count(*) FROM created) + (SELECT count(*) FROM extended)
                      = (SELECT count(*) FROM dead_lettered), 'dead_letter')
  FROM moved
""",  # noqa: S608 (constants only)
)

# Reports a group, after `WRITE_PROGRESS` and `WRITE_DEAD_LETTERS`.
#   dead_lettered: the dead letters that begin with the sequences $5 of the lanes $4, or the ranges
#     that were extended by them.
#   journalled: journal entries for dead-lettered backlogs, abandoned lanes and missing events.
#   new: the dead letters to report: the created ones, and an extended range when it
#     receives its first ordinary event.  MATERIALIZED: evaluated once for two readers.
#   reported: the operational events for them, and for the lanes to report as stuck ($6), whose
#     deliveries were read from an event or a copy; an end entry is no delivery.
# One row for each lane that was moved.
REPORT_RECORDS = WriteStatement(
    "report_records",
    f"""{MOVED},
dead_lettered AS MATERIALIZED (
    SELECT x.*, d.seq AS from_seq
      FROM unnest($4::bigint[], $5::bigint[]) AS d(lane_id, seq) JOIN moved USING (lane_id)
     CROSS JOIN LATERAL (
           SELECT {DEAD_LETTER_COLUMNS}, outbox_id FROM dead_letter
            WHERE lane_id = d.lane_id AND seq <= d.seq ORDER BY seq DESC LIMIT 1) x),
journalled AS (
    INSERT INTO journal (kind, actor, endpoint_id, data)
    SELECT CASE reason WHEN 'adopted' THEN 'lane_abandoned' WHEN 'missing' THEN 'events_missing'
                       ELSE 'backlog_dead_lettered' END,
           'replica ' || $1::bigint, endpoint_id,
           jsonb_build_object('lane', lane_id, 'from', from_seq, 'to', to_seq)
      FROM dead_lettered WHERE outbox_id IS NULL),
new AS MATERIALIZED (
    SELECT * FROM dead_lettered x
     WHERE {HAS_OPERATIONAL_SUBSCRIBER}
       AND CASE x.seq WHEN x.from_seq THEN {IS_ORDINARY}
                ELSE NOT contains_ordinary_event(x.lane_id, x.batch, x.seq, x.from_seq - 1)
                     AND contains_ordinary_event(x.lane_id, x.batch, x.from_seq, x.to_seq) END),
reported(type, endpoint_id, details) AS (
    SELECT {LANE_STUCK_EVENT}
      FROM moved x JOIN lane l ON l.id = x.lane_id JOIN endpoint e ON e.id = x.endpoint_id
      LEFT JOIN LATERAL (
           SELECT outbox_id, copy_id FROM delivery
            WHERE lane_id = x.lane_id AND batch = x.floor_batch AND seq = x.retry_seq
            LIMIT 1) n ON true
      LEFT JOIN LATERAL (
           SELECT event_id, type FROM outbox WHERE id = n.outbox_id
            UNION ALL
           SELECT event_id, type FROM dead_letter WHERE id = n.copy_id LIMIT 1) o ON true
     WHERE x.lane_id = ANY ($6::bigint[]) AND {HAS_OPERATIONAL_SUBSCRIBER}
       AND coalesce(o.type, '') NOT LIKE 'outbox.%'
     UNION ALL
    SELECT {DEAD_LETTER_CREATED_EVENT}
      FROM new x JOIN lane l ON l.id = x.lane_id
     UNION ALL
    SELECT {LANE_BLOCKED_EVENT}
      FROM new x JOIN lane_block b ON b.lane_id = x.lane_id AND b.seq = x.seq
      JOIN lane l ON l.id = x.lane_id)
SELECT FROM moved WHERE (SELECT count(*) FROM ({PUBLISH_REPORTED_EVENTS}) published) >= 0
""",  # noqa: S608 (constants only)
)

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


def dead_letter_calls(replica_id: int, records: Sequence[tuple[Record, int]]) -> list[WriteCall]:
    """The calls after that of `WRITE_PROGRESS`.

    Args:
        records: those of a group that have progress, with their epochs.
    """
    lanes = [record.lane_id for record, _ in records], [epoch for _, epoch in records]
    dead = [_dead_row(record, record.dead) for record, _ in records if record.dead is not None]
    stuck = [record.lane_id for record, _ in records if record.stuck]
    calls: list[WriteCall] = []
    if dead:
        calls.append((WRITE_DEAD_LETTERS, replica_id, *lanes, [json_text(row) for row in dead]))
    if dead or stuck:
        begins = [row["lane_id"] for row in dead], [row["seq"] for row in dead]
        calls.append((REPORT_RECORDS, replica_id, *lanes, *begins, stuck))
    return calls


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

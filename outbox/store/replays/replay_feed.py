"""SQL of the leader for replay jobs: the next chunks, and the claims of dead letters.

Everything is read without a lock.  What a job's next chunk depends on changes only by the
leader's own messages, or together with the routing version, which the message that writes the
batch checks (see `outbox.store.replays.replay_progress`).  There are three exceptions:

- Operators discard dead letters that block no lane under no lock.  So dead letters are claimed
  first, in a message of its own that requires all of them to be open; the batch after it reads
  the replays that this created.
- An erasure may follow the read.  Its deliveries are found to be erased when they are sent, as
  after an erasure that follows the batch.
- Retention drops nothing that a pending replay or a running job needs
  (`outbox.store.retention.periods`), so it drops nothing that is planned: only the batch itself
  would set these free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.replay_throttle import EndpointProgress, JobPart
from outbox.core.sequencing.router import RoutableEvent
from outbox.store.channels import NOTIFY_ALL
from outbox.store.cluster.leadership import REQUIRE_LEADER
from outbox.store.connection.row_security import rows_hidden, stop_hidden
from outbox.store.routing_change import BEGIN_CHANGE
from outbox.store.sql.expressions import key_hash
from outbox.store.sql.message import WriteStatement
from outbox.store.sql.type_match import matches_criteria

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from outbox.core.sequencing.replay_throttle import PartKey, Share
    from outbox.store.connection.store_connection import StoreConnection
    from outbox.store.sql.message import WriteCall

# Whether a selection `s` includes a dead letter `d`; the endpoint is checked separately.  A
# range has neither type nor tenant.
MATCHES_SELECTION = f"""
    {matches_criteria("d", "at")} AND (s.reason IS NULL OR d.reason = s.reason)
"""

# Whether the event of a dead letter `d` was erased.  One that was missing, also if its delivery was
# skipped, is searched for again.
IS_ERASED = """
    (d.outbox_id IS NOT NULL AND num_nonnulls(d.payload, d.body) = 0
     AND (d.reason NOT IN ('missing', 'skipped') OR d.erased_at IS NOT NULL))
"""

# Why nothing may be replayed at an endpoint `e`; NULL: replays are allowed.
END_REASON = """
    CASE WHEN e.state IN ('removing', 'removed') THEN 'removed'
         WHEN e.state IN ('disabling', 'disabled') THEN 'disabled' END
"""

# Cancels replays of endpoints or of a job: what no batch has taken yet.
#   pending: the unfinished replays; `begun` if some of their numbers were already sent again.
#   cut: ends a begun replay where it is.  deleted: removes the others.
#   letters: their dead letters, which become open again; locked in id order, as in every statement
#     that locks several, to avoid deadlocks.
CANCEL_REPLAYS = WriteStatement(
    "cancel_replays",
    """
WITH pending AS (
    SELECT r.id, r.dead_id, r.next_seq > d.seq AS begun
      FROM replay r JOIN dead_letter d ON d.id = r.dead_id
     WHERE ($1::uuid[] IS NULL OR r.endpoint_id = ANY ($1))
       AND ($2::bigint IS NULL OR r.job_id = $2)
       AND r.next_seq <= r.to_seq),
cut AS (
    UPDATE replay r SET to_seq = r.next_seq - 1 FROM pending p WHERE r.id = p.id AND p.begun),
deleted AS (
    DELETE FROM replay r USING pending p WHERE r.id = p.id AND NOT p.begun),
letters AS MATERIALIZED (
    SELECT id FROM dead_letter WHERE id IN (SELECT dead_id FROM pending) ORDER BY id FOR UPDATE)
UPDATE dead_letter d SET state = 'dead' FROM letters WHERE d.id = letters.id
""",
)

# Parts of jobs that have not ended; `end_reason` if no more of them may be taken.
READ_PARTS = f"""
SELECT p.job_id, p.endpoint_id, j.kind, j.rate_per_s, e.lanes,
       coalesce(CASE j.state WHEN 'aborted' THEN 'aborted' END, {END_REASON},
                CASE WHEN j.kind = 'history' AND NOT EXISTS (
                          SELECT FROM subscription s
                           WHERE s.endpoint_id = e.id AND s.to_batch IS NULL)
                     THEN 'unsubscribed' END) AS end_reason,
       EXISTS (SELECT FROM feed f
                WHERE f.endpoint_id = p.endpoint_id AND f.after_job = p.job_id
                  AND f.ended_at IS NULL) AS is_awaited,
       {rows_hidden("subscription")} AS hidden
  FROM replay_job_endpoint p
  JOIN replay_job j ON j.id = p.job_id
  JOIN endpoint e ON e.id = p.endpoint_id
 WHERE p.ended_at IS NULL
 ORDER BY p.job_id, p.endpoint_id
"""  # noqa: S608 (constants only)

# The progress of the last chunks of endpoints, read from the last delivery of each lane in the
# batches that contain them.  Lanes of older generations count, too, because the lanes may have
# changed since.  OFFSET 0 and LIMIT 1 keep the subqueries index lookups.
READ_CHUNK_PROGRESS = f"""
SELECT requested.id AS endpoint_id, coalesce(chunk.done, true) AS done, chunk.mean_ms,
       coalesce(sequenced.numbers, 0)::bigint AS numbers,
       {rows_hidden("lane", "delivery_run", "lane_progress", "attempt_run")} AS hidden
  FROM unnest($1::uuid[]) AS requested(id)
 CROSS JOIN LATERAL (
       SELECT bool_and(p.acked_seq >= d.seq OR EXISTS (
                  SELECT FROM attempt a
                   WHERE a.lane_id = l.id AND a.batch = part.batch AND a.seq = d.seq
                     AND a.outcome = 'delivered')) AS done,
              avg(attempts.mean_ms) AS mean_ms
         FROM replay_job_endpoint part
        CROSS JOIN LATERAL (
              SELECT id FROM lane WHERE endpoint_id = part.endpoint_id OFFSET 0) l
        CROSS JOIN LATERAL (
              SELECT seq FROM delivery WHERE lane_id = l.id AND batch = part.batch
               ORDER BY seq DESC LIMIT 1) d
        CROSS JOIN LATERAL (
              SELECT acked_seq FROM lane_progress WHERE lane_id = l.id LIMIT 1) p
        CROSS JOIN LATERAL (
              SELECT avg(elapsed_ms) AS mean_ms FROM attempt
               WHERE lane_id = l.id AND batch = part.batch) attempts
        WHERE part.endpoint_id = requested.id AND part.ended_at IS NULL) chunk
 CROSS JOIN LATERAL (
       SELECT sum(c.last_seq) AS numbers
         FROM lane l CROSS JOIN LATERAL (
              SELECT last_seq FROM lane_counter
               WHERE lane_id = l.id ORDER BY last_seq DESC LIMIT 1) c
        WHERE l.endpoint_id = requested.id) sequenced
"""  # noqa: S608 (constants only)

SCAN_MAX, SCAN_EXTRA = 200, 10
"""Dead letters or events that are read for one part per batch; and dead letters read beyond
those to take, in a job without a selection, because erased ones are skipped."""

# The next dead letters of parts that have no pending replay; one empty row for a part that has no
# more.
READ_DEAD_LETTERS = f"""
SELECT p.job_id, p.endpoint_id, p.next_id, d.id, d.is_erased, d.is_selected, d.blocks,
       {rows_hidden("dead_letter", "replay", "lane_block")} AS hidden
  FROM unnest($1::bigint[], $2::uuid[], $3::bigint[]) AS part(job_id, endpoint_id, numbers)
 CROSS JOIN LATERAL (
       SELECT * FROM replay_job_endpoint
        WHERE job_id = part.job_id AND endpoint_id = part.endpoint_id LIMIT 1) p
  JOIN replay_job s ON s.id = p.job_id AND s.state = 'running'
 CROSS JOIN LATERAL (
       SELECT EXISTS (SELECT FROM replay r
                       WHERE r.job_id = p.job_id AND r.endpoint_id = p.endpoint_id
                         AND r.next_seq <= r.to_seq) AS has_replay OFFSET 0) pending
  LEFT JOIN LATERAL (
       SELECT d.id, {IS_ERASED} AS is_erased,
              {MATCHES_SELECTION} AS is_selected,
              EXISTS (SELECT FROM lane_block
                       WHERE lane_id = d.lane_id AND seq = d.seq) AS blocks
         FROM (SELECT * FROM dead_letter
                WHERE endpoint_id = p.endpoint_id AND state = 'dead'
                  AND id >= p.next_id AND id <= p.last_id
                ORDER BY id
                LIMIT CASE WHEN num_nonnulls(s.types, s.tenant, s.reason, s.since, s.until) > 0
                           THEN {SCAN_MAX} ELSE part.numbers + {SCAN_EXTRA} END) d) d ON true
 WHERE NOT pending.has_replay
 ORDER BY p.job_id, p.endpoint_id, d.id
"""  # noqa: S608 (constants only)

# Advances parts past the dead letters that are claimed; aborts the message unless each part is
# where it was when they were read.
PASS_DEAD_LETTERS = WriteStatement(
    "pass_dead_letters",
    """
WITH passed AS (
    UPDATE replay_job_endpoint p SET next_id = c.next_id, erased = p.erased + c.erased
      FROM unnest($1::bigint[], $2::uuid[], $3::bigint[], $4::bigint[], $5::bigint[])
           AS c(job_id, endpoint_id, old_id, next_id, erased)
     WHERE p.job_id = c.job_id AND p.endpoint_id = c.endpoint_id AND p.next_id = c.old_id
    RETURNING 1)
SELECT abort_unless((SELECT count(*) FROM passed) = cardinality($1::bigint[]))
""",
)

# Claims dead letters for a replay; aborts the message if an operator has changed some of them in
# the meantime.
#   locked: those that are still open, locked in id order, as every statement that locks several,
#     to avoid deadlocks.  SKIP LOCKED: the cursor row is held, which must not wait for an erasure.
#   claimed: sets their state.  unblocked: unblocks their lanes.  requested: their replays.
CLAIM_DEAD_LETTERS = WriteStatement(
    "claim_dead_letters",
    """
WITH locked AS MATERIALIZED (
    SELECT id FROM dead_letter WHERE id = ANY ($2::bigint[]) AND state = 'dead'
     ORDER BY id FOR UPDATE SKIP LOCKED),
claimed AS (
    UPDATE dead_letter d SET state = 'replaying' FROM locked WHERE d.id = locked.id
    RETURNING d.id, d.endpoint_id, d.lane_id, d.batch, d.seq, d.to_seq),
unblocked AS (
    DELETE FROM lane_block b USING claimed c WHERE b.lane_id = c.lane_id AND b.seq = c.seq),
requested AS (
    INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch, to_seq)
    SELECT chosen.job_id, c.endpoint_id, c.id, c.seq, c.batch, c.to_seq
      FROM claimed c
      JOIN unnest($1::bigint[], $2::bigint[]) AS chosen(job_id, id) ON chosen.id = c.id
     ORDER BY c.id)
SELECT abort_unless((SELECT count(*) FROM locked) = cardinality($2::bigint[]))
""",
)

# The next events of a backfill, in order.  It covers only events sequenced before the request:
# all ids up to `last_id` were, except those in gaps open at that time, so every read returns
# the same events.  An event found in such a gap later is sequenced later, and the endpoint
# receives it as a live event: exactly once.
READ_HISTORY = f"""
SELECT p.last_id, o.id, o.tenant, o.type, {key_hash("o.key", "o.id")} AS key_hash,
       {matches_criteria("o", "created_at")} AND NOT s.gaps @> o.id AS is_selected,
       {rows_hidden("outbox")} AS hidden
  FROM (SELECT * FROM replay_job_endpoint WHERE job_id = $1 AND endpoint_id = $2 LIMIT 1) p
  JOIN replay_job s ON s.id = p.job_id AND s.state = 'running'
  LEFT JOIN LATERAL (
       (SELECT id, tenant, type, key, created_at FROM outbox
         WHERE s.outbox_ids IS NULL AND id >= p.next_id AND id <= p.last_id ORDER BY id LIMIT $3)
        UNION ALL
       (SELECT id, tenant, type, key, created_at FROM outbox
         WHERE id = ANY (s.outbox_ids) AND id >= p.next_id AND id <= p.last_id
           AND erased_at IS NULL
         ORDER BY id LIMIT $3)) o ON true
 ORDER BY o.id
"""  # noqa: S608


@dataclass(slots=True)
class DeadLetterChunk:
    """The next dead letters of a part."""

    old_id: int
    """The id where they begin."""
    next_id: int
    """The id where the rest begins."""
    chosen: list[int] = field(default_factory=list)
    erased: int = 0
    blocks: bool = False
    """Whether one of them blocks a lane."""


@dataclass(frozen=True, slots=True)
class HistoryChunk:
    """The next events of a backfill."""

    events: list[RoutableEvent]
    """The events that match the selection."""
    next_id: int
    """The first id that was not read."""
    more: bool


class ReplayFeedStore:
    """Reads replay jobs and claims their dead letters, on the sequencer's connection.

    Args:
        server_fence: `server_fence()` when this replica registered; None: not known.
    """

    def __init__(self, connection: StoreConnection, server_fence: int | None = None) -> None:
        self._db = connection
        self._fence = server_fence

    async def _fetch(self, statement: str, *arguments: Any) -> list[dict[str, Any]]:
        """The rows of a read from which the end of a job may be concluded.

        Raises:
            CursorBroken: some may be hidden.
        """
        rows = [dict(row) for row in await self._db.fetch(statement, *arguments)]
        hidden = [row.pop("hidden") for row in rows]
        if any(hidden):
            await stop_hidden(self._db)
        return rows

    async def read_parts(self) -> list[JobPart]:
        """All parts that have not ended."""
        return [JobPart(**row) for row in await self._fetch(READ_PARTS)]

    async def read_chunk_progress(
        self, endpoint_ids: Sequence[UUID]
    ) -> dict[UUID, EndpointProgress]:
        """The progress of the last chunks of the endpoints."""
        rows = await self._fetch(READ_CHUNK_PROGRESS, list(endpoint_ids))
        return {
            r["endpoint_id"]: EndpointProgress(r["done"], r["mean_ms"], r["numbers"]) for r in rows
        }

    async def read_dead_letters(
        self, shares: Sequence[Share]
    ) -> dict[PartKey, DeadLetterChunk | None]:
        """The next dead letters of parts.

        Returns:
            The chunk of each part; None: it has no more.  A part with a pending replay is
            left out.
        """
        rows = await self._fetch(
            READ_DEAD_LETTERS,
            [share.part.job_id for share in shares],
            [share.part.endpoint_id for share in shares],
            [share.numbers for share in shares],
        )
        numbers = {share.part.key: share.numbers for share in shares}
        found: dict[PartKey, DeadLetterChunk | None] = {}
        for row in rows:
            part = (row["job_id"], row["endpoint_id"])
            if row["id"] is None:
                found[part] = None
                continue
            letters = found.setdefault(part, DeadLetterChunk(row["next_id"], row["next_id"]))
            assert letters is not None
            if len(letters.chosen) == numbers[part]:
                continue
            letters.next_id = row["id"] + 1
            if row["is_selected"] and row["is_erased"]:
                letters.erased += 1
            elif row["is_selected"]:
                letters.chosen.append(row["id"])
                letters.blocks |= row["blocks"]
        return found

    async def claim_dead_letters(
        self, chunks: Mapping[PartKey, DeadLetterChunk], leader: int, version: int
    ) -> bool:
        """Create replays of dead letters, in one message.

        If a lane is unblocked, this raises the routing version, which notifies its owner.

        Returns:
            False if nothing was written: this replica does not lead under this routing version,
            or a dead letter was changed or locked.
        """
        chosen = [(part[0], i) for part, each in chunks.items() for i in each.chosen]
        unblocks = any(chunk.blocks for chunk in chunks.values())
        passed = [(*key, c.old_id, c.next_id, c.erased) for key, c in chunks.items()]
        calls: list[WriteCall] = [(REQUIRE_LEADER, leader, version, self._fence)]
        if unblocks:
            calls.append((BEGIN_CHANGE,))
        calls += [
            (PASS_DEAD_LETTERS, *zip(*passed, strict=True)),
            (CLAIM_DEAD_LETTERS, [job_id for job_id, _ in chosen], [i for _, i in chosen]),
        ]
        if unblocks:
            calls.append((NOTIFY_ALL,))
        return bool(await self._db.write_unless_aborted(*calls))

    async def read_history(self, part: JobPart) -> HistoryChunk | None:
        """The next events of a backfill; None: it is not running any more."""
        rows = await self._fetch(READ_HISTORY, part.job_id, part.endpoint_id, SCAN_MAX)
        if not rows:
            return None
        seen = [r for r in rows if r["id"] is not None]
        more = len(seen) == SCAN_MAX
        return HistoryChunk(
            [
                RoutableEvent(r["id"], r["tenant"], r["type"], r["key_hash"])
                for r in seen
                if r["is_selected"]
            ],
            next_id=seen[-1]["id"] + 1 if more else rows[0]["last_id"] + 1,
            more=more,
        )

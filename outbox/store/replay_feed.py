"""SQL of the leader for replay jobs: the next chunks, and the progress of jobs.

A chunk is taken under the cursor row, in the transaction of the batch that creates its
deliveries.  So cancelling a job, which locks the row, too, takes effect immediately, and the
next leader continues exactly where the last batch ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.replay_throttle import EndpointProgress, JobPart
from outbox.core.sequencing.router import RoutableEvent
from outbox.store.channels import WAKE_ALL
from outbox.store.routing_change import RAISE_VERSION, write_journal
from outbox.store.type_match import TYPE_MATCHES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.sequencing.replay_throttle import Share

# Whether a selection `s` includes a dead letter `d`; the endpoint is checked separately.  A
# range has neither type nor tenant.
MATCHES_SELECTION = f"""
    (s.types IS NULL OR {TYPE_MATCHES.replace("o.type", "d.type")})
    AND (s.tenant IS NULL OR d.tenant = s.tenant)
    AND (s.reason IS NULL OR d.reason = s.reason)
    AND (s.since IS NULL OR d.at >= s.since)
    AND (s.until IS NULL OR d.at < s.until)
"""

# Cancels replays of an endpoint or of a job: what no batch has taken yet.
#   pending: the unfinished replays; `begun` if some of their numbers were already sent again.
#   cut: ends a begun replay where it is.  deleted: removes the others.
# Their dead letters become open again.
CANCEL_REPLAYS = """
WITH pending AS (
    SELECT r.id, r.dead_id, coalesce(r.next_seq > d.seq, true) AS begun
      FROM replay r LEFT JOIN dead_letter d ON d.id = r.dead_id
     WHERE ($1::uuid IS NULL OR r.endpoint_id = $1) AND ($2::bigint IS NULL OR r.job_id = $2)
       AND r.next_seq <= r.to_seq),
cut AS (
    UPDATE replay r SET to_seq = r.next_seq - 1 FROM pending p WHERE r.id = p.id AND p.begun),
deleted AS (
    DELETE FROM replay r USING pending p WHERE r.id = p.id AND NOT p.begun)
UPDATE dead_letter SET state = 'dead' WHERE id IN (SELECT dead_id FROM pending)
"""

# Parts of jobs that have not ended; `end_reason` if no more of them may be taken.
READ_PARTS = """
SELECT p.job_id, p.endpoint_id, j.kind, j.rate_per_s, e.lanes,
       CASE WHEN j.state = 'aborted' THEN 'aborted'
            WHEN e.state IN ('removing', 'removed') THEN 'removed'
            WHEN e.state IN ('disabling', 'disabled') THEN 'disabled'
            WHEN j.kind = 'history' AND NOT EXISTS (
                 SELECT FROM subscription s
                  WHERE s.endpoint_id = e.id AND s.to_batch IS NULL) THEN 'unsubscribed'
            END AS end_reason
  FROM replay_job_endpoint p
  JOIN replay_job j ON j.id = p.job_id
  JOIN endpoint e ON e.id = p.endpoint_id
 WHERE p.ended_at IS NULL
 ORDER BY p.job_id, p.endpoint_id
"""

# The progress of the last chunks of endpoints, read from the last delivery of each lane in the
# batches that contain them.  Lanes of older generations count, too, because the lanes may have
# changed since.  OFFSET 0 and LIMIT 1 keep the subqueries index lookups.
READ_CHUNK_PROGRESS = """
SELECT requested.id AS endpoint_id, coalesce(chunk.done, true) AS done, chunk.mean_ms,
       coalesce(sequenced.numbers, 0)::bigint AS numbers
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
"""

SCAN_MAX, SCAN_EXTRA = 200, 10
"""Dead letters or events that are read for one part per batch; and dead letters read beyond
those to take, in a job without a selection, because erased ones are skipped."""

# The next dead letters of parts that have no pending replay; one empty row for a part that has no
# more.  The part of a job of kind lane is one replay and nothing else.
READ_DEAD_LETTERS = f"""
SELECT p.job_id, p.endpoint_id, p.last_id, d.id, d.is_erased, d.is_selected
  FROM unnest($1::bigint[], $2::uuid[], $3::bigint[]) AS part(job_id, endpoint_id, numbers)
 CROSS JOIN LATERAL (
       SELECT * FROM replay_job_endpoint
        WHERE job_id = part.job_id AND endpoint_id = part.endpoint_id LIMIT 1) p
  JOIN replay_job s ON s.id = p.job_id AND s.kind IN ('dead', 'lane') AND s.state = 'running'
 CROSS JOIN LATERAL (
       SELECT EXISTS (SELECT FROM replay r
                       WHERE r.job_id = p.job_id AND r.endpoint_id = p.endpoint_id
                         AND r.next_seq <= r.to_seq) AS has_replay OFFSET 0) pending
  LEFT JOIN LATERAL (
       SELECT d.id, d.outbox_id IS NOT NULL AND d.payload IS NULL AS is_erased,
              {MATCHES_SELECTION} AS is_selected
         FROM (SELECT * FROM dead_letter
                WHERE s.kind = 'dead' AND endpoint_id = p.endpoint_id AND state = 'dead'
                  AND id >= p.next_id AND id <= p.last_id
                ORDER BY id
                LIMIT CASE WHEN num_nonnulls(s.types, s.tenant, s.reason, s.since, s.until) > 0
                           THEN {SCAN_MAX} ELSE part.numbers + {SCAN_EXTRA} END) d) d ON true
 WHERE NOT pending.has_replay
 ORDER BY p.job_id, p.endpoint_id, d.id
"""  # noqa: S608 (constants only)

# Claims dead letters for a replay; an operator may have changed some in the meantime.
#   locked: those that are still open, locked in id order, as every statement that locks
#     several, to avoid deadlocks.
#   claimed: sets their state.  unblocked: unblocks their lanes.  requested: their replays.
CLAIM_DEAD_LETTERS = """
WITH locked AS MATERIALIZED (
    SELECT id FROM dead_letter WHERE id = ANY ($2) AND state = 'dead' ORDER BY id FOR UPDATE),
claimed AS (
    UPDATE dead_letter d SET state = 'replaying' FROM locked WHERE d.id = locked.id
    RETURNING d.id, d.endpoint_id, d.lane_id, d.batch, d.seq, d.to_seq),
unblocked AS (
    DELETE FROM lane_block b USING claimed c WHERE b.lane_id = c.lane_id AND b.seq = c.seq
    RETURNING b.lane_id),
requested AS (
    INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch, to_seq)
    SELECT chosen.job_id, c.endpoint_id, c.id, c.seq, c.batch, c.to_seq
      FROM claimed c
      JOIN unnest($1::bigint[], $2::bigint[]) AS chosen(job_id, id) ON chosen.id = c.id
     ORDER BY c.id)
SELECT count(*) AS unblocked FROM unblocked
"""

# The next events of a backfill, in order.  It covers only events sequenced before the request:
# all ids up to `last_id` were, except those in gaps open at that time, so every read returns
# the same events.  An event found in such a gap later is sequenced later, and the endpoint
# receives it as a live event: exactly once.
READ_HISTORY = f"""
SELECT p.last_id, o.id, o.tenant, o.type,
       CASE WHEN o.key IS NULL THEN o.id
            ELSE hashtextextended(o.key, 0) & 9223372036854775807 END AS spread,
       o.created_at >= s.since AND (s.until IS NULL OR o.created_at < s.until)
           AND NOT s.gaps @> o.id AND (s.types IS NULL OR {TYPE_MATCHES}) AS is_selected
  FROM (SELECT * FROM replay_job_endpoint WHERE job_id = $1 AND endpoint_id = $2 LIMIT 1) p
  JOIN replay_job s ON s.id = p.job_id AND s.state = 'running'
  LEFT JOIN LATERAL (
       SELECT id, tenant, type, key, created_at FROM outbox
        WHERE id >= p.next_id AND id <= p.last_id ORDER BY id LIMIT $3) o ON true
 ORDER BY o.id
"""  # noqa: S608

# Stores the progress of parts after a batch.
ADVANCE_PARTS = """
UPDATE replay_job_endpoint p
   SET next_id = coalesce(m.next_id, p.next_id), taken = p.taken + m.taken,
       erased = p.erased + m.erased,
       batch = CASE WHEN m.taken > 0 THEN $1::bigint ELSE p.batch END, from_id = m.from_id
  FROM unnest($2::bigint[], $3::uuid[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[])
       AS m(job_id, endpoint_id, next_id, taken, erased, from_id)
 WHERE p.job_id = m.job_id AND p.endpoint_id = m.endpoint_id
"""

# Ends parts.
END_PARTS = """
UPDATE replay_job_endpoint p
   SET ended_at = clock_timestamp(), end_reason = e.end_reason, from_id = NULL
  FROM unnest($1::bigint[], $2::uuid[], $3::text[]) AS e(job_id, endpoint_id, end_reason)
 WHERE p.job_id = e.job_id AND p.endpoint_id = e.endpoint_id
"""

# Ends jobs whose last part has ended.
END_JOBS = """
UPDATE replay_job j
   SET state = CASE j.state WHEN 'running' THEN 'done' ELSE j.state END,
       ended_at = clock_timestamp()
 WHERE j.id = ANY ($1)
   AND NOT EXISTS (SELECT FROM replay_job_endpoint p WHERE p.job_id = j.id AND p.ended_at IS NULL)
RETURNING j.id, j.state, j.kind
"""

# The number of deliveries that a job created.
READ_JOB_DELIVERIES = (
    "SELECT sum(taken)::bigint AS taken FROM replay_job_endpoint WHERE job_id = $1"
)


@dataclass(slots=True)
class PartProgress:
    """Progress of a part in one batch: what was taken, and where the rest begins."""

    share: Share
    next_id: int | None = None
    """None: unchanged."""
    taken: int = 0
    erased: int = 0
    from_id: int | None = None
    """The lowest event id that a backfill may still read."""


@dataclass(slots=True)
class DeadLetterChunk:
    """The next dead letters of a part."""

    chosen: list[int] = field(default_factory=list)
    erased: int = 0
    next_id: int = 0


@dataclass(frozen=True, slots=True)
class HistoryChunk:
    """The next events of a backfill."""

    events: list[RoutableEvent]
    """The events that match the selection."""
    next_id: int
    """The first id that was not read."""
    more: bool


class ReplayFeedStore:
    """Reads and advances replay jobs, on the sequencer's connection.

    All methods but `read_parts` and `read_chunk_progress` require the transaction of a batch.
    """

    def __init__(self, connection: Connection[Any]) -> None:
        self._db = connection

    async def read_parts(self) -> list[JobPart]:
        """All parts that have not ended."""
        return [JobPart(**dict(row)) for row in await self._db.fetch(READ_PARTS)]

    async def read_chunk_progress(
        self, endpoint_ids: Sequence[UUID]
    ) -> dict[UUID, EndpointProgress]:
        """The progress of the last chunks of the endpoints."""
        rows = await self._db.fetch(READ_CHUNK_PROGRESS, list(endpoint_ids))
        return {
            r["endpoint_id"]: EndpointProgress(r["done"], r["mean_ms"], r["numbers"]) for r in rows
        }

    async def claim_dead_letters(
        self, shares: Sequence[Share]
    ) -> tuple[dict[tuple[int, UUID], DeadLetterChunk | None], bool]:
        """Claim the next dead letters of parts for a replay.

        Returns:
            The chunk of each part; None: it has no more.  A part with a pending replay is
            left out.  And whether a lane was unblocked.
        """
        rows = await self._db.fetch(
            READ_DEAD_LETTERS,
            [share.part.job_id for share in shares],
            [share.part.endpoint_id for share in shares],
            [share.numbers for share in shares],
        )
        numbers = {(s.part.job_id, s.part.endpoint_id): s.numbers for s in shares}
        found: dict[tuple[int, UUID], DeadLetterChunk | None] = {}
        seen: dict[tuple[int, UUID], int] = {}
        for row in rows:
            part = (row["job_id"], row["endpoint_id"])
            if row["id"] is None:
                found[part] = None
                continue
            letters = found.setdefault(part, DeadLetterChunk())
            assert letters is not None
            if len(letters.chosen) == numbers[part]:
                continue
            seen[part] = seen.get(part, 0) + 1
            letters.next_id = row["id"] + 1
            if row["is_selected"] and row["is_erased"]:
                letters.erased += 1
            elif row["is_selected"]:
                letters.chosen.append(row["id"])
        chosen = [(part[0], i) for part, each in found.items() if each for i in each.chosen]
        unblocked = 0
        if chosen:
            unblocked = await self._db.fetchval(
                CLAIM_DEAD_LETTERS, [job_id for job_id, _ in chosen], [i for _, i in chosen]
            )
        return found, bool(unblocked)

    async def notify_owners(self) -> None:
        """Notify the owners that lanes were unblocked, by a new routing version.

        Only if the batch is written, which depends on the old version.
        """
        await self._db.execute(RAISE_VERSION)
        await self._db.execute(WAKE_ALL)

    async def read_history(self, part: JobPart) -> HistoryChunk | None:
        """The next events of a backfill; None: it is not running any more."""
        rows = await self._db.fetch(READ_HISTORY, part.job_id, part.endpoint_id, SCAN_MAX)
        if not rows:
            return None
        seen = [r for r in rows if r["id"] is not None]
        more = len(seen) == SCAN_MAX
        return HistoryChunk(
            [
                RoutableEvent(r["id"], r["tenant"], r["type"], r["spread"])
                for r in seen
                if r["is_selected"]
            ],
            next_id=seen[-1]["id"] + 1 if more else rows[0]["last_id"] + 1,
            more=more,
        )

    async def advance_parts(self, batch: int, moves: Sequence[PartProgress]) -> None:
        """Record the progress of parts in this batch."""
        await self._db.execute(
            ADVANCE_PARTS,
            batch,
            [m.share.part.job_id for m in moves],
            [m.share.part.endpoint_id for m in moves],
            [m.next_id for m in moves],
            [m.taken for m in moves],
            [m.erased for m in moves],
            [m.from_id for m in moves],
        )

    async def end_parts(self, parts: Sequence[JobPart], actor: str) -> None:
        """End parts that are complete or stopped, and their jobs."""
        for endpoint_id in {
            p.endpoint_id for p in parts if p.end_reason in ("disabled", "removed")
        }:
            await self._db.execute(CANCEL_REPLAYS, endpoint_id, None)
        await self._db.execute(
            END_PARTS,
            [p.job_id for p in parts],
            [p.endpoint_id for p in parts],
            [p.end_reason for p in parts],
        )
        for job in await self._db.fetch(END_JOBS, sorted({p.job_id for p in parts})):
            taken = await self._db.fetchval(READ_JOB_DELIVERIES, job["id"])
            data = {"job": job["id"], "state": job["state"], "taken": taken}
            await write_journal(self._db, "replay_ended", actor, None, data)

"""SQL of the leader for the progress of replay jobs, in the message that writes a batch.

The replays of a batch are planned by reading.  What they were read from is changed only by the
leader, or together with the routing version, on which the batch depends.  So their progress
needs no condition of its own, and the next leader continues exactly where the last batch ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outbox.store.replays.replay_feed import CANCEL_REPLAYS
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.sequencing.filter_budget import FilterFailure
    from outbox.core.sequencing.replay_throttle import JobPart, Share
    from outbox.core.sequencing.router import Replay, ReplayChunk, TenantFilter
    from outbox.store.sql.message import WriteCall

# Advances replays past their chunks.
ADVANCE_REPLAYS = WriteStatement(
    "advance_replays",
    """
UPDATE replay r SET next_seq = c.next_seq, next_batch = c.next_batch
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS c(id, next_seq, next_batch)
 WHERE r.id = c.id
""",
)

# Stores the progress of parts.
ADVANCE_PARTS = WriteStatement(
    "advance_parts",
    """
UPDATE replay_job_endpoint p
   SET next_id = coalesce(m.next_id, p.next_id), taken = p.taken + m.taken,
       batch = CASE WHEN m.taken > 0 THEN $1::bigint ELSE p.batch END, from_id = m.from_id
  FROM unnest($2::bigint[], $3::uuid[], $4::bigint[], $5::bigint[], $6::bigint[])
       AS m(job_id, endpoint_id, next_id, taken, from_id)
 WHERE p.job_id = m.job_id AND p.endpoint_id = m.endpoint_id
""",
)

END_PARTS = WriteStatement(
    "end_parts",
    """
UPDATE replay_job_endpoint p
   SET ended_at = clock_timestamp(), end_reason = e.end_reason, from_id = NULL
  FROM unnest($1::bigint[], $2::uuid[], $3::text[]) AS e(job_id, endpoint_id, end_reason)
 WHERE p.job_id = e.job_id AND p.endpoint_id = e.endpoint_id
""",
)

# Ends jobs whose last part has ended, with a journal entry of the number of deliveries that each
# created.
END_JOBS = WriteStatement(
    "end_jobs",
    """
WITH ended AS (
    UPDATE replay_job j
       SET state = CASE j.state WHEN 'running' THEN 'done' ELSE j.state END,
           ended_at = clock_timestamp()
     WHERE j.id = ANY ($1::bigint[])
       AND NOT EXISTS (SELECT FROM replay_job_endpoint
                        WHERE job_id = j.id AND ended_at IS NULL)
    RETURNING j.id, j.state)
INSERT INTO journal (kind, actor, data)
SELECT 'replay_ended', $2, jsonb_build_object(
           'job', id, 'state', state,
           'taken', (SELECT sum(taken)::bigint FROM replay_job_endpoint WHERE job_id = ended.id))
  FROM ended ORDER BY id
""",
)


@dataclass(slots=True)
class PartProgress:
    """Progress of a part in one batch: what was taken, and where the rest begins."""

    share: Share
    next_id: int | None = None
    """The next id; None: it is unchanged."""
    taken: int = 0
    from_id: int | None = None
    """The lowest event id that a backfill may still read."""

    @property
    def has_changes(self) -> bool:
        return self.taken > 0 or self.next_id is not None


@dataclass(slots=True)
class ReplayBatch:
    """The replays of one batch."""

    replays: list[Replay] = field(default_factory=list)
    chunks: list[ReplayChunk] = field(default_factory=list)
    moves: list[PartProgress] = field(default_factory=list)
    ends: list[Share] = field(default_factory=list)
    """Shares of parts of which nothing is left."""
    failed: dict[TenantFilter, FilterFailure] = field(default_factory=dict)
    """Filters to be stopped."""

    @property
    def has_changes(self) -> bool:
        """Whether it must be written."""
        return bool(self.chunks or self.ends) or any(move.has_changes for move in self.moves)


def write_progress(batch: int, replays: ReplayBatch, actor: str) -> list[WriteCall]:
    """The statements that store what a batch has taken of replay jobs, and end them."""
    calls: list[WriteCall] = []
    if chunks := replays.chunks:
        places = [(c.id, c.next_seq, c.next_batch) for c in chunks]
        calls.append((ADVANCE_REPLAYS, *zip(*places, strict=True)))
    if moves := replays.moves:
        keys = [m.share.part.job_id for m in moves], [m.share.part.endpoint_id for m in moves]
        positions = [m.next_id for m in moves], [m.taken for m in moves], [m.from_id for m in moves]
        calls.append((ADVANCE_PARTS, batch, *keys, *positions))
    if replays.ends:
        calls += _end_parts([share.part for share in replays.ends], actor)
    return calls


def _end_parts(parts: Sequence[JobPart], actor: str) -> list[WriteCall]:
    """End parts that are complete or stopped, and their jobs."""
    stopped = {p.endpoint_id for p in parts if p.end_reason in ("disabled", "removed")}
    calls: list[WriteCall] = [(CANCEL_REPLAYS, sorted(stopped), None)] if stopped else []
    job_ids = [p.job_id for p in parts]
    reasons = [p.end_reason for p in parts]
    calls.append((END_PARTS, job_ids, [p.endpoint_id for p in parts], reasons))
    calls.append((END_JOBS, sorted(set(job_ids)), actor))
    return calls

"""Catching up: what an endpoint has missed while it was disabled, in order, before newer events.

First what was pending when it was disabled, which is in dead letters; then what was sequenced
since, by a feed, which waits for the job that sends the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from outbox.errors import Conflict
from outbox.operations.criteria import Criteria
from outbox.operations.feeds.starts import begin_feed, count_after, resolve_missed
from outbox.operations.replays.claims import write_dead_letter_state
from outbox.operations.replays.jobs import JobRange, add_job
from outbox.store.change import NEW_JOB
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from uuid import UUID

    from outbox.store.change import Change

# The dead letters since an endpoint had got everything: what was pending when it was disabled, and
# what its receiver has refused with the response that disabled it.  It may have been disabled again
# while such letters were sent: then what was pending the last time goes first, and of the others
# what is left.
#   enabled: how often it had been enabled when a letter was written.  next_seq: after what an
#     earlier replay of it has sent.
READ_DISABLED = """
WITH whole AS MATERIALIZED (
    SELECT max(at) AS at FROM journal
     WHERE endpoint_id = $1
       AND (kind IN ('endpoint_added', 'endpoint_caught_up')
            OR kind = 'endpoint_enabled' AND NOT data ? 'catches_up'))
SELECT d.id, coalesce(r.to_seq + 1, d.seq) AS next_seq,
       coalesce(r.next_batch, d.batch) AS next_batch, d.to_seq
  FROM whole
  JOIN dead_letter d ON d.endpoint_id = $1 AND d.state = 'dead' AND d.at >= whole.at
   AND (d.reason = 'disabled' OR d.reason = 'refused' AND d.last_response ->> 'status' = '410')
  LEFT JOIN LATERAL (
       SELECT to_seq, next_batch FROM replay
        WHERE dead_id = d.id ORDER BY id DESC LIMIT 1) r ON true
 CROSS JOIN LATERAL (
       SELECT count(*) AS times FROM journal
        WHERE endpoint_id = $1 AND kind = 'endpoint_enabled' AND at <= d.at) enabled
 WHERE coalesce(r.to_seq + 1, d.seq) <= d.to_seq
 ORDER BY enabled.times DESC, d.id
"""

# The job of an earlier catch-up that was cut short, if the leader has not ended it yet.
FIND_EARLIER_JOB = """
SELECT p.job_id
  FROM feed f
  JOIN replay_job_endpoint p ON p.job_id = f.after_job AND p.endpoint_id = f.endpoint_id
 WHERE f.endpoint_id = $1 AND p.ended_at IS NULL LIMIT 1
"""

ADD_RESTS = WriteStatement(
    "add_rests",
    f"""
INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch, to_seq)
SELECT {NEW_JOB}, $1, id, next_seq, next_batch, to_seq
  FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[]) WITH ORDINALITY
       AS r(id, next_seq, next_batch, to_seq, n)
 ORDER BY n
""",  # noqa: S608 (constants only)
)


class CatchUp(NamedTuple):
    """What an endpoint gets that it has missed."""

    pending: int
    """Deliveries that were pending when it was disabled."""
    events: int
    """Events of all types that were sequenced since."""


async def plan_catch_up(change: Change, endpoint_id: UUID, name: str) -> CatchUp | None:
    """Plan that an endpoint catches up; None: it has missed nothing, because it never began.

    Raises:
        Conflict: some of what it has missed is gone, or an earlier catch-up has not ended yet.
    """
    start = await resolve_missed(change.db, endpoint_id)
    if start is None:
        return None
    if (job := await change.db.fetchval(FIND_EARLIER_JOB, endpoint_id)) is not None:
        raise Conflict(
            f"replay {job} of its last catch-up has not ended yet; a running relay ends it at "
            "once: try again"
        )
    ranges = await change.db.fetch(READ_DISABLED, endpoint_id)
    pending = sum(each["to_seq"] - each["next_seq"] + 1 for each in ranges)
    if ranges:
        ids, *places = map(list, zip(*map(tuple, ranges), strict=True))
        criteria = Criteria(name, reason="disabled")
        # Those that are replayed already: the part has an empty range of ids.
        add_job(change, "dead", criteria, [JobRange(endpoint_id, 1, 0, pending)], rate_per_s=None)
        write_dead_letter_state(change, ids, "replaying")
        change.write(ADD_RESTS, endpoint_id, ids, *places)
    begin_feed(change, endpoint_id, start, after_new_job=bool(ranges))
    return CatchUp(pending, await count_after(change.db, start))

"""Replay jobs: adding, listing, progress and abort.

A job replays dead letters, or the history of an endpoint (a backfill).  It has a part for each
endpoint, a range of ids, which the leader processes in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from outbox.core.sequencing.replay_throttle import ReplayKind, StopReason
from outbox.errors import Conflict, NotFound
from outbox.operations.pages import convert, read_page
from outbox.operations.rows import ID_MAX, RowPage, from_row
from outbox.operations.tenancy import JOB_IS_OWN
from outbox.store.change import NEW_JOB, document, make_change_and_read
from outbox.store.connection.connect import map_errors
from outbox.store.replays.replay_feed import CANCEL_REPLAYS
from outbox.store.sql.expressions import lease_runs
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.criteria import Criteria
    from outbox.store.change import Change

JobState = Literal["running", "done", "aborted"]
STATES: tuple[JobState, ...] = get_args(JobState)

# $1: the columns as a JSON object; $2: gaps of a backfill.
#   id: from the clock, like that of the first generation in a new history, because it is a part of
#     the X-Delivery of a backfill.  A restored sequence would assign the ids of lost jobs again.
ADD_JOB = WriteStatement(
    "add_replay_job",
    """
INSERT INTO replay_job (id, kind, endpoint, types, tenant, reason, since, until, rate_per_s,
                        requested_by, outbox_ids, gaps)
OVERRIDING SYSTEM VALUE
SELECT setval('replay_job_id_seq', first_generation((SELECT coalesce(max(id), 0) FROM replay_job))),
       kind, endpoint, types, tenant, reason, since, until, rate_per_s, requested_by, outbox_ids, $2
  FROM jsonb_populate_record(NULL::replay_job, $1::text::jsonb)
""",
)

ADD_PARTS = WriteStatement(
    "add_replay_parts",
    f"""
INSERT INTO replay_job_endpoint (job_id, endpoint_id, first_id, next_id, last_id, expected, from_id)
SELECT {NEW_JOB}, p.endpoint_id, p.first_id, p.first_id, p.last_id, p.expected, p.from_id
  FROM unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[])
       AS p(endpoint_id, first_id, last_id, expected, from_id)
""",  # noqa: S608 (constants only)
)

# The replay job of a change, by its request id.
READ_NEW_JOB = "SELECT (data ->> 'job')::bigint FROM journal WHERE request = $1"

# Progress of jobs: of a backfill in outbox ids passed, because the number of matching events is
# not known in advance; of dead letters in deliveries.
_JOBS = """
SELECT j.id, j.kind, j.state, j.endpoint, j.types, j.tenant, j.reason, j.since, j.until,
       cardinality(j.outbox_ids) AS events, j.rate_per_s, j.requested_at, j.requested_by,
       j.ended_at, p.*,
       CASE WHEN j.kind = 'dead' THEN p.taken + p.erased ELSE p.passed END AS done,
       CASE WHEN j.kind = 'dead' THEN p.expected ELSE p.covered END AS all
  FROM replay_job j
 CROSS JOIN LATERAL (
       SELECT count(*) AS endpoints,
              count(*) FILTER (WHERE ended_at IS NULL) AS open,
              coalesce(sum(taken), 0)::bigint AS taken,
              coalesce(sum(erased), 0)::bigint AS erased,
              coalesce(sum(expected), 0)::bigint AS expected,
              coalesce(sum(next_id - first_id), 0)::bigint AS passed,
              coalesce(sum(greatest(last_id - first_id + 1, 0)), 0)::bigint AS covered,
              count(*) FILTER (WHERE end_reason = 'disabled') AS disabled,
              count(*) FILTER (WHERE end_reason = 'removed') AS removed,
              count(*) FILTER (WHERE end_reason = 'unsubscribed') AS unsubscribed
         FROM replay_job_endpoint WHERE job_id = j.id) p
"""

READ_JOBS = f"""{_JOBS}
 WHERE j.id < $1 AND j.state = ANY ($3)
   AND ($4::text IS NULL OR {JOB_IS_OWN.format(job="j.id", tenant="$4")})
 ORDER BY j.id DESC LIMIT $2
"""
READ_JOB = f"""{_JOBS} WHERE j.id = $1"""

ABORT_JOB = WriteStatement(
    "abort_replay_job",
    """
WITH aborted AS (
    UPDATE replay_job SET state = 'aborted', ended_at = clock_timestamp()
     WHERE id = $1 AND state = 'running' RETURNING 1)
SELECT abort_unless(EXISTS (SELECT FROM aborted))
""",
)

FIND_RELAY = f"""
SELECT EXISTS (SELECT FROM replica WHERE {lease_runs("replica")})
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class JobRange:
    """The range of a new job for one endpoint: ids of dead letters or events."""

    endpoint_id: UUID
    first_id: int
    last_id: int
    expected: int | None = None
    """Number of items; None: not counted."""
    from_id: int | None = None
    """The lowest event id that a backfill may read."""


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """A replay job with its progress."""

    id: int
    kind: ReplayKind
    state: JobState
    endpoint: str | None
    types: tuple[str, ...] | None
    tenant: str | None
    reason: str | None
    since: datetime | None
    until: datetime | None
    events: int | None
    """Number of chosen events; None: all that the selection includes."""
    rate_per_s: float | None
    requested_at: datetime
    requested_by: str
    ended_at: datetime | None
    endpoints: int
    open: int
    """Endpoints that are not completed."""
    taken: int
    """Deliveries created: each has its sequence number in a lane."""
    erased: int
    """Deliveries skipped, because their events are erased."""
    done: int
    """How much of `all` is processed.  Of dead letters: deliveries, those created and those
    skipped.  Of a backfill: outbox ids searched, of which few may be deliveries."""
    all: int
    """What `done` counts up to.  Of dead letters: deliveries.  Of a backfill: the outbox ids of its
    range, whatever they are; for a tenant's token 100, and `done` is a percentage."""
    stopped: dict[str, int]
    """Endpoints where the job ended early, by reason."""

    @property
    def share(self) -> float:
        """Completed share, from 0 to 1."""
        if self.state == "done":
            return 1.0
        return min(self.done / self.all, 1.0) if self.all else 0.0


def add_job(
    change: Change,
    kind: ReplayKind,
    criteria: Criteria,
    ranges: Sequence[JobRange],
    *,
    rate_per_s: float | None,
    gaps: Sequence[Any] = (),
    outbox_ids: Sequence[int] | None = None,
) -> None:
    """Add a replay job; its id is that of NEW_JOB in the statements after it.

    It is written before the cursor row is locked, because it may have very many parts.

    Args:
        gaps: the ranges of ids that a backfill excludes.
        outbox_ids: the only events that a backfill includes; None: all.
    """
    row = {
        "kind": kind,
        "rate_per_s": rate_per_s,
        "requested_by": change.actor,
        "outbox_ids": outbox_ids,
    }
    change.write_early(ADD_JOB, document(row | criteria.journal_data), list(gaps))
    columns = ([getattr(each, name) for each in ranges] for name in JobRange.__slots__)
    change.write_early(ADD_PARTS, *columns)


async def read_new_job(db: Any, request: UUID, _: object) -> int:
    """The replay job that a change has added."""
    job: int = await db.fetchval(READ_NEW_JOB, request)
    return job


async def list_jobs(
    connection: Connection[Any],
    schema: str,
    *,
    states: Sequence[JobState] = STATES,
    tenant: str | None = None,
    limit: int = 100,
    before: int = ID_MAX,
) -> RowPage[ReplayJob]:
    """List jobs with ids below `before`, newest first, at most `limit`.

    There are fewer if they are large, as in `outbox.operations.pages`.

    Args:
        tenant: only jobs of endpoints of this tenant alone.
    """
    with map_errors(schema):
        page = await read_page(connection, READ_JOBS, "id", before, limit, states, tenant)
    return await convert(page, _job)


async def get_job(connection: Connection[Any], schema: str, job_id: int) -> ReplayJob:
    """Read one job.

    Raises:
        NotFound: no job has this id.
    """
    with map_errors(schema):
        row = await connection.fetchrow(READ_JOB, job_id)
    if row is None:
        raise NotFound(f"there is no replay job {job_id}; see: outbox replay list")
    return _job(row)


async def has_live_relay(connection: Connection[Any]) -> bool:
    """Whether a live relay exists, which jobs require."""
    return bool(await connection.fetchval(FIND_RELAY))


async def abort_job(
    connection: Connection[Any], schema: str, job_id: int, *, actor: str
) -> ReplayJob:
    """Abort a job; deliveries already in lanes are delivered.

    Raises:
        NotFound: no job has this id.
        Conflict: the job has ended.
    """

    async def plan(change: Change) -> None:
        job = await get_job(change.db, schema, job_id)
        if job.state != "running":
            text = "is done" if job.state == "done" else "was aborted already"
            raise Conflict(f"replay job {job_id} {text}; see: outbox replay show {job_id}")
        change.write(ABORT_JOB, job_id)
        change.write(CANCEL_REPLAYS, None, job_id)
        change.journal("replay_aborted", None, {"job": job_id, "taken": job.taken})

    async def read_back(db: Any, _: UUID, __: None) -> ReplayJob:
        return await get_job(db, schema, job_id)

    return await make_change_and_read(connection, schema, actor, plan, read_back)


def _job(row: Any) -> ReplayJob:
    types = None if row["types"] is None else tuple(row["types"])
    stopped = {reason: row[reason] for reason in get_args(StopReason) if row[reason]}
    return from_row(ReplayJob, row, types=types, stopped=stopped)

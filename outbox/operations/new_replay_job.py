"""Adding a replay job: the parts that all kinds of replays have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.store.change import NEW_JOB, document
from outbox.store.connection.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from outbox.store.change import Change

# $1: the columns as a JSON object; $2: gaps of a backfill.
ADD_JOB = WriteStatement(
    "add_replay_job",
    """
INSERT INTO replay_job (kind, endpoint, types, tenant, reason, since, until, rate_per_s,
                        requested_by, gaps)
SELECT kind, endpoint, types, tenant, reason, since, until, rate_per_s, requested_by, $2
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


@dataclass(frozen=True, slots=True)
class JobPart:
    """The range of a new job for one endpoint: ids of dead letters or events."""

    endpoint_id: UUID
    first_id: int
    last_id: int
    expected: int | None = None
    """Number of items; None: not counted."""
    from_id: int | None = None
    """The lowest event id that a backfill may read."""


async def read_new_job(db: Any, request: UUID, _: None) -> int:
    """The replay job that a change has added."""
    job: int = await db.fetchval(READ_NEW_JOB, request)
    return job


def add_job(
    change: Change, columns: Mapping[str, Any], parts: Sequence[JobPart], gaps: Any = ()
) -> None:
    """Add a replay job; its id is that of NEW_JOB in the statements after it.

    It is written before the cursor row is locked, because it may have very many parts.

    Args:
        columns: of its row.
        gaps: of a backfill: ranges of ids that it excludes.
    """
    row = {**columns, "requested_by": change.actor}
    change.write_early(ADD_JOB, document(row), list(gaps))
    change.write_early(
        ADD_PARTS,
        [part.endpoint_id for part in parts],
        [part.first_id for part in parts],
        [part.last_id for part in parts],
        [part.expected for part in parts],
        [part.from_id for part in parts],
    )

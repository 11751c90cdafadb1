"""Expressions about feeds: whether one waits, and how many ids it has not passed."""

from __future__ import annotations

from outbox.core.sequencing.partition_window import WIDTH

WAITS_FOR_JOB = """EXISTS (
           SELECT FROM replay_job_endpoint p
            WHERE p.job_id = f.after_job AND p.endpoint_id = f.endpoint_id
              AND p.ended_at IS NULL)"""
"""Whether a feed `f` waits for a job that sends again what was pending before it."""

LEAPS = f"""
SELECT p.first_id, p.first_id - 1 - coalesce(last.id, p.first_id - {WIDTH} - 1) AS length
  FROM (SELECT number * {WIDTH} AS first_id FROM period WHERE kind = 'events' AND number > 0) p
  LEFT JOIN LATERAL (
       SELECT id FROM outbox WHERE id >= p.first_id - {WIDTH} AND id < p.first_id
        ORDER BY id DESC LIMIT 1) last ON true"""  # noqa: S608 (constants only)
"""The ids that the sequence left out when a period of events began."""


def count_ids(after: str, until: str) -> str:
    """How many ids were assigned after one `high` and up to another, in a query `WITH leap`.

    It is an upper bound of the events: some were rolled back.  Counting these would read all
    batches.
    """
    return f"""greatest({until} - {after} - coalesce((
           SELECT sum(length) FROM leap
            WHERE first_id > {after} AND first_id <= {until}), 0)::bigint, 0)"""  # noqa: S608 (constants only)

"""What feeds keep from being dropped: what they have not passed, and what they fed lately.

A fed delivery is in a batch of its own time, which does not show the age of its event.
"""

from __future__ import annotations

from outbox.core.sequencing.partition_window import WIDTH
from outbox.store.sql.message import WriteStatement


def pinned_by_feeds(open_range: str) -> str:
    """The query whether a feed needs batches up to $1, or their events.

    Args:
        open_range: whether a dead letter `d` may be replayed; $2 is the time for which it may.
    """

    def fed_since(batch: str) -> str:
        """Whether feed `f` fed events of those batches in `batch` or later ones."""
        return f"""
    EXISTS (SELECT FROM feed_step WHERE feed_id = f.id AND batch >= {batch})
       AND coalesce((SELECT to_batch FROM feed_step WHERE feed_id = f.id AND batch < {batch}
                      ORDER BY batch DESC LIMIT 1), f.from_batch) <= $1"""  # noqa: S608

    return f"""
SELECT EXISTS (
    SELECT FROM feed WHERE ended_at IS NULL AND batch <= $1) OR EXISTS (
    SELECT FROM feed f
      JOIN lane_progress p ON p.endpoint_id = f.endpoint_id
      JOIN lane_counter c ON c.lane_id = p.lane_id AND c.last_seq > p.acked_seq
     WHERE {fed_since("p.floor_batch")}) OR EXISTS (
    SELECT FROM feed f JOIN dead_letter d ON d.endpoint_id = f.endpoint_id
     WHERE ({open_range} OR d.outbox_id IS NULL AND EXISTS (
            SELECT FROM replay r WHERE r.dead_id = d.id AND r.next_seq <= r.to_seq))
       AND {fed_since("d.batch")})
"""  # noqa: S608 (constants only)


# Deletes the steps of dropped batches, but for the last one of each feed, after which the kept ones
# begin.
DELETE_FEED_STEPS = WriteStatement(
    "delete_feed_steps",
    f"""
WITH kept AS MATERIALIZED (
    SELECT min(number) * {WIDTH} AS batch FROM period WHERE kind = 'log' AND dropped_at IS NULL)
DELETE FROM feed_step s USING feed f, kept
 WHERE s.feed_id = f.id
   AND s.batch < (SELECT batch FROM feed_step
                   WHERE feed_id = f.id AND batch < kept.batch ORDER BY batch DESC LIMIT 1)
""",  # noqa: S608 (constants only)
)

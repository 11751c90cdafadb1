"""The statements that take dead letters for a replay, or for good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.store.change import NEW_JOB
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.store.change import Change

# Locks dead letters, and aborts if one has another state than `dead`.  In the order of ids, like
# all statements that lock several, to prevent deadlocks.
REQUIRE_DEAD = WriteStatement(
    "require_dead",
    """
WITH found AS MATERIALIZED (
    SELECT id, state FROM dead_letter WHERE id = ANY ($1::bigint[]) ORDER BY id FOR UPDATE)
SELECT abort_unless(
    (SELECT count(*) FROM found WHERE state = 'dead') = cardinality($1::bigint[]))
""",
)

# The next batches create the deliveries.
ADD_REPLAYS = WriteStatement(
    "add_replays",
    f"""
INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch, to_seq)
SELECT {NEW_JOB}, endpoint_id, id, seq, batch, to_seq
  FROM dead_letter WHERE id = ANY ($1) ORDER BY id
""",  # noqa: S608
)

SET_STATE = WriteStatement(
    "set_dead_letter_state", "UPDATE dead_letter SET state = $2 WHERE id = ANY ($1)"
)

# Unblock the lanes that wait for a decision about these dead letters.
UNBLOCK = WriteStatement(
    "unblock_dead_letters",
    """
DELETE FROM lane_block b USING dead_letter d
 WHERE d.id = ANY ($1) AND b.lane_id = d.lane_id AND b.seq = d.seq
""",
)


def write_dead_letter_state(change: Change, ids: Sequence[int], state: str) -> None:
    """Set the state of dead letters, which must still be `dead`, and unblock their lanes."""
    change.write(REQUIRE_DEAD, ids)
    change.write(SET_STATE, ids, state)
    change.write(UNBLOCK, ids)

"""SQL of the leadership: which replica sequences, and when it sleeps."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.store.cluster.replicas import fence
from outbox.store.sql.message import WriteStatement

AWAKE = 1
"""Value of the wake-up flag while the relay polls without notifications."""

# Takes the leadership, while the lease runs.  One row, unless the cursor row is locked.
#   fence: a replica whose registration was ended would send what it sequences, could not record
#     it, and would send it again.
TAKE_LEADERSHIP = WriteStatement(
    "take_leadership",
    f"""{fence("$2")},
locked AS MATERIALIZED (SELECT FROM fence, cursor FOR UPDATE OF cursor SKIP LOCKED)
UPDATE cursor SET writer = $1 FROM locked
""",  # noqa: S608 (constants only)
)

# Releases the leadership, and lets producers not notify until the next leader sleeps.
RELEASE_LEADERSHIP = WriteStatement(
    "release_leadership",
    f"""
WITH locked AS MATERIALIZED (
    SELECT setval('wakeup', {AWAKE}) FROM (
        SELECT FROM cursor WHERE writer = $1 AND ($2::bigint IS NULL OR server_fence() = $2)
           FOR UPDATE SKIP LOCKED) held)
UPDATE cursor SET writer = NULL FROM locked
""",  # noqa: S608 (constants only)
    repeatable=True,
)

# Ends the leadership, whoever has it; the caller holds the cursor row.
CLEAR_LEADER = "UPDATE cursor SET writer = NULL"

# The first statement of a message of the leader, apart from that of a batch: it locks the cursor
# row, or aborts the message unless this replica leads under the routing version of its plan.
# SKIP LOCKED: a routing change that holds the row raises the version anyway.
REQUIRE_LEADER = WriteStatement(
    "require_leader",
    """
WITH locked AS MATERIALIZED (
    SELECT FROM cursor
     WHERE writer = $1 AND version = $2 AND ($3::bigint IS NULL OR server_fence() = $3)
       FOR UPDATE SKIP LOCKED)
SELECT abort_unless(EXISTS (SELECT FROM locked))
""",
)

# The leader announces that it may be asleep for the next $2 seconds.  The wake-up flag is a
# sequence, because reading one ignores snapshots.  One row, unless another replica leads or the
# cursor row is locked.
FALL_ASLEEP = WriteStatement(
    "fall_asleep",
    """
WITH locked AS MATERIALIZED (
    SELECT FROM cursor WHERE writer = $1 AND ($3::bigint IS NULL OR server_fence() = $3)
       FOR UPDATE SKIP LOCKED),
asleep AS MATERIALIZED (
    SELECT setval('wakeup', extract(epoch FROM clock_timestamp())::bigint + $2::bigint)
      FROM locked)
SELECT FROM asleep
""",
)

# The leader, whether it may be replaced, and whether events are left unsequenced.  Late
# events in old gaps are not checked, because there may be very many old gaps.
READ_LEADER_STATUS = """
SELECT c.writer AS leader, b.batch,
       c.writer IS NULL OR c.writer = $1
           OR NOT EXISTS (SELECT FROM replica r
                           WHERE r.id = c.writer AND r.expires_at > clock_timestamp()) AS free,
       EXISTS (SELECT FROM outbox WHERE id > b.high)
           OR EXISTS (SELECT FROM unnest(b.young) AS gap(ids)
                       CROSS JOIN LATERAL (
                             SELECT FROM outbox
                              WHERE id >= lower(gap.ids) AND id < upper(gap.ids) LIMIT 1) o)
           AS behind
  FROM cursor c
  LEFT JOIN (SELECT batch, high, young FROM batch ORDER BY batch DESC LIMIT 1) b ON true
"""


@dataclass(frozen=True, slots=True)
class LeaderStatus:
    """Status of the replica that leads."""

    leader: int | None
    batch: int
    free: bool
    """There is no leader, its lease has expired, or it is this replica."""
    behind: bool
    """There are events that are not sequenced."""

"""Routing changes: the only way to change subscriptions, lanes and replays.

A batch that is being prepared has read subscriptions, lanes and replays.  A change of one of
them locks the cursor row first, waiting for a batch that is being written, and increments the
routing version, which rejects every batch prepared before (optimistic concurrency).  So the
change applies from the next batch on.  Otherwise a batch could create deliveries for an
endpoint that is gone, and that no dead-letter range covers.
"""

from __future__ import annotations

from outbox.store.sql.message import WriteStatement

# The database's time; all decisions about time use it.
READ_NOW = "SELECT clock_timestamp()"

# Locks the cursor row.  It waits, unlike the sequencer, which skips a locked row.
LOCK_CURSOR = "SELECT FROM cursor FOR UPDATE"

# The next batch, after the cursor row was locked by an earlier statement of the same message.
NEXT_BATCH = "(SELECT max(batch) + 1 FROM batch)"

# Increments the routing version: a batch is written only under the version it was read under.
RAISE_VERSION = "UPDATE cursor SET version = version + 1"

# The first statement of a message that changes routing: it locks the cursor row, so in the
# statements after it the next batch is NEXT_BATCH.
BEGIN_CHANGE = WriteStatement("begin_change", RAISE_VERSION)

ADD_TO_JOURNAL = WriteStatement(
    "add_to_journal",
    "INSERT INTO journal (kind, actor, endpoint_id, data) VALUES ($1, $2, $3, $4::text::jsonb)",
)

# Begins a change that was planned under the routing version $1, and aborts if that has changed.  It
# also stores what identifies the database (see `outbox.store.cluster.timeline`), if that is not
# known yet: the change may add lanes, and a dump of them may be restored before a relay has run.
BEGIN_CHANGE_OF = WriteStatement(
    "begin_change_of",
    f"""
WITH raised AS (
    {RAISE_VERSION},
           timeline = coalesce(timeline, server_timeline()),
           identity = coalesce(identity, server_identity())
     WHERE version = $1 RETURNING 1)
SELECT abort_unless(EXISTS (SELECT FROM raised))
""",  # noqa: S608 (constants only)
)

"""Routing changes: the only way to change subscriptions, lanes and replays.

A batch that is being prepared has read subscriptions, lanes and replays.  A change of one of
them locks the cursor row first, waiting for a batch that is being written, and increments the
routing version, which rejects every batch prepared before (optimistic concurrency).  So the
change applies from the next batch on.  Otherwise a batch could create deliveries for an
endpoint that is gone, and that no dead-letter range covers.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson

from outbox.store.channels import WAKE_ALL
from outbox.store.connection.connect import map_errors
from outbox.store.connection.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from uuid import UUID

    from asyncpg import Connection

# The database's time; all decisions about time use it.
READ_NOW = "SELECT clock_timestamp()"

# Locks the cursor row.  It waits, unlike the sequencer, which skips a locked row.
LOCK_CURSOR = "SELECT FROM cursor FOR UPDATE"

# The newest batch.  A separate statement: its snapshot begins after the lock was granted.
READ_BATCH = "SELECT max(batch) FROM batch"

# Increments the routing version: a batch is written only under the version it was read under.
RAISE_VERSION = "UPDATE cursor SET version = version + 1"

END_SUBSCRIPTION = """
UPDATE subscription SET to_batch = $2 WHERE endpoint_id = $1 AND to_batch IS NULL
"""

WRITE_JOURNAL = """
INSERT INTO journal (kind, actor, endpoint_id, data) VALUES ($1, $2, $3, $4::text::jsonb)
"""

# The first statement of a message that changes routing: it locks the cursor row, so in the
# statements after it the next batch is `(SELECT max(batch) + 1 FROM batch)`.
BEGIN_CHANGE = WriteStatement("begin_change", RAISE_VERSION)

ADD_TO_JOURNAL = WriteStatement("add_to_journal", WRITE_JOURNAL)


@asynccontextmanager
async def routing_transaction(connection: Connection[Any], schema: str) -> AsyncIterator[int]:
    """Open a transaction for a routing change.

    Yields:
        The first batch to which the change applies.

    Raises:
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    with map_errors(schema, "operator"):
        # READ COMMITTED, whatever the server's default: under REPEATABLE READ the newest
        # batch would be the one from before the lock was granted.
        async with connection.transaction(isolation="read_committed"):
            await connection.execute(LOCK_CURSOR)
            batch: int = await connection.fetchval(READ_BATCH)
            yield batch + 1
            await _notify_relays(connection)


@asynccontextmanager
async def request_transaction(connection: Connection[Any], schema: str) -> AsyncIterator[None]:
    """Open a transaction for a request to the leader, which changes no routing by itself.

    However much it writes, the cursor row is locked only while it commits.

    Raises:
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="read_committed"):
            yield
            await connection.execute(LOCK_CURSOR)
            await _notify_relays(connection)


async def _notify_relays(connection: Connection[Any]) -> None:
    await connection.execute(RAISE_VERSION)
    # NOTIFY is delivered at commit, so relays see the change when they poll.
    await connection.execute(WAKE_ALL)


async def write_journal(
    connection: Connection[Any],
    kind: str,
    actor: str,
    endpoint_id: UUID | None,
    data: Mapping[str, Any],
) -> None:
    """Write a journal entry, in the transaction of the change."""
    await connection.execute(
        WRITE_JOURNAL, kind, actor, endpoint_id, orjson.dumps(dict(data)).decode()
    )

"""Changes of who gets what: the one way to make them.

A batch in flight has read subscriptions, lanes and replays.  Whoever changes one
of them takes the cursor row first, waiting for a batch that is being written, and
raises the version, which refuses every batch that was worked out before.  So the
change holds from the next batch on.  Otherwise a batch could leave deliveries owed
by an endpoint that is gone, and in no dead-letter range.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson

from outbox.store.channels import WAKE_ALL
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from uuid import UUID

    from asyncpg import Connection

# The only clock that counts.
READ_NOW = "SELECT clock_timestamp()"

# Waits, unlike the sequencer, which passes over a row that another one holds.
LOCK_CURSOR = "SELECT FROM cursor FOR UPDATE"

# A statement of its own: its snapshot begins after the lock was granted.
READ_BATCH = "SELECT max(batch) FROM batch"

# A batch is written only under the version that its routes were read under.
RAISE_VERSION = "UPDATE cursor SET version = version + 1"

END_SUBSCRIPTION = """
UPDATE subscription SET to_batch = $2 WHERE endpoint_id = $1 AND to_batch IS NULL
"""

WRITE_JOURNAL = """
INSERT INTO journal (kind, actor, endpoint_id, data) VALUES ($1, $2, $3, $4::text::jsonb)
"""


@asynccontextmanager
async def change(connection: Connection[Any], schema: str) -> AsyncIterator[int]:
    """A transaction for a change of who gets what.

    Yields:
        The batch from which on the change holds.

    Raises:
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    with map_errors(schema, "operator"):
        # READ COMMITTED, whatever the default here: under REPEATABLE READ
        # the newest batch would be the one from before the wait.
        async with connection.transaction(isolation="read_committed"):
            await connection.execute(LOCK_CURSOR)
            batch: int = await connection.fetchval(READ_BATCH)
            yield batch + 1
            await _tell_relays(connection)


@asynccontextmanager
async def wish(connection: Connection[Any], schema: str) -> AsyncIterator[None]:
    """A transaction that asks the leader for something, and changes nothing by itself.

    However much is written in it, the cursor row is held only while it commits.

    Raises:
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="read_committed"):
            yield
            await connection.execute(LOCK_CURSOR)
            await _tell_relays(connection)


async def _tell_relays(connection: Connection[Any]) -> None:
    await connection.execute(RAISE_VERSION)
    # Sent when this commits, so relays never look too early.
    await connection.execute(WAKE_ALL)


async def write_journal(
    connection: Connection[Any],
    kind: str,
    actor: str,
    endpoint_id: UUID | None,
    data: Mapping[str, Any],
) -> None:
    """Keep what happened and who did it, in the transaction that does it."""
    await connection.execute(
        WRITE_JOURNAL, kind, actor, endpoint_id, orjson.dumps(dict(data)).decode()
    )

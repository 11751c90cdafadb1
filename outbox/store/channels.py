"""NOTIFY channels: producers notify the schema's channel, sequencers the owners' channel.

A routing change notifies both; only sequencers listen to the first.  The payload that
sequencers send is defined in `outbox.core.sequencing.batch_notifications`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.store.connection.store_connection import TRIM_NOTIFICATION_QUEUE
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from asyncpg import Connection

OWNERS_SUFFIX = ":owners"
RECONFIGURED = "reconfigured"
HELD = "held"
"""Sent by `publish_shared` to the schema's channel."""

QUEUE_HAS_ROOM = "pg_notification_queue_usage() <= 0.5"
"""Whether a notification is sent: a commit that notifies fails when the server's queue is full.
Without one, replicas poll."""

# Each returns one row: the number of rows is a message's result.
WAKE_OWNERS = f"""
SELECT count(pg_notify(current_schema() || '{OWNERS_SUFFIX}', $1)) WHERE {QUEUE_HAS_ROOM}
"""
WAKE_ALL = f"""
SELECT count(pg_notify(current_schema(), '{RECONFIGURED}'))
       + count(pg_notify(current_schema() || '{OWNERS_SUFFIX}', '{RECONFIGURED}'))
 WHERE {QUEUE_HAS_ROOM}
"""
NOTIFY_ALL = WriteStatement("notify_all", WAKE_ALL)


async def trim_notification_queue(connection: Connection[Any]) -> float:
    """Trim the server's notification queue; returns the share that is still in use."""
    share: float = await connection.fetchval(TRIM_NOTIFICATION_QUEUE)
    return share

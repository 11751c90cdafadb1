"""Locks that no other role can take: they are rows, not advisory locks."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import asyncpg
import pytest

import outbox
from outbox.store.connection.migrate import migrate
from outbox.store.privileges import PURPOSES
from outbox.store.retention.partitions import PartitionStore
from outbox.store.schedules.future_events import FutureEventStore
from outbox.store.schema import schema_status
from outbox.store.schema.migration_files import Migration, migrations
from tests.support.roles import role

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

SESSION = {"server_settings": {"search_path": "relay"}}
LAST = migrations()[-1].version

# What a role that may only connect can lock: any advisory lock whose key can be guessed.
LOCK_NAMES = """
SELECT pg_advisory_lock(hashtextextended(name, 0))
  FROM unnest('{outbox-relay moves future events relay,outbox-relay maintains relay,
                outbox migrate relay,future events,maintenance}'::text[]) AS name
"""


async def test_a_role_with_connect_only_blocks_nothing(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await database.connect(**SESSION)
    known = (*migrations(), Migration(LAST + 1, "later", "CREATE TABLE later ()", "x", LAST))
    async with role(database) as name:
        stranger = await database.connect(user=name, **SESSION)
        await stranger.execute(LOCK_NAMES)
        for table in ("lock", "migration"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await stranger.execute(f"SELECT FROM relay.{table} FOR UPDATE")
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await stranger.execute(f"SELECT 1; LOCK TABLE relay.{table}")
        deliver_at = datetime.now(UTC) + timedelta(seconds=30)
        await outbox.publish(owner, "a.b", 1, deliver_at=deliver_at, autocommit=True)
        await owner.execute("UPDATE future_event SET deliver_at = now()")
        assert await FutureEventStore(owner, 1).move_due() == 1
        async with PartitionStore(owner).maintenance_lease() as has_lease:
            assert has_lease
        monkeypatch.setattr(schema_status, "migrations", lambda: known)
        async with asyncio.timeout(30):
            assert await migrate(owner, "relay") == [known[-1]]


@pytest.mark.parametrize("purpose", PURPOSES)
async def test_only_a_relay_takes_the_locks_of_relays(database: Database, purpose: str) -> None:
    async with role(database, purpose) as name:
        connection = await database.connect(user=name, **SESSION)
        lock = connection.execute("SELECT FROM relay.lock FOR UPDATE")
        if purpose == "relay":
            await lock
            assert await PartitionStore(connection).renew_lease()
            return
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await lock

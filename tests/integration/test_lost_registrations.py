"""Wrong versions of the lease that a crash of the server brings out: two owners at a time.

Behind a pooler a client does not notice the crash, so its session goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.cluster.lease import PeerWatch
from outbox.store.cluster import replicas
from outbox.store.cluster.replicas import Renewal, ReplicaStore
from outbox.store.connection.store_connection import StoreConnection
from tests.support.relay import register

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.full]

PATH: dict[str, Any] = {"server_settings": {"search_path": "relay"}}
LEASE_S = 60.0


@pytest.mark.parametrize("durable", [True, False])
async def test_a_registration_that_a_crash_may_lose_is_given_to_two_replicas(
    durable: bool, private_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, write = private_database, StoreConnection.write

    async def write_later(self: Any, statement: Any, *arguments: Any, **options: Any) -> int:
        if statement is replicas.REGISTER:
            options["durable"] = durable
        return await write(self, statement, *arguments, **options)

    monkeypatch.setattr(StoreConnection, "write", write_later)
    async with database.connection() as db:
        # Nothing but a commit that waits for the disk writes the log.
        await db.execute("ALTER SYSTEM SET wal_writer_delay = '10 s'")
        await db.execute("SELECT pg_reload_conf()")
    outliving = PeerWatch()

    lost = await database.connect(**PATH)
    store = ReplicaStore(lost)
    first = await register(store, LEASE_S, name="first")
    outliving.observe((await store.read_cluster()).peers, now=0.0)
    assert await store.renew(first, durable=durable) is not Renewal.FENCED
    database.server.embedded.restart(immediate=True)
    lost.terminate()
    async with database.connection(**PATH) as db:
        store = ReplicaStore(db)
        second = await register(store, LEASE_S, name="second")
        assert (second == first) is not durable
        peers = (await store.read_cluster()).peers
        assert [peer.id for peer in peers] == ([first, second] if durable else [first])
        # A watch that has outlived its session takes the new replica for the old one: dead at once.
        _, dead = outliving.observe(peers, now=LEASE_S)
        assert (second in dead) is not durable
        _, dead = PeerWatch().observe(peers, now=LEASE_S)
        assert second not in dead
        # What a pooler passes on for the first one renews the lease of the second one.
        renewed = "SELECT renewals FROM replica WHERE id = $1"
        assert await store.renew(first) is not Renewal.FENCED
        assert await db.fetchval(renewed, second) == (0 if durable else 1)

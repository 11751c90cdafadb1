"""A dump that is restored: no lane name and number that receivers know gets another event.

The restored database has the state of the moment of the dump, on the same timeline.  The original
went on after that, so receivers have seen numbers that the restored one does not know.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.operations.endpoints import changes as endpoint_changes
from outbox_doctor.check import Severity
from tests.support.doctor import findings_of, the_one
from tests.support.dumps import dump, restore
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.tiers import sampled

if TYPE_CHECKING:
    from tests.support.postgres import Database, Server

pytestmark = pytest.mark.system

PATH = {"server_settings": {"search_path": "relay"}}

CHANGES = "SELECT array_agg(data::text) FROM journal WHERE kind = 'timeline_changed'"
LANES = "SELECT array_agg(DISTINCT generation) FROM lane"


async def set_lanes(database: Database, lanes: int) -> None:
    async with database.connection(**PATH) as db:
        await endpoint_changes.update_endpoint(
            db, "relay", "shop", lambda old: replace(old, lanes=lanes), actor="test"
        )


def expect_unique_numbers(*networks: Network) -> None:
    """Each lane and number has one event, and each X-Delivery, too."""
    events: dict[Any, set[str]] = defaultdict(set)
    for network in networks:
        for sent in network.sent:
            events[sent.lane, sent.seq].add(sent.body["id"])
            events[sent.delivery].add(sent.body["id"])
    assert {number: ids for number, ids in events.items() if len(ids) > 1} == {}


async def deliver(database: Database, *data: Any) -> Network:
    network = Network()
    async with running(database, network):
        await publish(database, *data)
        await all_ended(database)
    return network


async def dump_of_a_life(database: Database) -> tuple[str, list[Network]]:
    """A dump, after which the original delivers more, and begins new lanes."""
    await add_endpoint(database)
    before = await deliver(database, 1, 2, 3)
    await publish(database, 4)  # Not sequenced in the dump.
    dumped = await dump(database)
    after = await deliver(database, "lost 1", "lost 2")
    await set_lanes(database, 2)
    changed = await deliver(database, "lost 3", "lost 4")
    return dumped, [before, after, changed]


@pytest.mark.slow
@pytest.mark.parametrize(
    "same_cluster",
    [
        pytest.param(False, marks=pytest.mark.full, id="another cluster"),
        pytest.param(True, id="same cluster"),
    ],
)
async def test_a_restored_dump_begins_new_lanes(
    same_cluster: bool, database: Database, server: Server, private_server: Server
) -> None:
    dumped, known = await dump_of_a_life(database)
    there = server if same_cluster else private_server
    for _ in range(2):  # The first attempt delivers something, too, and is given up.
        async with there.database(migrated=False) as restored:
            await restore(restored, dumped)
            assert await fetchval(restored, "SELECT server_timeline()") == 1
            async with restored.connection(**PATH) as db:
                finding = await the_one(db, "timeline")
                assert finding.severity is Severity.WARNING
                assert "restored from a dump or copied" in finding.message
            network = await deliver(restored, "new 1", "new 2")
            assert network.data() == [4, "new 1", "new 2"]
            known.append(network)
            expect_unique_numbers(*known)
            await set_lanes(restored, 3)
            known.append(await deliver(restored, "new 3"))
            expect_unique_numbers(*known)
            assert await exceptions(restored) == {}
            (change,) = await fetchval(restored, CHANGES)
            assert orjson.loads(change)["restored"] is True
            async with restored.connection(**PATH) as db:
                (found,) = await findings_of(db, "timeline")
            assert found.severity is Severity.OK
            assert "restored" in found.message
    # The original is not affected.
    known.append(await deliver(database, "original"))
    expect_unique_numbers(*known)
    assert await fetchval(database, CHANGES) is None


@pytest.mark.full
@pytest.mark.one_major
async def test_lanes_that_are_changed_before_a_relay_runs_have_new_names(
    database: Database, private_server: Server
) -> None:
    dumped, known = await dump_of_a_life(database)
    async with private_server.database(migrated=False) as restored:
        await restore(restored, dumped)
        await set_lanes(restored, 2)
        assert max(await fetchval(restored, LANES)) > 10**12
        known.append(await deliver(restored, "new"))
        expect_unique_numbers(*known)


@pytest.mark.full
@pytest.mark.one_major
async def test_a_dump_from_before_the_first_relay_begins_new_lanes(
    database: Database, private_server: Server
) -> None:
    """The lanes exist since their endpoint was added, and the original used them."""
    await add_endpoint(database)
    dumped = await dump(database)
    known = [await deliver(database, "lost 1", "lost 2")]
    async with private_server.database(migrated=False) as restored:
        await restore(restored, dumped)
        known.append(await deliver(restored, "new 1", "new 2"))
        expect_unique_numbers(*known)


@pytest.mark.full
@pytest.mark.one_major
@pytest.mark.parametrize("request_sql", sampled(["identity = 'restored'", "timeline = 0"]))
async def test_a_restored_snapshot_begins_new_lanes_on_request(
    request_sql: str, database: Database
) -> None:
    """A disk snapshot keeps the identity; the guide says what to run."""
    await add_endpoint(database)
    await deliver(database, 1)
    await fetchval(database, f"UPDATE cursor SET {request_sql} RETURNING 1")
    await deliver(database, 2)
    assert max(await fetchval(database, LANES)) > 10**12
    assert len(await fetchval(database, CHANGES)) == 1
    await deliver(database, 3)
    assert len(await fetchval(database, CHANGES)) == 1


@pytest.mark.one_major
async def test_an_identity_that_is_learnt_later_begins_no_lanes(database: Database) -> None:
    await add_endpoint(database)
    await deliver(database, 1)
    await fetchval(database, "UPDATE cursor SET identity = NULL RETURNING 1")
    await deliver(database, 2)
    assert await fetchval(database, "SELECT identity = server_identity() FROM cursor")
    assert await fetchval(database, LANES) == [1]
    assert await fetchval(database, CHANGES) is None


async def test_an_ordinary_role_reads_the_identity(database: Database) -> None:
    async with database.connection(**PATH) as db:
        transaction = db.transaction()
        await transaction.start()
        await db.execute(
            "CREATE ROLE ordinary; SELECT grant_relay('ordinary'); SET LOCAL ROLE ordinary"
        )
        assert await db.fetchval("SELECT server_identity() ~ '^[0-9]+/[0-9]+$'")
        assert await db.fetchval("SELECT history_changed()") is False
        await db.execute("RESET ROLE; REVOKE EXECUTE ON FUNCTION pg_control_system FROM PUBLIC")
        await db.execute("SET LOCAL ROLE ordinary")
        # The function runs with the rights of the schema's owner.
        assert await db.fetchval("SELECT server_identity()") is not None
        await transaction.rollback()

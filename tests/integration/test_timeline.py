"""A changed timeline without a failover: the reported timeline is scripted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.core.delivery.commands import AttemptRow, Record
from outbox.operations.endpoints import states as endpoint_states
from outbox.relay.sequencing.cursor import BatchResult, Cursor
from outbox.store.cluster import timeline
from outbox.store.cluster.replicas import ReplicaStore
from outbox.store.delivery.endpoint_state import EndpointStateStore
from outbox.store.delivery.records import RecordStore
from outbox.store.errors import Fenced
from outbox.store.sequencing.batches import SequencingStore
from tests.support.operators import LOCK_EPOCH
from tests.support.relay import (
    OK,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    register,
    running,
)
from tests.support.sequencers import always_notify, settings
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncpg import Connection

    from outbox.core.model.response import AttemptResult
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.costly

SESSION = {"server_settings": {"search_path": "relay"}}

SET_TIMELINE = """
CREATE OR REPLACE FUNCTION relay.server_timeline() RETURNS bigint
LANGUAGE plpgsql STABLE AS $$ BEGIN RETURN {}; END $$
"""

WRITTEN_BY = "SELECT by_xid FROM incarnation"

LANES = """
SELECT array_agg(format('%s-%s', l.generation, l.slot) ORDER BY l.id)
  FROM lane l JOIN endpoint e ON e.id = l.endpoint_id WHERE e.name = $1
"""
SEQUENCED_IN = """
SELECT array_agg(DISTINCT l.generation) FROM delivery d JOIN lane l ON l.id = d.lane_id
 WHERE d.batch > $1
"""


async def set_timeline(database: Database, number: int | None) -> None:
    """Set the timeline that the server reports."""
    async with database.connection() as connection:
        await connection.execute(SET_TIMELINE.format("NULL" if number is None else number))


async def journal(database: Database, kind: str) -> list[dict[str, Any]]:
    async with database.connection(**SESSION) as connection:
        rows = await connection.fetch("SELECT data FROM journal WHERE kind = $1 ORDER BY id", kind)
    return [orjson.loads(row["data"]) for row in rows]


class Leader:
    """The cursor of a newly registered replica."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def begin(self) -> Leader:
        self.db: Connection[Any] = await self.database.connect(**SESSION)
        here = await timeline.read_server_fence(self.db)
        self.replicas = ReplicaStore(self.db, here)
        self.id = await register(self.replicas)
        self.timeline = here
        self.store = SequencingStore(self.db, here)
        await self.store.check()
        self.cursor = Cursor(
            self.store, self.id, settings(self.database), lambda _: None, lambda *_: False,
            always_notify,
        )  # fmt: skip
        return self

    async def turn(self) -> BatchResult:
        return await self.cursor.sequence_batch()


async def batches(database: Database) -> int:
    count: int = await fetchval(database, "SELECT max(batch) FROM batch")
    return count


# ----------------------------------------------------------- the reported timeline


async def test_the_timeline_of_the_server_is_read(database: Database) -> None:
    async with database.connection(**SESSION) as connection:
        fence = await timeline.read_server_fence(connection)
        assert fence is not None
        assert fence >> 32 == 1
        assert fence % 2**32 == await connection.fetchval(WRITTEN_BY)


async def test_a_missing_privilege_to_read_the_timeline_is_tolerated(database: Database) -> None:
    async with database.connection(**SESSION) as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(
            "REVOKE EXECUTE ON FUNCTION pg_walfile_name FROM PUBLIC;"
            "CREATE ROLE nobody_special; SELECT relay.grant_relay('nobody_special');"
            "SET LOCAL ROLE nobody_special"
        )
        fence = await timeline.read_server_fence(connection)
        assert fence == await connection.fetchval(WRITTEN_BY)
        await transaction.rollback()


# ----------------------------------------------------------------- new lanes


async def test_the_first_timeline_is_stored_without_further_action(database: Database) -> None:
    await add_endpoint(database)
    leader = await Leader(database).begin()
    await leader.turn()
    assert await fetchval(database, "SELECT timeline FROM cursor") == 1
    assert await fetchval(database, "SELECT timeline_at FROM cursor") is None
    assert await fetchval(database, LANES, "shop") == ["1-0"]
    assert await journal(database, "timeline_changed") == []


async def test_every_active_endpoint_gets_new_lanes_on_a_new_timeline(
    database: Database,
) -> None:
    await add_endpoint(database, "shop", lanes=2)
    for name in ("paused", "disabled", "removed"):
        await add_endpoint(database, name)
    async with database.connection(**SESSION) as db:
        await endpoint_states.pause_endpoints(db, "relay", ["paused"], actor="test")
        await db.execute("UPDATE endpoint SET state = 'removed' WHERE name = 'removed'")
        await db.execute("UPDATE endpoint SET state = 'disabled' WHERE name = 'disabled'")
        await db.execute("UPDATE ownership SET epoch = 7")
    await (await Leader(database).begin()).turn()
    version = await fetchval(database, "SELECT version FROM cursor")
    await set_timeline(database, 3)
    await publish(database, *range(20))

    await (await Leader(database).begin()).turn()

    (new,) = await fetchval(database, SEQUENCED_IN, 0)
    assert await fetchval(database, LANES, "shop") == ["1-0", "1-1", f"{new}-0", f"{new}-1"]
    for name in ("paused", "disabled"):
        assert await fetchval(database, "SELECT generation > 1 FROM endpoint WHERE name = $1", name)
        assert len(await fetchval(database, LANES, name)) == 2
    assert await fetchval(database, LANES, "removed") == ["1-0"]
    assert await fetchval(database, "SELECT version FROM cursor") == version + 1
    assert await fetchval(database, "SELECT timeline FROM cursor") == 3
    assert await fetchval(database, "SELECT timeline_at IS NOT NULL FROM cursor")
    # The current owner may write their progress.
    assert await fetchval(database, "SELECT array_agg(DISTINCT epoch) FROM lane_progress l") == [
        0,
        7,
    ]
    entry = {"old": 1, "new": 3, "from_batch": 1, "endpoints": 3}
    assert await journal(database, "timeline_changed") == [entry]
    renewed = await journal(database, "endpoint_lanes_renewed")
    assert {"generation": new, "lanes": 2, "from_batch": 1, "timeline": 3} in renewed
    assert len(renewed) == 3
    # It is reported once.
    await (await Leader(database).begin()).turn()
    assert len(await journal(database, "timeline_changed")) == 1


async def test_nothing_is_sequenced_to_old_lanes_if_a_change_is_made_before_the_new_ones(
    database: Database,
) -> None:
    await add_endpoint(database)
    await (await Leader(database).begin()).turn()
    await set_timeline(database, 2)
    await publish(database, *range(5))
    leader = await Leader(database).begin()

    async def change() -> None:
        async with database.connection(**SESSION) as operator:
            await endpoint_states.pause_endpoints(operator, "relay", ["shop"], actor="test")

    _before(leader.store, "begin_timeline", change)
    assert await leader.turn() is BatchResult.STALE
    assert await batches(database) == 0
    assert await leader.turn() is BatchResult.WRITTEN
    (generation,) = await fetchval(database, SEQUENCED_IN, 0)
    assert generation > 1


async def test_a_lost_lane_change_does_not_free_its_generation(
    database: Database,
) -> None:
    """A history has its own generations, independent of what begins them."""
    async with database.connection(**SESSION) as db:
        next_generation = "SELECT next_generation($1)"
        assert await db.fetchval(next_generation, 1) == 2
        await db.execute("UPDATE cursor SET timeline = 1, identity = server_identity()")
        assert await db.fetchval(next_generation, 2) == 3
        now_ms = await db.fetchval(
            "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
        )
        await set_timeline(database, 2)
        first = await db.fetchval(next_generation, 3)
        assert first >= now_ms
        assert await db.fetchval(next_generation, first + 10_000) == first + 10_001
        await set_timeline(database, None)
        assert await db.fetchval(next_generation, 3) == 4
        await db.execute("UPDATE cursor SET identity = 'another'")
        assert await db.fetchval(next_generation, 3) >= first


async def test_pending_deliveries_of_old_lanes_come_first_and_the_lane_end_is_marked(
    database: Database,
) -> None:
    hold = asyncio.Event()

    async def response(_: Sent) -> AttemptResult:
        await hold.wait()
        return OK

    network = Network(response)
    await add_endpoint(database)
    async with running(database, network):
        await publish(database, 1, 2, 3)
        await until(lambda: network.sent, what="the first request")
        await until(lambda: fetchval(database, "SELECT max(last_seq) = 3 FROM lane_counter"))
        await set_timeline(database, 2)
        await publish(database, 4, 5)
        # The request in flight is closed and repeated.
        await until(lambda: journal(database, "timeline_changed"), what="the new lanes")
        hold.set()
        await all_ended(database)
    assert network.data() == [1, 2, 3, 4, 5]
    ends = [sent.body.get("lane_ends", False) for sent in network.accepted]
    assert ends == [False, False, True, False, False]
    assert [sent.seq for sent in network.accepted] == [1, 2, 3, 1, 2]
    assert len({sent.lane for sent in network.accepted}) == 2
    assert len(await journal(database, "timeline_changed")) == 1
    assert await exceptions(database) == {}


async def test_the_lane_end_is_marked_before_sequencing_on_the_new_timeline(
    database: Database,
) -> None:
    await add_endpoint(database)
    await publish(database, 1)
    leader = await Leader(database).begin()
    await leader.turn()
    await leader.replicas.release_all(leader.id, "test")
    await set_timeline(database, 2)
    network = Network()
    async with database.connection() as db:
        # No replica sequences.
        await db.execute("BEGIN; SELECT FROM relay.cursor FOR UPDATE")
        async with running(database, network):
            await until(lambda: network.accepted, what="the delivery")
            await db.execute("COMMIT")
    assert [sent.body.get("lane_ends") for sent in network.accepted] == [True]


# ------------------------------------------------------------- no reported timeline


@pytest.mark.full
async def test_deliveries_work_without_a_known_timeline(database: Database) -> None:
    await set_timeline(database, None)
    await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, 1, 2)
        await all_ended(database)
    assert network.data() == [1, 2]
    assert await fetchval(database, "SELECT timeline FROM cursor") is None
    # Learning the timeline later is not a change.
    await set_timeline(database, 5)
    async with running(database, network):
        await publish(database, 3)
        await all_ended(database)
    assert await fetchval(database, "SELECT timeline FROM cursor") == 5
    assert await journal(database, "timeline_changed") == []
    assert await fetchval(database, LANES, "shop") == ["1-0"]


async def test_a_known_timeline_is_kept_while_the_server_reports_none(
    database: Database,
) -> None:
    await add_endpoint(database)
    for known in (1, None, 2):
        await set_timeline(database, known)
        await (await Leader(database).begin()).turn()
    (entry,) = await journal(database, "timeline_changed")
    assert (entry["old"], entry["new"]) == (1, 2)


# --------------------------------------------------------------------- stale writers


async def test_a_leader_is_fenced_by_its_read_when_the_proxy_changes_servers(
    database: Database,
) -> None:
    await add_endpoint(database)
    leader = await Leader(database).begin()
    await publish(database, 1)
    assert await leader.turn() is BatchResult.WRITTEN
    await set_timeline(database, 2)
    await publish(database, 2)
    written = await batches(database)
    for _ in range(2):
        with pytest.raises(Fenced):
            await leader.turn()
    assert await batches(database) == written
    assert await fetchval(database, "SELECT timeline FROM cursor") == 1


async def test_a_replica_registered_on_another_timeline_does_not_become_leader(
    database: Database,
) -> None:
    """Its replica id may now belong to another replica."""
    late = await Leader(database).begin()
    await (await Leader(database).begin()).turn()
    await set_timeline(database, 2)
    with pytest.raises(Fenced):
        await late.turn()
    assert await fetchval(database, "SELECT writer FROM cursor") != late.id
    assert await fetchval(database, "SELECT timeline FROM cursor") == 1


async def test_a_leader_of_another_timeline_does_not_release_leadership(database: Database) -> None:
    leader = await Leader(database).begin()
    await leader.turn()
    await set_timeline(database, 2)
    with pytest.raises(Fenced):
        await leader.cursor.release_leadership()
    assert await fetchval(database, "SELECT writer FROM cursor") == leader.id


async def test_a_batch_read_from_another_server_is_not_written(
    database: Database,
) -> None:
    await add_endpoint(database)
    leader = await Leader(database).begin()
    await publish(database, 1)
    assert await leader.turn() is BatchResult.WRITTEN
    written = await batches(database)
    await publish(database, 2)
    _before(leader.store, "write", lambda: set_timeline(database, 2))
    for _ in range(2):
        with pytest.raises(Fenced):
            await leader.turn()
    assert await batches(database) == written


async def test_a_leader_without_its_last_batch_writes_nothing_and_reloads(
    database: Database,
) -> None:
    """Without a timeline, the newest batch reveals that the server changed."""
    await set_timeline(database, None)
    await add_endpoint(database)
    leader = await Leader(database).begin()
    for n in (1, 2):
        await publish(database, n)
        assert await leader.turn() is BatchResult.WRITTEN
    async with database.connection(**SESSION) as db:
        await db.execute(
            "DELETE FROM batch WHERE batch = 2; DELETE FROM delivery_run WHERE batch = 2;"
            "UPDATE lane_counter SET last_seq = 1, by_xid = txid_current()"
        )
    await publish(database, 3)
    assert await leader.turn() is BatchResult.STALE
    assert await batches(database) == 1
    assert await leader.turn() is BatchResult.WRITTEN
    # Events 2 and 3 have the sequence numbers 2 and 3.
    assert await fetchval(database, "SELECT max(last_seq) FROM lane_counter") == 3
    assert await exceptions(database) == {}


async def test_all_writes_of_an_owner_are_rejected_on_another_timeline(database: Database) -> None:
    made = await add_endpoint(database)
    other = await add_endpoint(database, "other")
    leader = await Leader(database).begin()
    await publish(database, 1)
    await leader.turn()
    (epoch,) = (await leader.replicas.claim(leader.id, [made.id], "test")).values()
    lane = await fetchval(database, "SELECT id FROM lane WHERE endpoint_id = $1", made.id)
    records = RecordStore(leader.db, leader.id, leader.timeline)
    group = [Record(lane, 1, AttemptRow(1, 1, 1, "delivered", 200, None, 1.0, 0.1))]
    care = EndpointStateStore(leader.db, "relay", leader.id, leader.timeline)
    assert await leader.replicas.renew(leader.id)

    await set_timeline(database, 2)

    assert not await leader.replicas.renew(leader.id)
    with pytest.raises(Fenced):
        await records.write(group, [epoch])
    with pytest.raises(Fenced):
        await records.finish_endpoint(made.id, [(lane, 0)])
    assert await leader.replicas.claim(leader.id, [other.id], "test") == {}
    assert not await care.disable(made.id, "test", {})
    await leader.replicas.release(leader.id, [made.id], "test", "test")
    assert await leader.db.fetchval(LOCK_EPOCH, made.id) == epoch
    assert await fetchval(database, "SELECT count(*) FROM attempt") == 0

    await set_timeline(database, 1)
    await records.write(group, [epoch])


async def test_a_former_replica_is_expired_by_its_label(database: Database) -> None:
    """After a failover its id may belong to another replica."""
    leader = await Leader(database).begin()
    assert not await leader.replicas.expire_former("outbox-relay:another", 1.0)
    assert await leader.replicas.renew(leader.id)
    label = await fetchval(database, "SELECT label FROM replica")
    assert await leader.replicas.expire_former(label, 1.0)


def _before(store: SequencingStore, method: str, action: Callable[[], Any]) -> None:
    """Run an action right before the next call of a method."""
    real = getattr(store, method)

    async def first(*arguments: Any, **options: Any) -> Any:
        setattr(store, method, real)
        await action()
        return await real(*arguments, **options)

    setattr(store, method, first)

"""A changed timeline, without the fail-over: what the server says of it is made up here."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.core.delivery.commands import AttemptRow, Record
from outbox.operations import endpoint_states
from outbox.operations.endpoint_changes import LOCK_EPOCH
from outbox.relay.sequencing.cursor import Cursor, Turn
from outbox.store import timeline
from outbox.store.cursor import CursorStore
from outbox.store.endpoint_state import CareStore
from outbox.store.records import Fenced, RecordStore
from outbox.store.replicas import ReplicaStore
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
from tests.support.sequencers import settings
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncpg import Connection

    from outbox.core.model.response import Answer
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.costly

SESSION = {"server_settings": {"search_path": "relay"}}

SAY = """
CREATE OR REPLACE FUNCTION relay.server_timeline() RETURNS bigint
LANGUAGE plpgsql STABLE AS $$ BEGIN RETURN {}; END $$
"""

LANES = """
SELECT array_agg(format('%s-%s', l.generation, l.slot) ORDER BY l.id)
  FROM lane l JOIN endpoint e ON e.id = l.endpoint_id WHERE e.name = $1
"""
SEQUENCED_IN = """
SELECT array_agg(DISTINCT l.generation) FROM delivery d JOIN lane l ON l.id = d.lane_id
 WHERE d.batch > $1
"""


async def say(database: Database, number: int | None) -> None:
    """Let the server be on this timeline."""
    async with database.connection() as connection:
        await connection.execute(SAY.format("NULL" if number is None else number))


async def journal(database: Database, kind: str) -> list[dict[str, Any]]:
    async with database.connection(**SESSION) as connection:
        rows = await connection.fetch("SELECT data FROM journal WHERE kind = $1 ORDER BY id", kind)
    return [orjson.loads(row["data"]) for row in rows]


class Leader:
    """The cursor of a replica that registered just now."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def begin(self) -> Leader:
        self.db: Connection[Any] = await self.database.connect(**SESSION)
        here = await timeline.read(self.db)
        self.replicas = ReplicaStore(self.db, here)
        self.id = await register(self.replicas)
        self.timeline = here
        self.store = CursorStore(self.db, here)
        await self.store.check()
        self.cursor = Cursor(
            self.store, self.id, settings(self.database), lambda _: None, lambda *_: False
        )
        return self

    async def turn(self) -> Turn:
        return await self.cursor.turn()


async def batches(database: Database) -> int:
    count: int = await fetchval(database, "SELECT max(batch) FROM batch")
    return count


# ------------------------------------------------------------ what the server says


async def test_the_server_says_its_timeline(database: Database) -> None:
    async with database.connection(**SESSION) as connection:
        assert await timeline.read(connection) == 1


async def test_a_server_that_may_not_say_its_timeline_is_no_trouble(database: Database) -> None:
    async with database.connection(**SESSION) as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(
            "REVOKE EXECUTE ON FUNCTION pg_walfile_name FROM PUBLIC;"
            "CREATE ROLE nobody_special; SELECT relay.grant_relay('nobody_special');"
            "SET LOCAL ROLE nobody_special"
        )
        assert await timeline.read(connection) is None
        await transaction.rollback()


# ----------------------------------------------------------------- new lanes


async def test_the_first_timeline_is_only_remembered(database: Database) -> None:
    await add_endpoint(database)
    leader = await Leader(database).begin()
    await leader.turn()
    assert await fetchval(database, "SELECT timeline FROM cursor") == 1
    assert await fetchval(database, "SELECT timeline_at FROM cursor") is None
    assert await fetchval(database, LANES, "shop") == ["1-0"]
    assert await journal(database, "timeline_changed") == []


async def test_on_a_new_timeline_every_endpoint_that_may_go_on_gets_new_lanes_first(
    database: Database,
) -> None:
    await add_endpoint(database, "shop", lanes=2)
    for name in ("paused", "disabled", "removed"):
        await add_endpoint(database, name)
    async with database.connection(**SESSION) as db:
        await endpoint_states.pause(db, "relay", ["paused"], actor="test")
        await db.execute("UPDATE endpoint SET state = 'removed' WHERE name = 'removed'")
        await db.execute("UPDATE endpoint SET state = 'disabled' WHERE name = 'disabled'")
        await db.execute("UPDATE ownership SET epoch = 7")
    await (await Leader(database).begin()).turn()
    version = await fetchval(database, "SELECT version FROM cursor")
    await say(database, 3)
    await publish(database, *range(20))

    await (await Leader(database).begin()).turn()

    assert await fetchval(database, LANES, "shop") == ["1-0", "1-1", "2000001-0", "2000001-1"]
    assert await fetchval(database, LANES, "paused") == ["1-0", "2000001-0"]
    assert await fetchval(database, LANES, "disabled") == ["1-0", "2000001-0"]
    assert await fetchval(database, LANES, "removed") == ["1-0"]
    assert await fetchval(database, SEQUENCED_IN, 0) == [2000001]
    assert await fetchval(database, "SELECT version FROM cursor") == version + 1
    assert await fetchval(database, "SELECT timeline FROM cursor") == 3
    assert await fetchval(database, "SELECT timeline_at IS NOT NULL FROM cursor")
    # Whoever owns them now may write their progress.
    assert await fetchval(database, "SELECT array_agg(DISTINCT epoch) FROM lane_progress l") == [
        0,
        7,
    ]
    told = {"old": 1, "new": 3, "from_batch": 1, "endpoints": 3}
    assert await journal(database, "timeline_changed") == [told]
    renewed = await journal(database, "endpoint_lanes_renewed")
    assert {"generation": 2000001, "lanes": 2, "from_batch": 1, "timeline": 3} in renewed
    assert len(renewed) == 3
    # It is told once.
    await (await Leader(database).begin()).turn()
    assert len(await journal(database, "timeline_changed")) == 1


async def test_a_change_of_lanes_that_was_lost_leaves_its_names_to_nobody(
    database: Database,
) -> None:
    """Each timeline has generations of its own, whoever begins them."""
    async with database.connection(**SESSION) as db:
        next_generation = "SELECT next_generation($1)"
        assert await db.fetchval(next_generation, 1) == 2
        await say(database, 2)
        assert await db.fetchval(next_generation, 1) == 1000001
        assert await db.fetchval(next_generation, 1000001) == 1000002
        await say(database, None)
        assert await db.fetchval(next_generation, 1000002) == 1000003


async def test_what_the_old_lanes_owe_comes_first_and_its_end_is_told(database: Database) -> None:
    hold = asyncio.Event()

    async def answer(_: Sent) -> Answer:
        await hold.wait()
        return OK

    network = Network(answer)
    await add_endpoint(database)
    async with running(database, network):
        await publish(database, 1, 2, 3)
        await until(lambda: network.sent, what="the first request")
        await until(lambda: fetchval(database, "SELECT max(last_seq) = 3 FROM lane_counter"))
        await say(database, 2)
        await publish(database, 4, 5)
        # The request that is in flight is closed, and comes again.
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


async def test_the_end_is_told_also_before_anybody_sequenced_on_the_new_timeline(
    database: Database,
) -> None:
    await add_endpoint(database)
    await publish(database, 1)
    leader = await Leader(database).begin()
    await leader.turn()
    await leader.replicas.leave(leader.id, "test")
    await say(database, 2)
    network = Network()
    async with database.connection() as db:
        # Nobody gets to sequence.
        await db.execute("BEGIN; SELECT FROM relay.cursor FOR UPDATE")
        async with running(database, network):
            await until(lambda: network.accepted, what="the delivery")
            await db.execute("COMMIT")
    assert [sent.body.get("lane_ends") for sent in network.accepted] == [True]


# ------------------------------------------------------- a server that says nothing


async def test_without_a_timeline_everything_works(database: Database) -> None:
    await say(database, None)
    await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, 1, 2)
        await all_ended(database)
    assert network.data() == [1, 2]
    assert await fetchval(database, "SELECT timeline FROM cursor") is None
    # When it is known some day, that is no change.
    await say(database, 5)
    async with running(database, network):
        await publish(database, 3)
        await all_ended(database)
    assert await fetchval(database, "SELECT timeline FROM cursor") == 5
    assert await journal(database, "timeline_changed") == []
    assert await fetchval(database, LANES, "shop") == ["1-0"]


async def test_a_timeline_that_was_known_is_remembered_while_the_server_is_silent(
    database: Database,
) -> None:
    await add_endpoint(database)
    for known in (1, None, 2):
        await say(database, known)
        await (await Leader(database).begin()).turn()
    (told,) = await journal(database, "timeline_changed")
    assert (told["old"], told["new"]) == (1, 2)


# ------------------------------------------------ whoever does not notice the change


async def test_a_leader_behind_a_proxy_that_changed_its_server_is_fenced_by_its_read(
    database: Database,
) -> None:
    await add_endpoint(database)
    leader = await Leader(database).begin()
    await publish(database, 1)
    assert await leader.turn() is Turn.MOVED
    await say(database, 2)
    await publish(database, 2)
    written = await batches(database)
    for _ in range(2):
        with pytest.raises(Fenced):
            await leader.turn()
    assert await batches(database) == written
    assert await fetchval(database, "SELECT timeline FROM cursor") == 1


async def test_who_registered_on_another_timeline_does_not_take_the_lead(
    database: Database,
) -> None:
    """Its number may be another replica's by now."""
    late = await Leader(database).begin()
    await (await Leader(database).begin()).turn()
    await say(database, 2)
    with pytest.raises(Fenced):
        await late.turn()
    assert await fetchval(database, "SELECT writer FROM cursor") != late.id
    assert await fetchval(database, "SELECT timeline FROM cursor") == 1


async def test_who_led_on_another_timeline_does_not_let_go_of_the_lead(database: Database) -> None:
    leader = await Leader(database).begin()
    await leader.turn()
    await say(database, 2)
    with pytest.raises(Fenced):
        await leader.cursor.leave()
    assert await fetchval(database, "SELECT writer FROM cursor") == leader.id


async def test_a_batch_that_was_read_from_another_server_is_not_written(
    database: Database,
) -> None:
    await add_endpoint(database)
    leader = await Leader(database).begin()
    await publish(database, 1)
    assert await leader.turn() is Turn.MOVED
    written = await batches(database)
    await publish(database, 2)
    _before(leader.store, "write", lambda: say(database, 2))
    assert await leader.turn() is Turn.OVERTAKEN
    assert await batches(database) == written
    with pytest.raises(Fenced):
        await leader.turn()


async def test_a_leader_whose_last_batch_is_lost_writes_nothing_and_reads_again(
    database: Database,
) -> None:
    """Where no timeline tells that it is another server, the newest batch does."""
    await say(database, None)
    await add_endpoint(database)
    leader = await Leader(database).begin()
    for n in (1, 2):
        await publish(database, n)
        assert await leader.turn() is Turn.MOVED
    async with database.connection(**SESSION) as db:
        await db.execute(
            "DELETE FROM batch WHERE batch = 2; DELETE FROM delivery WHERE batch = 2;"
            "UPDATE lane_counter SET last_seq = 1"
        )
    await publish(database, 3)
    assert await leader.turn() is Turn.OVERTAKEN
    assert await batches(database) == 1
    assert await leader.turn() is Turn.MOVED
    # Events 2 and 3 have the numbers 2 and 3.
    assert await fetchval(database, "SELECT max(last_seq) FROM lane_counter") == 3
    assert await exceptions(database) == {}


async def test_whatever_an_owner_writes_is_refused_on_another_timeline(database: Database) -> None:
    made = await add_endpoint(database)
    other = await add_endpoint(database, "other")
    leader = await Leader(database).begin()
    await publish(database, 1)
    await leader.turn()
    (epoch,) = (await leader.replicas.claim(leader.id, [made.id], "test")).values()
    lane = await fetchval(database, "SELECT id FROM lane WHERE endpoint_id = $1", made.id)
    records = RecordStore(leader.db, leader.id, leader.timeline)
    group = [Record(lane, 1, AttemptRow(1, 1, 1, "delivered", 200, None, 1.0, 0.1))]
    care = CareStore(leader.db, "relay", leader.id, leader.timeline)
    assert await leader.replicas.renew(leader.id)

    await say(database, 2)

    assert not await leader.replicas.renew(leader.id)
    with pytest.raises(Fenced):
        await records.write(group, [epoch])
    with pytest.raises(Fenced):
        await records.finish(made.id, [(lane, 0)])
    assert await leader.replicas.claim(leader.id, [other.id], "test") == {}
    assert not await care.disable(made.id, "test", {})
    await leader.replicas.release(leader.id, [made.id], "test", "test")
    assert await leader.db.fetchval(LOCK_EPOCH, made.id) == epoch
    assert await fetchval(database, "SELECT count(*) FROM attempt") == 0

    await say(database, 1)
    await records.write(group, [epoch])


async def test_a_number_that_was_given_to_another_replica_is_not_buried_for_its_own(
    database: Database,
) -> None:
    leader = await Leader(database).begin()
    assert not await leader.replicas.bury(leader.id, "test", 1.0, called="somebody else")
    assert await leader.replicas.renew(leader.id)
    assert await leader.replicas.bury(leader.id, "test", 1.0, called="test")


def _before(store: CursorStore, method: str, action: Callable[[], Any]) -> None:
    """Do something right before the next call of a method."""
    real = getattr(store, method)

    async def first(*arguments: Any, **options: Any) -> Any:
        setattr(store, method, real)
        await action()
        return await real(*arguments, **options)

    setattr(store, method, first)

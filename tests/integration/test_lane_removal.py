"""Lanes of older generations and of removed endpoints go when nothing refers to them, and no
number of changes collects them, in the tables or in a relay.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.core.sequencing.partition_window import Retention
from outbox.errors import QuotaExceeded
from outbox.operations import lane_history, quotas
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import removal as endpoint_removal
from outbox.operations.status import COUNT_SEQUENCED
from outbox.relay.delivery import recorder
from outbox.store.delivery.records import RecordStore
from outbox.store.retention.periods import RetentionStore
from outbox.store.retention.upkeep import UpkeepStore
from tests.support.observed import observe
from tests.support.relay import (
    BUSY,
    OK,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    owned_endpoint,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

SESSION = {"server_settings": {"search_path": "relay"}}
COUNT = "SELECT count(*) FROM lane"
LANES = 12


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**SESSION)


@pytest.fixture
def upkeep(db: Connection[Any]) -> UpkeepStore:
    return UpkeepStore(db)  # type: ignore[arg-type]


async def set_lanes(db: Connection[Any], lanes: int, name: str = "shop") -> None:
    await endpoint_changes.update_endpoint(
        db, "relay", name, lambda old: replace(old, lanes=lanes), actor="test"
    )


def remembered(worker: Any) -> tuple[set[int], set[int]]:
    """The lanes in the memory of a relay: of its dispatcher, and of its sequencer."""
    running_session = worker._session.running
    counters = running_session.sequencer.cursor._counters
    return set(running_session.dispatcher._lanes), set(counters)


# ------------------------------------------------------------------ no growth


@pytest.mark.system
async def test_changes_of_lanes_within_the_quota_do_not_collect_lanes(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.maintenance.EVERY_S", 0.1)
    await add_endpoint(database, tenant="acme", lanes=LANES)
    await quotas.set_quota(db, "relay", "acme", {"lanes": LANES}, actor="test")
    made = most = 0
    refused: list[str] = []
    async with running(database, Network()) as worker:
        owned = "SELECT replica_id IS NOT NULL FROM ownership"
        await until(lambda: fetchval(database, owned), what="an owner")
        while made < 12:
            try:
                await set_lanes(db, LANES - 1 + made % 2)
                made += 1
            except QuotaExceeded as error:
                refused.append(str(error))
            most = max(most, await db.fetchval(COUNT))
        assert most <= 2 * LANES
        assert refused
        assert all("of older generations" in each for each in refused)
        await publish(database, *range(20), tenant="acme")
        await all_ended(database)
        left = f"SELECT ({COUNT}) = (SELECT lanes FROM endpoint)"
        await until(lambda: fetchval(database, left), what="the removal")
        ids = {row["id"] for row in await db.fetch("SELECT id FROM lane")}
        await until(lambda: remembered(worker)[0] == ids, what="the relay's lanes")
        assert remembered(worker)[1] <= ids
    assert await exceptions(database) == {}


@pytest.mark.system
async def test_a_relay_forgets_lanes_that_are_drained(
    database: Database, db: Connection[Any]
) -> None:
    """Without a restart, and whether their rows are removed or not."""
    await add_endpoint(
        database, lanes=4, retry={"base_s": 0.01, "cap_s": 0.02, "attempts_max": 999}
    )
    broken = True
    async with running(database, Network(lambda _: BUSY if broken else OK)) as worker:
        for key in "abcdefgh":
            await publish(database, 1, key=key)
        await until(lambda: fetchval(database, "SELECT sum(last_seq) = 8 FROM lane_counter"))
        await set_lanes(db, 2)
        await publish(database, 2, key="a")
        await until(lambda: fetchval(database, "SELECT sum(last_seq) = 9 FROM lane_counter"))
        newest = {row["id"] for row in await db.fetch("SELECT id FROM lane WHERE generation = 2")}
        await until(lambda: newest < remembered(worker)[0], what="both generations")
        assert remembered(worker)[1] <= newest
        broken = False
        await all_ended(database)
        await until(lambda: remembered(worker)[0] == newest, what="only the newest generation")
        assert set(owned_endpoint(worker).lanes) == newest
        await set_lanes(db, 3)
        await until(lambda: len(remembered(worker)[0]) == 3, what="only the newest generation")
        await publish(database, 3, key="a")
        await all_ended(database)
    assert await db.fetchval(COUNT) == 4 + 2 + 3


# ------------------------------------------------------------------ what keeps a lane

FAILING = """
CREATE OR REPLACE FUNCTION remove_lanes(lanes_max integer) RETURNS bigint LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'lanes are examined'; END $$
"""

LANE = "(SELECT min(id) FROM lane)"
DEAD_LETTER = f"""
INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, reason, attempts)
SELECT endpoint_id, id, 0, 1, 1, 'refused', 1 FROM lane WHERE id = {LANE}
"""
CASES: dict[str, tuple[str, str]] = {
    "pending delivery": (
        f"UPDATE lane_counter SET last_seq = 1 WHERE lane_id = {LANE}",
        "UPDATE lane_counter SET last_seq = 0",
    ),
    "kept period": (
        f"""WITH c AS (UPDATE lane_counter SET last_seq = 1 WHERE lane_id = {LANE})
            UPDATE lane_progress SET acked_seq = 1 WHERE lane_id = {LANE}""",
        "UPDATE lane_progress SET floor_batch = -1",
    ),
    "delivery": (
        f"INSERT INTO delivery_run (lane_id, batch, seq, outbox_id) VALUES ({LANE}, 5, 1, 1)",
        "DELETE FROM delivery_run",
    ),
    "attempt": (
        f"""INSERT INTO attempt_run (lane_id, batch, seq, attempt, replica_id, outcome,
                                     started_at, elapsed_ms)
            VALUES ({LANE}, 5, 1, 1, 1, 'r', now(), 1)""",
        "DELETE FROM attempt_run",
    ),
    "receiver that fetches": (
        f"""WITH c AS (UPDATE lane_counter SET last_seq = 1 WHERE lane_id = {LANE}),
                 t AS (INSERT INTO fetch_token (endpoint_id, hash, created_by)
                       SELECT id, sha256('x'), 'test' FROM endpoint)
            UPDATE lane_progress SET acked_seq = 1, floor_batch = -1 WHERE lane_id = {LANE}""",
        "DELETE FROM fetch_token",
    ),
    "dead letter": (DEAD_LETTER, "DELETE FROM dead_letter"),
    "block": (f"INSERT INTO lane_block VALUES ({LANE}, 1)", "DELETE FROM lane_block"),
    "end of a broker's lane": (
        "UPDATE endpoint SET url = 'redis://localhost/s'",
        "UPDATE lane_progress SET end_seq = 1",
    ),
    "restored state": (
        "UPDATE incarnation SET by_xid = NULL",
        "UPDATE incarnation SET by_xid = pg_current_xact_id()::xid::text::bigint",
    ),
    "current generation": (
        "UPDATE endpoint SET generation = 1",
        "UPDATE endpoint SET generation = 2",
    ),
}


async def test_lanes_are_not_examined_where_endpoints_have_their_first_ones(
    db: Connection[Any], database: Database, upkeep: UpkeepStore
) -> None:
    await add_endpoint(database, lanes=1)
    await db.execute(FAILING)
    assert await upkeep.remove_lanes() == 0
    await set_lanes(db, 2)
    with pytest.raises(asyncpg.RaiseError, match="lanes are examined"):
        await upkeep.remove_lanes()
    await db.execute("UPDATE endpoint SET generation = 1, state = 'removed'")
    with pytest.raises(asyncpg.RaiseError, match="lanes are examined"):
        await upkeep.remove_lanes()


@pytest.mark.parametrize("case", CASES)
async def test_a_lane_is_kept_while_something_needs_it(
    db: Connection[Any], database: Database, upkeep: UpkeepStore, case: str
) -> None:
    await add_endpoint(database, lanes=1)
    await set_lanes(db, 2)
    needs, ends = CASES[case]
    await db.execute(needs)
    assert await upkeep.remove_lanes() == 0
    await db.execute(ends)
    assert await upkeep.remove_lanes() == 1
    assert [row["generation"] for row in await db.fetch("SELECT generation FROM lane")] == [2, 2]


async def test_a_lane_is_kept_while_a_relay_acquires_its_endpoint(
    db: Connection[Any], database: Database, upkeep: UpkeepStore
) -> None:
    """The relay requires that it has locked all lanes, and skips an endpoint that is locked."""
    await add_endpoint(database, lanes=1)
    await set_lanes(db, 2)
    async with database.connection(**SESSION) as other:
        async with other.transaction():
            await other.execute("SELECT FROM ownership FOR NO KEY UPDATE")
            assert await upkeep.remove_lanes() == 0
        async with db.transaction():
            assert await upkeep.remove_lanes() == 1
            unowned = "SELECT count(*) FROM (SELECT FROM ownership FOR UPDATE SKIP LOCKED) o"
            assert await other.fetchval(unowned) == 0


async def test_all_lanes_of_a_removed_endpoint_go_and_no_name_is_used_again(
    db: Connection[Any], database: Database, upkeep: UpkeepStore
) -> None:
    made = await add_endpoint(database, lanes=3)
    await set_lanes(db, 2)
    await upkeep.remove_lanes()
    await set_lanes(db, 3)
    names = [lane.name for lane in await lane_history.list_lanes(db, "relay", made.id)]
    assert {name.split("-")[1] for name in names} == {"2", "3"}
    await endpoint_removal.remove_endpoint(db, "relay", "shop", actor="test")
    assert await upkeep.remove_lanes() == 5
    assert await db.fetchval(COUNT) == await db.fetchval("SELECT count(*) FROM lane_progress") == 0
    assert await upkeep.remove_lanes() == 0


@pytest.mark.system
async def test_a_forgotten_lane_is_not_sent_again_before_it_is_recorded(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane is read again when its endpoint changes; the table does not know its successes yet."""
    may_write, write = asyncio.Event(), RecordStore.write

    async def write_later(*args: Any, **kwargs: Any) -> Any:
        await may_write.wait()
        return await write(*args, **kwargs)

    monkeypatch.setattr(RecordStore, "write", write_later)
    await add_endpoint(database, lanes=1)
    network = Network()
    async with running(database, network) as worker:
        await publish(database, 1)
        await until(lambda: len(network.accepted) == 1, what="the first delivery")
        for lanes in (2, 3):
            await set_lanes(db, lanes)
            rows = await db.fetch("SELECT id FROM lane ORDER BY id DESC LIMIT $1", lanes)
            newest = {row["id"] for row in rows}
            await until(lambda: newest <= remembered(worker)[0], what="the new lanes")  # noqa: B023
        assert remembered(worker)[0] == newest
        await publish(database, 2)
        await until(lambda: len(network.accepted) == 2, what="the second delivery")
        may_write.set()
        await all_ended(database)
    assert network.data() == [1, 2]
    assert await exceptions(database) == {}


@pytest.mark.system
async def test_a_lane_with_deliveries_goes_with_their_period(
    database: Database,
    db: Connection[Any],
    upkeep: UpkeepStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "CHECKPOINT_EVERY_S", 0.05)
    await add_endpoint(database, lanes=1)
    async with running(database, Network()):
        await publish(database, 1, 2, 3)
        await all_ended(database)
        await set_lanes(db, 2)
        await publish(database, *range(4))
        await all_ended(database)
    assert await upkeep.remove_lanes() == 0
    sequenced = await db.fetchval(COUNT_SEQUENCED)
    await observe(database, 30 * 86400)
    retention = RetentionStore(db, Retention(0, 0, 0), period_s=0)  # type: ignore[arg-type]
    for _ in range(3):
        await retention.advance_periods()
    assert await upkeep.remove_lanes() == 1
    assert await db.fetchval(COUNT) == 2
    assert await db.fetchval(COUNT_SEQUENCED) == sequenced == 7
    assert await exceptions(database) == {}
    async with running(database, Network()):
        await publish(database, 9)
        await all_ended(database)
    assert await exceptions(database) == {}

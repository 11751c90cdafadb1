"""Replay of dead-letter ranges: every sequence number once, in order, also when replicas are
killed.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.ids import delivery_id
from outbox.core.sequencing import replay_throttle
from outbox.operations.criteria import DeadLetterSelection
from outbox.operations.dead_letters import queries as dead_letters
from outbox.operations.dead_letters import replay as replays
from outbox.operations.endpoints import removal as endpoint_removal
from outbox.operations.replays import jobs as replay_jobs
from outbox.relay.sequencing.cursor import BatchResult
from tests.support import ranges
from tests.support.relay import (
    BUSY,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    killed_at_the_end,
    publish,
    remove_events,
    running,
)
from tests.support.split_runs import split_runs
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from asyncpg import Connection

    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.system

ALL = DeadLetterSelection(everything=True)
NUMBERS = 1500

PUBLISH_MANY = """
INSERT INTO outbox (type, key, payload)
SELECT 'a.b', CASE WHEN n % 3 > 0 THEN 'k' || n % 7 END, to_jsonb(n) FROM generate_series(1, $1) n
"""

# The expected result for every sequence number of every range: the name of its lane, and
# X-Delivery.
OF_RANGES = """
SELECT e.id, l.generation, l.slot, d.seq, d.outbox_id, o.event_id
  FROM dead_letter x
  JOIN delivery d ON d.lane_id = x.lane_id AND d.seq BETWEEN x.seq AND x.to_seq
  JOIN lane l ON l.id = x.lane_id JOIN endpoint e ON e.id = l.endpoint_id
  JOIN outbox o ON o.id = d.outbox_id
 WHERE x.outbox_id IS NULL
"""

PENDING = "SELECT sum(to_seq - next_seq + 1)::int FROM replay WHERE next_seq <= to_seq"


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(server_settings={"search_path": "relay"})


@pytest.fixture
def unpaced() -> Iterator[None]:
    """Chunks of four, one in each batch."""
    with ranges.unpaced(4):
        yield


async def a_range(
    database: Database, db: Connection[Any], numbers: int, **options: Any
) -> tuple[UUID, list[int]]:
    """An endpoint all of whose deliveries were dead-lettered unsent, and its ranges."""
    made = await add_endpoint(database, **options)
    await db.execute(PUBLISH_MANY, numbers)
    await ranges.sequence_all(database)
    return made.id, await ranges.dead_letter_pending(db)


async def expected(db: Connection[Any]) -> dict[tuple[str, int], str]:
    """X-Delivery by the lane and sequence number that a replay refers to."""
    return {
        (f"{r['id'].hex[:12]}-{r['generation']}-{r['slot']}", r["seq"]): str(
            delivery_id(r["id"], r["outbox_id"], r["event_id"])
        )
        for r in await db.fetch(OF_RANGES)
    }


def stood_for(sent: Sent) -> tuple[str, int] | None:
    replay_of = sent.body.get("replay_of")
    return replay_of and (replay_of["lane"], replay_of["sequence"])


@pytest.mark.full
@pytest.mark.costly
async def test_each_sequence_number_of_a_range_is_replayed_once_while_relays_are_killed(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Faster than in production, in chunks of twenty.
    monkeypatch.setattr(replay_throttle, "LIVE_MS", 1e9)
    monkeypatch.setattr(replay_throttle, "ENDPOINT_MAX", 20)
    monkeypatch.setattr(replay_throttle, "LIVE_BATCH_MAX", 20)
    monkeypatch.setattr(replay_throttle, "LIVE_POLL_EVERY_S", 0.01)
    monkeypatch.setattr(replay_throttle, "POLL_FIRST_S", 0.001)
    monkeypatch.setattr(replay_throttle, "POLL_EVERY_S", 0.001)
    endpoint_id, letters = await a_range(database, db, NUMBERS, lanes=3)
    assert len(letters) == 3
    # Its keys map to other lanes today.
    await ranges.change_lanes(db, endpoint_id, 2)
    network, other = Network(), Network()

    async def in_the_middle(least: int) -> bool:
        return 0 < (await db.fetchval(PENDING) or 0) < NUMBERS - least

    async with killed_at_the_end(database, network):
        await until(lambda: db.fetchval("SELECT bool_and(replica_id > 0) FROM ownership"))
        await replays.start_replay(db, "relay", ALL, actor="test")
        await publish(database, "one", key="k1")
        await until(lambda: in_the_middle(NUMBERS // 10))
    assert {
        row.state
        for row in await dead_letters.list_dead_letters(db, "relay", states=dead_letters.STATES)
    } == {"replaying"}
    async with running(database, other):
        async with killed_at_the_end(database, network):
            await publish(database, "two", key="k1")
            await until(lambda: in_the_middle(NUMBERS // 3))
        await publish(database, "three", key="k1")
        await all_ended(database, timeout_s=60)
    # A copy after a crash has the same headers as the first one.
    by_number: dict[tuple[str, int], set[tuple[str, tuple[str, int] | None]]] = defaultdict(set)
    for sent in (*network.accepted, *other.accepted):
        by_number[sent.lane, sent.seq].add((sent.delivery, stood_for(sent)))
    assert {len(identities) for identities in by_number.values()} == {1}
    lanes: dict[str, list[tuple[str, tuple[str, int] | None]]] = defaultdict(list)
    for (lane, _), identities in sorted(by_number.items()):
        lanes[lane] += identities
    again = [(of, identities) for got in lanes.values() for identities, of in got if of is not None]
    assert len(again) == NUMBERS
    assert {lane.partition("-")[2] for lane in lanes} == {"2-0", "2-1"}
    assert dict(again) == await expected(db)
    for got in lanes.values():
        # In sequence order within each lane.
        for was in {of[0] for _, of in got if of}:
            original_sequences = [of[1] for _, of in got if of and of[0] == was]
            assert original_sequences == sorted(original_sequences)
    # Live events are interleaved with the range, not queued behind it.
    (live,) = ([of for _, of in got] for got in lanes.values() if any(not of for _, of in got))
    assert live.index(None) < len(live) // 2
    rows = await dead_letters.list_dead_letters(db, "relay", states=dead_letters.STATES)
    assert {(row.state, row.again) for row in rows} == {("replayed", None)}
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_batch_takes_live_events_before_a_range(
    database: Database, db: Connection[Any], unpaced: None
) -> None:
    _, (letter,) = await a_range(database, db, 10)
    await replays.start_replay(db, "relay", DeadLetterSelection(ids=(letter,)), actor="test")
    worker = await ranges.sequencer(database)
    # A new leader loads the open jobs.
    assert await worker.sequence_batch() is BatchResult.EMPTY
    sql = """SELECT array_agg(coalesce(replay_seq, 0) ORDER BY seq) FROM delivery
              WHERE batch = (SELECT max(batch) FROM batch)"""
    got = []
    for _ in range(3):
        await publish(database, "live")
        assert await worker.sequence_batch() is BatchResult.WRITTEN
        got.append(await db.fetchval(sql))
    assert got == [[0, 1, 2, 3, 4], [0, 5, 6, 7, 8], [0, 9, 10]]
    # The range is complete, which is written once.
    assert [await worker.sequence_batch() for _ in range(2)] == [
        BatchResult.WRITTEN,
        BatchResult.EMPTY,
    ]
    assert await db.fetchval("SELECT state FROM replay_job") == "done"
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_new_sequencer_continues_the_range_of_a_dead_one(
    database: Database, db: Connection[Any], unpaced: None
) -> None:
    _, (letter,) = await a_range(database, db, 10)
    first, second = [await ranges.sequencer(database) for _ in range(2)]
    await replays.start_replay(db, "relay", DeadLetterSelection(ids=(letter,)), actor="test")
    for worker in (first, second, first):
        # The first call acquires leadership, the second reads a batch.
        await ranges.turn(worker)
        assert await ranges.turn(worker) is BatchResult.WRITTEN
    assert await db.fetchval(PENDING) is None
    assert await ranges.turn(first) is BatchResult.WRITTEN
    for worker in (second, first, second):
        assert await ranges.turn(worker) is BatchResult.EMPTY
    assert await db.fetchval("SELECT count(*) FROM delivery WHERE replay_id > 0") == 10
    await publish(database, "a")
    assert await second.sequence_batch() is BatchResult.WRITTEN
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_the_states_of_a_replayed_range(database: Database, db: Connection[Any]) -> None:
    await a_range(database, db, 9, lanes=3)
    await replays.start_replay(db, "relay", ALL, actor="test")

    async def states() -> list[tuple[str, int | None]]:
        rows = await dead_letters.list_dead_letters(db, "relay", states=dead_letters.STATES)
        for row in rows:
            for shown in (await dead_letters.get_dead_letter(db, "relay", row.id)).replays:
                assert (shown.state, shown.again) == (row.state, row.again)
        return [(row.state, row.again) for row in rows]

    assert await states() == [("dead", None)] * 3
    await ranges.sequence_all(database)
    assert await states() == [("replaying", None)] * 3
    refused: list[int] = []

    def refuse_one(sent: Sent) -> Any:
        # The middle replay of the second lane.
        if sent.lane.endswith("-1") and sent.body["data"] == refused[0]:
            return REFUSED
        return BUSY if sent.body["data"] in refused[1:] else Network().script(sent)

    sql = """SELECT array_agg(d.outbox_id::int ORDER BY d.seq) FROM delivery d
               JOIN lane l ON l.id = d.lane_id WHERE l.slot = 1 AND d.replay_id IS NULL"""
    inner = await db.fetchval(sql)
    refused.append(inner[len(inner) // 2])
    async with running(database, Network(refuse_one)):
        await all_ended(database)
    assert await states() == [("replayed", None), ("dead_again", 4), ("replayed", None),
                              ("dead", None)]  # fmt: skip
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_range_is_pending_while_one_of_its_lanes_is_pending(
    database: Database, db: Connection[Any]
) -> None:
    endpoint_id, (letter,) = await a_range(database, db, 9)
    await ranges.change_lanes(db, endpoint_id, 3)
    await replays.start_replay(db, "relay", ALL, actor="test")
    await ranges.sequence_all(database)
    sql = """UPDATE lane_progress p SET acked_seq = c.last_seq
               FROM lane_counter c JOIN lane l ON l.id = c.lane_id AND l.slot = $1
              WHERE c.lane_id = p.lane_id"""
    for slot in (1, 2, 0):
        assert (await dead_letters.get_dead_letter(db, "relay", letter)).state == "replaying"
        await db.execute(sql, slot)
    assert (await dead_letters.get_dead_letter(db, "relay", letter)).state == "replayed"


@pytest.mark.full
async def test_a_range_dead_lettered_before_its_replay_is_a_dead_letter_again(
    database: Database, db: Connection[Any]
) -> None:
    _, (letter,) = await a_range(database, db, 5)
    await replays.start_replay(db, "relay", ALL, actor="test")
    await publish(database, "live")
    await ranges.sequence_all(database)
    (again,) = await ranges.dead_letter_pending(db)
    (first, second) = await dead_letters.list_dead_letters(db, "relay", states=dead_letters.STATES)
    assert (first.id, first.state, first.again) == (letter, "dead_again", again)
    assert (second.state, second.sequence, second.to_sequence) == ("dead", 6, 11)
    # Once more: each replay names its current sequence number.
    await replays.start_replay(db, "relay", ALL, actor="test")
    network = Network()
    async with running(database, network):
        await all_ended(database)
    assert [stood_for(s) and stood_for(s)[1] for s in network.accepted] == [6, 7, 8, 9, 10, 11]
    assert network.data() == ["live", 1, 2, 3, 4, 5]
    assert await exceptions(database) == {}


async def test_a_missing_event_of_a_range_is_dead_lettered_as_missing(
    database: Database, db: Connection[Any]
) -> None:
    await a_range(database, db, 3)
    await remove_events(database, "payload = '2'")
    await replays.start_replay(db, "relay", ALL, actor="test")
    network = Network()
    async with running(database, network):
        await all_ended(database)
    assert [(s.body["data"], s.seq, s.previous_seq) for s in network.accepted] == [
        (1, 4, 0),
        (3, 6, 4),
    ]
    sql = "SELECT (seq, reason, outbox_id)::text FROM dead_letter WHERE outbox_id IS NOT NULL"
    assert await fetchval(database, sql) == "(5,missing,2)"
    (row, _) = await dead_letters.list_dead_letters(db, "relay", states=dead_letters.STATES)
    assert (row.state, row.again) == ("dead_again", 2)


async def test_missing_sequence_numbers_block_no_lane_and_are_reported(
    database: Database, db: Connection[Any]
) -> None:
    _, (letter,) = await a_range(database, db, 14)
    await split_runs(db)
    await db.execute("DELETE FROM delivery_run WHERE seq IN (2, 5, 6, 7, 8, 14)")
    await replays.start_replay(db, "relay", DeadLetterSelection(ids=(letter,)), actor="test")
    await ranges.sequence_all(database, most=4)
    sql = "SELECT array_agg(replay_seq::int ORDER BY seq) FROM delivery WHERE replay_id > 0"
    assert await db.fetchval(sql) == [1, 3, 4, 9, 10, 11, 12, 13]
    assert await db.fetchval(PENDING) is None
    assert "replayed" in await exceptions(database)


@pytest.mark.parametrize(("state", "goes_on"), sampled([("paused", True), ("disabled", False)]))
async def test_replays_of_a_paused_endpoint_are_sequenced_and_those_of_a_disabled_one_end(
    database: Database, db: Connection[Any], state: str, goes_on: bool
) -> None:
    one, (letter,) = await a_range(database, db, 3, name="one")
    other = await add_endpoint(database, "other")
    await publish(database, "a")
    await ranges.sequence_all(database)
    await ranges.dead_letter_pending(db, other.id)
    outcome = await replays.start_replay(db, "relay", ALL, actor="test")
    await db.execute("UPDATE endpoint SET state = $1 WHERE id = $2", state, one)
    await ranges.sequence_all(database)
    # Nothing is queued behind it.
    sql = "SELECT count(*) FROM delivery WHERE replay_id > 0"
    assert await db.fetchval(sql) == (4 if goes_on else 1)
    assert await ids_of_dead(db) == ([] if goes_on else [letter])
    assert outcome.job is not None
    job = await replay_jobs.get_job(db, "relay", outcome.job)
    assert (job.state, job.stopped) == ("done", {} if goes_on else {"disabled": 1})
    if not goes_on:
        await db.execute("UPDATE endpoint SET state = 'active'; UPDATE cursor SET version = 9")
        await replays.start_replay(db, "relay", ALL, actor="test")
        await ranges.sequence_all(database)
        assert await db.fetchval(sql) == 4


async def ids_of_dead(db: Connection[Any]) -> list[int]:
    return [row.id for row in await dead_letters.list_dead_letters(db, "relay")]


@pytest.mark.full
async def test_a_removal_stops_a_range(
    database: Database, db: Connection[Any], unpaced: None
) -> None:
    await a_range(database, db, 10)
    await replays.start_replay(db, "relay", ALL, actor="test")
    worker = await ranges.sequencer(database)
    assert [await worker.sequence_batch() for _ in range(2)] == [
        BatchResult.EMPTY,
        BatchResult.WRITTEN,
    ]
    await endpoint_removal.remove_endpoint(db, "relay", "shop", actor="test", dead_letter=True)
    network = Network()
    async with running(database, network):
        await until(lambda: db.fetchval("SELECT state = 'removed' FROM endpoint"))
    assert network.sent == []
    assert await db.fetchval("SELECT (next_seq, to_seq)::text FROM replay") == "(5,4)"
    shown = await dead_letters.list_dead_letters(db, "relay", states=dead_letters.STATES)
    assert [(r.state, r.sequence, r.to_sequence) for r in shown] == [
        ("dead", 1, 10),
        ("dead", 11, 14),
    ]
    assert await exceptions(database) == {}

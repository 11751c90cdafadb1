"""What follows one another in a lane is one row, and comes back as what it was.

The encoders, the tables and the views are tested together: any sequence of deliveries and attempts
is read as it was written.  A run is written whole or not at all, and an erasure inside it leaves
the others their own responses.
"""

from __future__ import annotations

import asyncio
import pkgutil
import random
from collections import defaultdict
from itertools import product, takewhile
from typing import TYPE_CHECKING, Any

import asyncpg
import orjson
import pytest

from outbox.core.delivery.commands import AttemptRow, Record, Successes
from outbox.core.delivery.event_cache import EventCache
from outbox.core.model.response import AttemptResult
from outbox.core.sequencing.router import Deliveries, Replay
from outbox.operations.events.erase import ErasureTarget, erase_events
from outbox.store.delivery.attempt_runs import (
    RUN_RESPONSE_CHARS_MAX,
    RUN_STARTS_WITHIN_S,
    attempt_runs,
)
from outbox.store.delivery.delivery_reads import LaneRead
from outbox.store.delivery.lanes import LaneStore, LoadedLane
from outbox.store.errors import Fenced
from outbox.store.sequencing.delivery_runs import OFFSET_MAX, RUN_DELIVERIES_MAX, delivery_runs
from outbox.store.sql.message import literal
from outbox.store.sql.row_params import json_text
from outbox_doctor.verify.audit import run_checks
from tests.integration.test_record_messages import Owner, run
from tests.support.relay import Network, add_endpoint, all_ended, fetchval, publish, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major
SESSION = {"server_settings": {"search_path": "relay"}}
SEEDS = [pytest.param(n, marks=[] if n < 3 else pytest.mark.full) for n in range(40)]

READ_ATTEMPTS = """
SELECT lane_id, batch, seq, attempt, outcome, status, error,
       round(extract(epoch FROM started_at) * 1000000)::bigint AS started_us,
       round((elapsed_ms * 1000)::numeric)::bigint AS elapsed_us, response
  FROM attempt ORDER BY lane_id, batch, seq, attempt, started_at
"""
ROWS = "SELECT count(*) FROM attempt_run WHERE lane_id = $1"


@pytest.fixture
async def owner(database: Database) -> Owner:
    return await Owner(database, await database.connect(**SESSION)).start()


# ------------------------------------------------------------------- round trips


def any_response(rng: random.Random) -> dict[str, Any] | None:
    """A stored response: none, the usual one, or one with contents of its own."""
    if rng.random() < 0.3:
        return None
    response: dict[str, Any] = {"version": 1}
    if rng.random() < 0.6:
        names = rng.sample(["x-request-id", "cf-ray", "traceparent"], rng.randrange(1, 3))
        response["headers"] = {name: rng.choice(["a", "b", '"\\{', "é"]) for name in names}
    if rng.random() < 0.6 or len(response) == 1:
        response["body"] = rng.choice(["ok", "", "[1]", "x" * rng.randrange(2000), "\\", '"', "}"])
    return response


def any_attempts(rng: random.Random) -> Iterator[AttemptRow]:
    """The attempts of a lane, in its order."""
    batch, seq, at = rng.randrange(1, 9), rng.randrange(1, 9), 1.7e9 + rng.random()
    usual, errors = any_response(rng), [None, "the body was not read", '"(,{']
    for _ in range(rng.randrange(1, 400)):
        if rng.random() < 0.05:
            seq += rng.randrange(9)
            batch += rng.randrange(2)
        response = usual if rng.random() < 0.8 else any_response(rng)
        at += rng.choice([0.0, 0.001, 0.02, -0.5 * rng.random(), 600.0 * (rng.random() < 0.1)])
        elapsed_s = rng.choice([0.0, 0.004, rng.random()])
        failures = rng.randrange(3) if rng.random() < 0.05 else 0
        for attempt in range(1, failures + 1):
            yield AttemptRow(batch, seq, attempt, "retry", 503, None, at, elapsed_s, response)
        status = rng.choice([200, 200, 200, 204, None])
        error = errors[0] if rng.random() < 0.95 else rng.choice(errors)
        outcome = "refused" if rng.random() < 0.03 else "delivered"
        yield AttemptRow(
            batch,
            seq,
            failures + 1,
            outcome,
            status,
            error,
            at,
            elapsed_s,
            response,  # type: ignore[arg-type]
        )
        seq += 1


def results_of(rows: list[AttemptRow]) -> Successes:
    """Successes of first attempts with one error."""
    results = Successes()
    results.rows = rows
    return results


def is_first_success(row: AttemptRow) -> bool:
    return (row.attempt, row.outcome) == (1, "delivered")


async def attempts_round_trip(owner: Owner, rng: random.Random) -> tuple[list[Any], list[Any]]:
    """What is read of any attempts, and what was written."""
    expected: list[tuple[Any, ...]] = []
    for lane_id in owner.lanes:
        rows = list(any_attempts(rng))
        expected += [(lane_id, *row) for row in rows]
        while rows:
            size = rng.randrange(1, 100)
            some, rows = rows[:size], rows[size:]
            successes = list(takewhile(is_first_success, some))
            if rng.random() < 0.3:
                successes = []
            records = [Record(lane_id, row.seq, row) for row in some[len(successes) :]]
            runs = [(lane_id, results_of(successes))] if successes else []
            await owner.records.write(records, [0] * len(records), runs)
    async with owner.database.at_hand() as db:
        found = [tuple(row) for row in await db.fetch(READ_ATTEMPTS)]
    return [(*row[:9], row[9] and orjson.loads(row[9])) for row in found], sorted(
        ((*row[:7], round(row[7] * 1e6), round(row[8] * 1e6), row[9]) for row in expected),
        key=lambda row: row[:4],
    )


@pytest.mark.parametrize("seed", SEEDS)
async def test_any_attempts_come_back_the_same(owner: Owner, seed: int) -> None:
    found, expected = await attempts_round_trip(owner, random.Random(seed))
    assert found == expected
    await expect_whole_runs(owner.database)


async def deliveries_round_trip(
    database: Database, rng: random.Random
) -> tuple[list[Any], list[Any]]:
    """The same for deliveries: ids that fall, jump or repeat; fed ones first, replays last."""
    deliveries = Deliveries()
    expected, at = [], defaultdict(lambda: rng.randrange(1, 10**12))
    counters: dict[int, int] = defaultdict(lambda: rng.randrange(10))
    numbers = rng.randrange(1500)
    fed = rng.choice([0, rng.randrange(numbers + 1)])
    deliveries.feed_ids = tuple(sorted(rng.choices([3, 4], k=fed)))
    for n in range(numbers):
        feed_id = deliveries.feed_ids[n] if n < fed else None
        # A feed has lanes of its own, in which the events of the batch follow.
        lane_id = rng.randrange(1, rng.choice([2, 6])) if feed_id is None else feed_id
        at[lane_id] += rng.choice([1, 1, 1, 2, 31, OFFSET_MAX, OFFSET_MAX + 1, 10**11, -1, 0])
        counters[lane_id] += 1
        deliveries.lane_ids.append(lane_id)
        deliveries.seqs.append(counters[lane_id])
        deliveries.outbox_ids.append(at[lane_id])
        what = lane_id, 7, counters[lane_id], at[lane_id]
        expected.append((*what, None, None, None, None, feed_id))
    replays = []
    for n in range(rng.randrange(20)):
        lane_id = rng.randrange(1, 6)
        counters[lane_id] += 1
        replay = Replay(lane_id, n, rng.choice([None, n]), n, rng.choice([None, 9]), n % 2 or None)
        replays.append(replay)
        deliveries.lane_ids.append(lane_id)
        deliveries.seqs.append(counters[lane_id])
        deliveries.outbox_ids.append(n)
        again = replay.id, replay.seq, replay.backfill_id, replay.copy_id
        expected.append((lane_id, 7, counters[lane_id], n, *again, None))
    deliveries.repeats = tuple(replays)
    async with database.at_hand() as db:
        await db.execute(
            "INSERT INTO delivery_run (batch, lane_id, seq, outbox_id, offsets, replay_id, "
            "                          replay_seq, backfill_id, copy_id, feed_id) "
            f"SELECT 7, d.* FROM unnest({literal(delivery_runs(deliveries))}"
            "::delivery_run_row[]) AS d"
        )
        found = await db.fetch("SELECT * FROM delivery ORDER BY lane_id, batch, seq")
    return [tuple(row) for row in found], sorted(expected, key=lambda row: row[:3])


@pytest.mark.parametrize("seed", SEEDS)
async def test_any_deliveries_come_back_the_same(database: Database, seed: int) -> None:
    found, expected = await deliveries_round_trip(database, random.Random(seed))
    assert found == expected
    await expect_whole_runs(database)


async def expect_whole_runs(database: Database) -> None:
    async with database.at_hand() as db:
        assert [
            each async for each in run_checks(db) if each.name == "runs" and each.violations
        ] == []


MUTANTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "an offset is that of its neighbour": (
        "outbox.store.sequencing.delivery_runs.composite_numbers",
        lambda original: lambda values: original([*values[1:], *values[:1]]),
    ),
    "an offset does not fit": (
        "outbox.store.sequencing.delivery_runs.OFFSET_MAX",
        lambda original: original + 1,
    ),
    "a response is that of its neighbour": (
        "outbox.store.delivery.attempt_runs._merge",
        lambda original: lambda values: original([*values[1:], *values[:1]]),
    ),
    "responses with other names share a run": (
        "outbox.store.delivery.attempt_runs._names",
        lambda _: lambda response: None,
    ),
    "the attempts of a hole share a run": (
        "outbox.store.delivery.attempt_runs._Run.accept_row",
        lambda original: (
            lambda run, row: original(run, row._replace(seq=run._first.seq + len(run._rows)))
        ),
    ),
    "the attempts of two batches share a run": (
        "outbox.store.delivery.attempt_runs._Run.accept_row",
        lambda original: lambda run, row: original(run, row._replace(batch=run._first.batch)),
    ),
    "attempts with other statuses share a run": (
        "outbox.store.delivery.attempt_runs._Run.accept_row",
        lambda original: lambda run, row: original(run, row._replace(status=run._first.status)),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
async def test_a_mutant_does_not_come_back_the_same(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    place, change = MUTANTS[mutant]
    monkeypatch.setattr(place, change(pkgutil.resolve_name(place)))
    try:
        for seed in range(3):
            for found, expected in (
                await deliveries_round_trip(owner.database, random.Random(seed)),
                await attempts_round_trip(owner, random.Random(seed)),
            ):
                assert found == expected
            await owner.damage("DELETE FROM attempt_run; DELETE FROM delivery_run")
    except (AssertionError, KeyError, asyncpg.PostgresError):
        return
    pytest.fail("nothing shows it")


# ----------------------------------------------------------------------- bounds


def count_runs(rows: list[AttemptRow]) -> int:
    return attempt_runs([(1, results_of(rows))], [])[1]


def row(seq: int, **changes: Any) -> AttemptRow:
    """A success."""
    return AttemptRow(1, seq, 1, "delivered", 200, None, 1.0, 0.1)._replace(**changes)


def test_what_differs_begins_another_run() -> None:
    assert count_runs([row(1), row(2), row(3, response={"body": "x"})]) == 2
    assert count_runs([row(n, response={"body": f"{n}"}) for n in range(9)]) == 1
    assert count_runs([row(n, response={"headers": {f"{n}": "x"}}) for n in range(9)]) == 9
    assert count_runs([row(1), row(2, batch=2)]) == 2
    assert count_runs([row(1), row(2, status=204)]) == 2
    assert count_runs([row(1), row(3)]) == 2
    assert count_runs([row(1), row(2, started_at=0.9)]) == 2
    assert count_runs([row(1), row(2, started_at=1.0 + RUN_STARTS_WITHIN_S)]) == 1
    assert count_runs([row(1), row(2, started_at=1.1 + RUN_STARTS_WITHIN_S)]) == 2
    assert count_runs([row(n) for n in range(RUN_DELIVERIES_MAX)]) == 1
    assert count_runs([row(n) for n in range(RUN_DELIVERIES_MAX + 1)]) == 2
    size = RUN_RESPONSE_CHARS_MAX // 16 - len(json_text({"body": ""}))
    long = [row(n, response={"body": f"{n:>{size}}"}) for n in range(18)]
    assert count_runs(long[:-1]) == 1
    assert count_runs(long) == 2


def test_a_failure_and_a_later_attempt_are_alone() -> None:
    rows = [
        row(1),
        row(2, attempt=1, outcome="retry", status=503),
        row(2, attempt=2),
        row(3),
        row(4),
    ]
    records = [Record(1, each.seq, each) for each in rows]
    assert attempt_runs([], records)[1] == 4


async def test_arrays_of_a_new_partition_are_stored_in_the_row(database: Database) -> None:
    """Compressed or moved out of line, each would be read on its own."""
    async with database.at_hand() as db:
        for parent in ("attempt_run", "delivery_run"):
            await db.execute("SELECT add_partition($1::text::regclass, 3)", parent)
        stored = await db.fetch(
            "SELECT attrelid::regclass::text, attname, attstorage FROM pg_attribute "
            "WHERE attname IN ('offsets', 'starts_us', 'elapses_ms') AND attrelid IN ("
            "      SELECT oid FROM pg_class WHERE relname ~ '_run(_[0-9]+)?$')"
        )
    assert len(stored) == 3 * 5
    assert {each["attstorage"] for each in stored} == {b"p"}


# ----------------------------------------------------------------------- writes


async def test_a_group_is_written_whole_or_not_at_all(owner: Owner) -> None:
    """Its client is gone before the response."""
    lane, *_ = owner.lanes
    async with owner.database.connection(**SESSION) as locking:
        pid = owner.connection.get_server_pid()
        async with locking.transaction():
            await locking.execute("LOCK TABLE attempt_run IN SHARE MODE")
            writing = asyncio.ensure_future(
                owner.records.write([], [], [(lane, run(1, [None] * 40)), (lane, run(41, [None]))])
            )
            waits = "SELECT count(*) = 1 FROM pg_locks WHERE NOT granted AND pid = $1"
            await until(lambda: locking.fetchval(waits, pid), what="the write")
            assert await fetchval(owner.database, "SELECT count(*) FROM attempt") == 0
            owner.connection.terminate()
            await asyncio.gather(writing, return_exceptions=True)
        ended = "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = $1"
        await until(lambda: locking.fetchval(ended, pid), what="the end of its session")
    assert await fetchval(owner.database, "SELECT count(*) FROM attempt") in (0, 41)
    assert await fetchval(owner.database, ROWS, lane) in (0, 1)


async def test_a_group_that_is_written_twice_is_an_error(owner: Owner) -> None:
    lane, *_ = owner.lanes
    group = [(lane, run(1, [None] * 40))]
    await owner.records.write([], [], group)
    with pytest.raises(asyncpg.UniqueViolationError):
        await owner.records.write([], [], group)
    assert await fetchval(owner.database, "SELECT count(*) FROM attempt") == 40


async def test_a_replica_that_is_fenced_writes_no_run(owner: Owner) -> None:
    await owner.damage("DELETE FROM ownership; DELETE FROM replica")
    with pytest.raises(Fenced):
        await owner.records.write([], [], [(owner.lanes[0], run(1, [None] * 40))])
    assert await fetchval(owner.database, "SELECT count(*) FROM attempt") == 0


# ------------------------------------------------------------------------ reads


@pytest.fixture
async def lane(database: Database) -> AsyncIterator[tuple[LaneStore, LoadedLane]]:
    """A lane with one run of ten deliveries, none of them acknowledged."""
    endpoint = await add_endpoint(database, lanes=1)
    async with database.at_hand() as db:
        await db.execute("""
            WITH event AS (INSERT INTO outbox (type, payload)
                           SELECT 'a.b', to_jsonb(n) FROM generate_series(1, 10) n RETURNING id),
                 batch AS (INSERT INTO batch (batch, high, events, deliveries, lanes)
                           SELECT 1, 10, 10, 10, array_agg(id) FROM lane),
                 counted AS (UPDATE lane_counter SET last_seq = 10)
            INSERT INTO delivery_run (lane_id, batch, seq, outbox_id, offsets)
            SELECT (SELECT id FROM lane), 1, 1, 1, '{0,1,2,3,4,5,6,7,8,9}'
        """)
        store = LaneStore(db)
        (loaded,) = await store.lanes([endpoint.id])
        yield store, loaded


@pytest.mark.parametrize("is_cached", [False, True], ids=["together", "events once"])
async def test_a_lane_is_read_from_inside_a_run(
    lane: tuple[LaneStore, LoadedLane], is_cached: bool
) -> None:
    store, loaded = lane
    for after_seq, rows_max in product(range(11), (1, 3, 100)):
        read = LaneRead(loaded, 1, after_seq, rows_max, 10**6)
        found = (await store.deliveries([read], EventCache() if is_cached else None))[loaded.id]
        seqs = list(range(after_seq + 1, min(10, after_seq + rows_max) + 1))
        assert [(each.seq, each.outbox_id) for each in found] == [(n, n) for n in seqs], read


async def test_a_delivery_inside_a_run_is_found_by_its_sequence(
    lane: tuple[LaneStore, LoadedLane],
) -> None:
    store, loaded = lane
    found = [await store.delivery_at(loaded, seq) for seq in range(13)]
    assert [each is not None for each in found] == [0 < seq <= 10 for seq in range(13)]
    assert len({each.delivery for each in found if each is not None}) == 10


# ---------------------------------------------------------------------- erasure


async def test_an_erasure_inside_a_run_leaves_the_others_their_responses(
    database: Database,
) -> None:
    """What the run shares may repeat the event, so it goes for all of it."""
    await add_endpoint(database, lanes=1)

    def echo(sent: Sent) -> AttemptResult:
        headers = (("X-Request-Id", f"of-{sent.body['data']}"), ("CF-Ray", "shared"))
        body = f"got {sent.body['data']}".encode()
        return AttemptResult.completed(200, 0.001, headers=headers, body=body)

    for n in range(8):
        await publish(database, n, key="gone" if n in (2, 5) else "kept")
    async with running(database, Network(echo)):
        await all_ended(database)
    async with database.at_hand() as db:
        assert await db.fetchval("SELECT max(count) FROM attempt_run") > 2
        done = await erase_events(db, "relay", ErasureTarget(key="gone"), actor="test")
        assert done.responses == 2
        again = await erase_events(db, "relay", ErasureTarget(key="gone"), actor="test")
        assert again.responses == 0
        rows = await db.fetch("SELECT seq, response FROM attempt ORDER BY seq")
        runs = await db.fetch("SELECT seq, count FROM attempt_run")
    of_erased = {
        seq
        for each in runs
        for seq in range(each["seq"], each["seq"] + each["count"])
        if any(each["seq"] <= at < each["seq"] + each["count"] for at in (3, 6))
    }
    for each in rows:
        response = orjson.loads(each["response"])
        n = each["seq"] - 1
        if n in (2, 5):
            assert response == {"version": 1}
            continue
        shared = {} if each["seq"] in of_erased else {"cf-ray": "shared"}
        assert response == {
            "version": 1,
            "headers": {"x-request-id": f"of-{n}", **shared},
            "body": f"got {n}",
        }


async def test_runs_are_erased_in_the_order_of_their_keys(database: Database) -> None:
    """The events of two erasures may share runs: each locks them in the same order."""
    await add_endpoint(database, lanes=8)
    network = Network(lambda sent: AttemptResult.completed(200, 0.001, body=b"x"))
    for n in range(60):
        await publish(database, n, key=f"k{n}", tenant=None)
    async with running(database, network):
        await all_ended(database)
    async with database.at_hand() as db:
        await db.execute("""
            CREATE TABLE locked (n bigint GENERATED ALWAYS AS IDENTITY, lane_id bigint, seq bigint);
            CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS
                'BEGIN INSERT INTO locked (lane_id, seq) VALUES (OLD.lane_id, OLD.seq);
                       RETURN NEW; END';
            CREATE TRIGGER see BEFORE UPDATE ON attempt_run FOR EACH ROW EXECUTE FUNCTION see();
            UPDATE outbox SET payload = NULL, erased_at = now()
        """)
        await db.execute("SELECT erase_responses(ARRAY(SELECT id FROM outbox ORDER BY -id), 1000)")
        locked = [
            tuple(row) for row in await db.fetch("SELECT lane_id, seq FROM locked ORDER BY n")
        ]
    assert len({lane_id for lane_id, _ in locked}) == 8
    assert locked == sorted(locked)


async def test_a_lane_of_short_runs_reads_as_much_as_others(database: Database) -> None:
    """However long the runs of the lanes are that it shares its reads with."""
    endpoint = await add_endpoint(database, lanes=2)
    async with database.at_hand() as db:
        await db.execute("""
            WITH event AS (INSERT INTO outbox (type, payload)
                           SELECT 'a.b', '1' FROM generate_series(1, 300) RETURNING id)
            INSERT INTO batch (batch, high) SELECT n, 300 FROM generate_series(1, 300) n;
            INSERT INTO delivery_run (lane_id, batch, seq, outbox_id, offsets)
            SELECT min(id), 1, 1, 1, ARRAY(SELECT generate_series(0, 199)) FROM lane;
            INSERT INTO delivery_run (lane_id, batch, seq, outbox_id)
            SELECT max(id), n, n, n FROM lane, generate_series(1, 200) n GROUP BY n;
            UPDATE lane_counter SET last_seq = 200
        """)
        store, cache = LaneStore(db), EventCache()
        lanes = await store.lanes([endpoint.id])
        for after_seq in (0, 32, 64):
            reads = [LaneRead(each, 1, after_seq, 32, 1 << 20) for each in lanes]
            found = await store.deliveries(reads, cache)
            assert {len(rows) for rows in found.values()} == {32}

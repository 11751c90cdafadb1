"""Replays race with operators and erasures: the leader plans them without a lock, and writes them
in messages that do nothing if something has changed meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.operations.criteria import Criteria, DeadLetterSelection
from outbox.operations.dead_letters import discard
from outbox.operations.dead_letters import replay as replays
from outbox.operations.replays import backfill
from outbox.operations.replays import jobs as replay_jobs
from tests.integration.test_backfill import LONG_AGO
from tests.support import ranges
from tests.support.relay import (
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from asyncpg import Connection

    from outbox.relay.sequencing.sequencer import Sequencer
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

ALL = DeadLetterSelection(everything=True)
REPLAYED = """
SELECT array_agg(r.dead_id ORDER BY d.lane_id, d.seq)
  FROM delivery d JOIN replay r ON r.id = d.replay_id
"""
ALL_READ = "SELECT (SELECT max(high) FROM batch) = (SELECT max(id) FROM outbox)"


@pytest.fixture
async def db(database: Database) -> AsyncIterator[Connection[Any]]:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        yield connection


@pytest.fixture(autouse=True)
def unpaced() -> Iterator[None]:
    """Chunks of four, one in each batch."""
    with ranges.unpaced(4):
        yield


async def dead_lettered(database: Database, letters: int) -> None:
    """An endpoint whose first deliveries were dead-lettered."""
    await add_endpoint(database)
    async with running(database, Network(lambda _: REFUSED)):
        await publish(database, *range(letters))
        await all_ended(database)


def before(store: Any, method: str, action: Callable[[], Awaitable[object]]) -> None:
    """Run an action once, right before the next call of a method."""
    call = getattr(store, method)

    async def patched(*arguments: Any, **options: Any) -> Any:
        setattr(store, method, call)
        await action()
        return await call(*arguments, **options)

    setattr(store, method, patched)


async def end_jobs(worker: Sequencer) -> None:
    """Sequence until no job is left."""
    for _ in range(100):
        await ranges.turn(worker)
        if worker.cursor.leads and worker.cursor.due_at is None:
            return
    raise AssertionError("the jobs do not end")


async def leading(database: Database) -> tuple[Sequencer, Any]:
    """A sequencer that leads, and its store."""
    worker = await ranges.sequencer(database)
    await ranges.turn(worker)
    return worker, worker.cursor._store


async def state_of(db: Connection[Any], job: int | None) -> tuple[str, int]:
    assert job is not None
    found = await replay_jobs.get_job(db, "relay", job)
    return found.state, found.taken


async def test_a_dead_letter_that_is_discarded_before_its_claim_is_not_replayed(
    database: Database, db: Connection[Any]
) -> None:
    await dead_lettered(database, 6)
    worker, store = await leading(database)
    job = (await replays.start_replay(db, "relay", ALL, actor="test")).job
    async with database.connection(server_settings={"search_path": "relay"}) as other:
        # By a filter, which takes no lock on the cursor row.
        selection = DeadLetterSelection(criteria=Criteria(until=await _at(db, 3)))
        before(
            store.replay_feed,
            "claim_dead_letters",
            lambda: discard.discard_dead_letters(other, "relay", selection, actor="test"),
        )
        await end_jobs(worker)
    assert await fetchval(database, REPLAYED) == [3, 4, 5, 6]
    assert await state_of(db, job) == ("done", 4)
    discarded = "SELECT array_agg(id ORDER BY id) FROM dead_letter WHERE state = 'discarded'"
    assert await fetchval(database, discarded) == [1, 2]
    assert await exceptions(database) == {}


async def _at(db: Connection[Any], dead_id: int) -> Any:
    return await db.fetchval("SELECT at FROM dead_letter WHERE id = $1", dead_id)


@pytest.mark.full
async def test_a_job_aborted_while_its_batch_is_planned_replays_nothing_more(
    database: Database, db: Connection[Any]
) -> None:
    await dead_lettered(database, 6)
    worker, store = await leading(database)
    job = (await replays.start_replay(db, "relay", ALL, actor="test")).job
    assert job is not None
    async with database.connection(server_settings={"search_path": "relay"}) as other:
        before(store, "write", lambda: replay_jobs.abort_job(other, "relay", job, actor="test"))
        await end_jobs(worker)
    assert await fetchval(database, REPLAYED) is None
    assert await state_of(db, job) == ("aborted", 0)
    assert await fetchval(database, "SELECT count(*) FROM dead_letter WHERE state = 'dead'") == 6
    assert await fetchval(database, "SELECT count(*) FROM replay") == 0
    assert await exceptions(database) == {}


@pytest.mark.full
@pytest.mark.parametrize("kind", sampled(["dead", "history"]))
async def test_replays_of_a_rejected_batch_are_planned_again(
    database: Database, db: Connection[Any], kind: str
) -> None:
    await dead_lettered(database, 6)
    worker, store = await leading(database)
    job: int | None
    if kind == "dead":
        job = (await replays.start_replay(db, "relay", ALL, actor="test")).job
    else:
        past = Criteria("shop", since=LONG_AGO)
        job = await backfill.request_backfill(db, "relay", past, actor="test")
    before(store, "write", lambda: db.execute("UPDATE cursor SET version = version + 1"))
    await end_jobs(worker)
    assert await state_of(db, job) == ("done", 6)
    assert await fetchval(database, "SELECT count(*) FROM delivery WHERE lane_id = 1") == 12
    assert await exceptions(database) == {}


async def test_a_claim_in_doubt_is_continued_by_the_next_leader(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, on_dead_letter="block")
    async with running(database, Network(lambda _: REFUSED)):
        await publish(database, *range(6))
        blocked = "SELECT EXISTS (SELECT FROM lane_block)"
        await until(lambda: fetchval(database, blocked))
    worker, store = await leading(database)
    job = (await replays.start_replay(db, "relay", ALL, actor="test")).job

    async def lost() -> None:
        raise ConnectionResetError

    before(store.routing, "replays", lost)
    with pytest.raises(ConnectionResetError):
        await end_jobs(worker)
    # The claim was committed before its batch was planned, and has unblocked the lane.
    assert await fetchval(database, "SELECT count(*) FROM lane_block") == 0
    assert await fetchval(database, REPLAYED) is None
    await end_jobs(await ranges.sequencer(database))
    assert await fetchval(database, REPLAYED) == [1]
    assert await state_of(db, job) == ("done", 1)


@pytest.mark.full
async def test_a_locked_dead_letter_delays_its_replay_and_no_events(
    database: Database, db: Connection[Any]
) -> None:
    await dead_lettered(database, 6)
    worker, _ = await leading(database)
    job = (await replays.start_replay(db, "relay", ALL, actor="test")).job
    async with database.connection(server_settings={"search_path": "relay"}) as other:
        transaction = other.transaction()
        await transaction.start()
        # As an erasure locks it.
        await other.execute("SELECT FROM dead_letter WHERE id = 2 FOR NO KEY UPDATE")
        await publish(database, "live")
        for _ in range(5):
            await ranges.turn(worker)
        assert await fetchval(database, ALL_READ)
        assert await state_of(db, job) == ("running", 0)
        await transaction.rollback()
    await end_jobs(worker)
    assert await state_of(db, job) == ("done", 6)
    assert await exceptions(database) == {}

"""Backfill: an endpoint gets its history in order, each event once, beside live deliveries."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.ids import delivery_id
from outbox.core.sequencing import replay_throttle
from outbox.errors import NotFound, UsageError
from outbox.operations.criteria import Criteria, DeadLetterSelection
from outbox.operations.dead_letters import queries as dead_letters
from outbox.operations.dead_letters import replay as replays
from outbox.operations.endpoints import removal as endpoint_removal
from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.events import queries as events
from outbox.operations.replays import backfill
from outbox.operations.replays import jobs as replay_jobs
from outbox.relay.sequencing.cursor import BatchResult
from outbox_doctor.trace import queries as trace
from tests.support import ranges
from tests.support.relay import (
    OK,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    publish,
    running,
)
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncpg import Connection

    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
BACKFILLED = (
    "SELECT array_agg(outbox_id::int ORDER BY lane_id, seq) FROM delivery WHERE backfill_id = $1"
)
PASSED = "SELECT (SELECT max(high) FROM batch) = (SELECT max(id) FROM outbox)"


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(server_settings={"search_path": "relay"})


@pytest.fixture
def unpaced() -> Iterator[None]:
    """Chunks of four, one in each batch."""
    with ranges.unpaced(4):
        yield


async def request_backfill(db: Connection[Any], endpoint: str = "shop", **options: Any) -> int:
    return await backfill.request_backfill(
        db, "relay", Criteria(endpoint, **({"since": LONG_AGO} | options)), actor="ann@desk"
    )


def backfilled(sent: list[Sent]) -> list[Any]:
    return [s.body["data"] for s in sent if "backfill" in s.body]


async def test_a_backfill_sends_events_before_the_endpoint_and_events_already_delivered(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, "old")
    network = Network()
    async with running(database, network):
        await publish(database, *range(5), key="k")
        await all_ended(database)
        added = await add_endpoint(database, "shop", url="http://shop.test/")
        request = Criteria("shop", since=LONG_AGO)
        assert (await backfill.plan_backfill(db, "relay", request)).deliveries == 5
        assert await db.fetchval("SELECT count(*) FROM replay_job") == 0
        job = await request_backfill(db)
        await publish(database, "live", key="k")
        await all_ended(database)
        again = await request_backfill(db, "old")
        await all_ended(database)
    at_shop = [s for s in network.accepted if s.lane.startswith(added.id.hex[:12])]
    assert backfilled(at_shop) == list(range(5))
    assert [s.body["data"] for s in at_shop if "backfill" not in s.body] == ["live"]
    assert {s.body["backfill"] for s in at_shop if "backfill" in s.body} == {job}
    at_old = [s for s in network.accepted if s not in at_shop]
    assert [s.body["data"] for s in at_old] == [*range(5), "live", *range(5), "live"]
    # A receiver must not treat a repeated delivery as a copy.
    assert len({s.delivery for s in network.accepted}) == len(network.accepted)
    for sent in network.accepted:
        assert "replay_of" not in sent.body
    for job_id in (job, again):
        done = await replay_jobs.get_job(db, "relay", job_id)
        assert (done.state, done.stopped, done.share) == ("done", {}, 1.0)
    event_trace = await trace.read_trace(db, "relay", 1)
    assert [(d.endpoint, d.backfill) for d in event_trace.deliveries] == [
        ("old", None), ("old", again), ("shop", job),
    ]  # fmt: skip
    for delivery in event_trace.deliveries:
        found = await events.find_events(db, "relay", str(delivery.delivery_id))
        assert (found.by, found.outbox_ids) == ("X-Delivery", (1,))
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_backfill_selects_events(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database, types=("a.*",), filter="@.n > 1")
    for n in range(6):
        await publish(database, {"n": n}, type="a.b" if n % 2 else "a.c")
    await publish(database, {"n": 9}, type="b.c")
    await db.execute(
        "UPDATE outbox SET created_at = '2026-01-01Z'::timestamptz + id * interval '1 h'"
    )
    await ranges.sequence_all(database)
    first = datetime(2026, 1, 1, tzinfo=UTC)
    for options, expected in (
        ({}, [3, 4, 5, 6]),
        ({"types": ("a.b",)}, [4, 6]),
        ({"types": ("b.*",)}, None),
        ({"since": first + timedelta(hours=4)}, [4, 5, 6]),
        ({"until": first + timedelta(hours=5)}, [3, 4]),
        ({"since": first + timedelta(days=9)}, None),
    ):
        request: dict[str, Any] = {"since": LONG_AGO, **options}
        planned = await backfill.plan_backfill(db, "relay", Criteria("shop", **request))
        job = await request_backfill(db, **request)
        await ranges.sequence_all(database)
        assert await db.fetchval(BACKFILLED, job) == expected, options
        assert planned.deliveries == len(expected or ())
        assert (await replay_jobs.get_job(db, "relay", job)).state == "done"
    assert await exceptions(database) == {}


async def test_an_event_committed_late_in_a_gap_is_delivered_live_only(
    database: Database, db: Connection[Any], unpaced: None
) -> None:
    await add_endpoint(database)
    late = await database.connect(server_settings={"search_path": "relay"})
    insert = "INSERT INTO outbox (type, payload) VALUES ('a.b', '{}')"
    await publish(database, 1)
    transaction = late.transaction()
    await transaction.start()
    await late.execute(insert)
    await publish(database, 3, 4)
    worker = await ranges.sequencer(database)
    assert await worker.sequence_batch() is BatchResult.WRITTEN
    job = await request_backfill(db)
    await transaction.commit()
    await ranges.sequence_all(database)
    assert await db.fetchval(BACKFILLED, job) == [1, 3, 4]
    live = "SELECT array_agg(outbox_id::int ORDER BY seq) FROM delivery WHERE backfill_id IS NULL"
    assert await db.fetchval(live) == [1, 3, 4, 2]
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_new_leader_continues_a_backfill(
    database: Database, db: Connection[Any], unpaced: None
) -> None:
    await add_endpoint(database, lanes=2)
    await publish(database, *range(20), key=None)
    first, second = [await ranges.sequencer(database) for _ in range(2)]
    await ranges.turn(first)
    job = await request_backfill(db)
    for n in range(20):
        await ranges.turn((first, second)[n // 2 % 2])
    assert sorted(await db.fetchval(BACKFILLED, job)) == list(range(1, 21))
    assert (await replay_jobs.get_job(db, "relay", job)).state == "done"
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_an_aborted_backfill_adds_no_more_deliveries(
    database: Database, db: Connection[Any], unpaced: None
) -> None:
    await add_endpoint(database)
    await publish(database, *range(20))
    worker = await ranges.sequencer(database)
    await worker.sequence_batch()
    job = await request_backfill(db)
    for _ in range(3):
        await ranges.turn(worker)
    aborted = await replay_jobs.abort_job(db, "relay", job, actor="bob@desk")
    assert 0 < aborted.taken < 20
    for _ in range(5):
        await ranges.turn(worker)
    assert len(await db.fetchval(BACKFILLED, job)) == aborted.taken
    shown = await replay_jobs.get_job(db, "relay", job)
    assert (shown.state, shown.open) == ("aborted", 0)
    with pytest.raises(UsageError, match=f"job {job} was aborted already; see: outbox replay show"):
        await replay_jobs.abort_job(db, "relay", job, actor="test")
    with pytest.raises(NotFound, match="there is no replay job 99; see: outbox replay list"):
        await replay_jobs.abort_job(db, "relay", 99, actor="test")
    actors = await db.fetch(
        "SELECT kind, actor FROM journal WHERE kind LIKE '%fill%' OR kind LIKE 'replay%'"
    )
    assert [tuple(r) for r in actors][:2] == [
        ("backfill_requested", "ann@desk"),
        ("replay_aborted", "bob@desk"),
    ]
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_an_aborted_replay_leaves_dead_letters_as_they_were(
    database: Database, db: Connection[Any], unpaced: None
) -> None:
    await add_endpoint(database)
    await publish(database, *range(10))
    await ranges.sequence_all(database)
    await ranges.dead_letter_pending(db)
    outcome = await replays.start_replay(
        db, "relay", DeadLetterSelection(everything=True), actor="test"
    )
    worker = await ranges.sequencer(database)
    assert [await worker.sequence_batch() for _ in range(2)] == [
        BatchResult.EMPTY,
        BatchResult.WRITTEN,
    ]
    assert outcome.job is not None
    assert (await replay_jobs.abort_job(db, "relay", outcome.job, actor="test")).taken == 4
    (row,) = await dead_letters.list_dead_letters(db, "relay")
    assert (row.state, row.sequence, row.to_sequence) == ("dead", 1, 10)
    await ranges.sequence_all(database)
    assert await db.fetchval("SELECT count(*) FROM delivery WHERE replay_id IS NOT NULL") == 4
    assert await exceptions(database) == {}


@pytest.mark.parametrize("state", sampled(["disabled", "removed", "unsubscribed"]))
async def test_a_backfill_ends_with_its_endpoint(
    database: Database, db: Connection[Any], unpaced: None, state: str
) -> None:
    made = await add_endpoint(database)
    await publish(database, *range(20))
    worker = await ranges.sequencer(database)
    await worker.sequence_batch()
    job = await request_backfill(db)
    await ranges.turn(worker)
    await ranges.turn(worker)
    if state == "disabled":
        await db.execute("UPDATE endpoint SET state = 'disabled' WHERE id = $1", made.id)
        await db.execute("UPDATE cursor SET version = version + 1")
    elif state == "removed":
        await endpoint_removal.remove_endpoint(db, "relay", "shop", actor="test", dead_letter=True)
    else:
        await endpoint_removal.drain_endpoint(db, "relay", "shop", actor="test")
    for _ in range(4):
        await ranges.turn(worker)
    shown = await replay_jobs.get_job(db, "relay", job)
    assert (shown.state, shown.stopped) == ("done", {state: 1})
    assert 0 < shown.taken < 20
    with pytest.raises((UsageError, NotFound)):
        await request_backfill(db)


@pytest.mark.full
async def test_a_backfill_continues_after_a_lane_change(
    database: Database, db: Connection[Any], unpaced: None
) -> None:
    made = await add_endpoint(database, lanes=1)
    for n in range(12):
        await publish(database, n, key=f"k{n % 3}")
    worker = await ranges.sequencer(database)
    await worker.sequence_batch()
    job = await request_backfill(db)
    for _ in range(2):
        await ranges.turn(worker)
    await ranges.change_lanes(db, made.id, 3)
    await ranges.sequence_all(database)
    sql = """SELECT array_agg(d.outbox_id::int ORDER BY d.seq) AS ids FROM delivery d
               JOIN lane l ON l.id = d.lane_id WHERE d.backfill_id = $1
              GROUP BY l.generation, l.slot ORDER BY l.generation, l.slot"""
    lanes = [row["ids"] for row in await db.fetch(sql, job)]
    assert len(lanes) > 2
    assert all(ids == sorted(ids) for ids in lanes)
    assert sorted(i for ids in lanes for i in ids) == list(range(1, 13))
    network = Network()
    async with running(database, network):
        await all_ended(database)
    assert sorted(backfilled(network.accepted)) == list(range(12))
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_replayed_backfill_dead_letter_keeps_its_x_delivery(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    network = Network(lambda sent: REFUSED if "backfill" in sent.body else OK)
    async with running(database, network):
        await publish(database, "a")
        await all_ended(database)
        job = await request_backfill(db)
        await all_ended(database)
        network.script = lambda _: OK
        await replays.start_replay(db, "relay", DeadLetterSelection(everything=True), actor="test")
        await all_ended(database)
    first, refused, again = network.sent
    event_id = await db.fetchval("SELECT event_id FROM outbox")
    assert first.delivery == str(delivery_id(made.id, 1, event_id))
    assert refused.delivery == again.delivery == str(delivery_id(made.id, 1, event_id, job))
    assert again.body["replay_of"]["sequence"] == refused.seq
    assert again.body["backfill"] == job
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_backfill_has_a_bounded_number_of_pending_deliveries(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused endpoint delivers nothing, so the first chunk is the last."""
    await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, *range(200))
        await all_ended(database)
        await endpoint_states.pause_endpoints(db, "relay", ["shop"], actor="test")
        job = await request_backfill(db)
        taken = "SELECT taken FROM replay_job_endpoint WHERE job_id = $1"
        await until(lambda: db.fetchval(taken, job))
        # Ten live events are sequenced after it, so any due chunk would be taken by then.
        for n in range(10):
            await publish(database, f"live {n}")
            await until(lambda: db.fetchval(PASSED))
        assert 0 < await db.fetchval(taken, job) <= replay_throttle.PER_LANE_MAX
        # The rest is delivered faster than beside live events in production.
        monkeypatch.setattr(replay_throttle, "LIVE_MS", 1e9)
        monkeypatch.setattr(replay_throttle, "LIVE_BATCH_MAX", 50)
        await endpoint_states.resume_endpoints(db, "relay", ["shop"], actor="test")
        await all_ended(database, timeout_s=60)
    assert backfilled(network.accepted) == list(range(200))
    assert await exceptions(database) == {}

"""Retention: delivered periods are dropped as a whole, pending ones are kept, producers are not
blocked.

The periods have no length and nothing is retained, so each `tend` does at once what takes a month
in production: it begins new periods, settles old ones and drops those that it may.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING

import asyncpg
import pytest

from outbox.core.sequencing.gaps import CursorChange
from outbox.core.sequencing.partition_window import WIDTH, Retention
from outbox.core.sequencing.router import Deliveries
from outbox.errors import UsageError
from outbox.operations.criteria import Criteria, DeadLetterSelection
from outbox.operations.dead_letters import replay as replays
from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.replays import backfill
from outbox.operations.replays import jobs as replay_jobs
from outbox.relay import maintenance
from outbox.relay.cluster import connections
from outbox.relay.delivery import recorder
from outbox.store.cluster import timeline
from outbox.store.replays.replay_progress import ReplayBatch
from outbox.store.retention import periods as retention
from outbox.store.retention.partitions import PARENTS
from outbox.store.retention.periods import RetentionStore
from outbox.store.sequencing.batches import SequencingStore
from outbox_doctor.trace import queries as trace
from tests.support import doctor, ranges
from tests.support.observed import observe
from tests.support.relay import (
    REFUSED,
    Network,
    add_endpoint,
    exceptions,
    fetchval,
    publish,
    relay,
    running,
)
from tests.support.retention import NOTHING, ROUNDS, Maintainer, checkpointed
from tests.support.waiting import until

if TYPE_CHECKING:
    import random

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

SESSION = {"server_settings": {"search_path": "relay"}}
INSERT = "INSERT INTO outbox (type, payload) VALUES ('a.b', '{}')"


@pytest.fixture
async def keeper(database: Database) -> Maintainer:
    return Maintainer(await database.connect(**SESSION))


@pytest.fixture(autouse=True)
def checkpoint_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests wait for checkpoints more than once."""
    monkeypatch.setattr(recorder, "CHECKPOINT_EVERY_S", 0.05)


async def test_delivered_periods_are_dropped_and_new_events_are_delivered(
    database: Database, keeper: Maintainer
) -> None:
    await add_endpoint(database, lanes=2)
    network = Network()
    async with running(database, network):
        for n in range(3):
            await publish(database, *range(n * 20, n * 20 + 20), key=f"k{n % 3}")
            await checkpointed(database)
            await keeper.maintain_until_idle()
            assert await exceptions(database) == {}
        await publish(database, "last")
        await checkpointed(database)
    assert sorted(map(str, network.data())) == sorted(map(str, [*range(60), "last"]))
    for lane in {sent.lane for sent in network.accepted}:
        numbers = [sent.seq for sent in network.accepted if sent.lane == lane]
        assert numbers == list(range(1, len(numbers) + 1))
    for kind, parents in PARENTS.items():
        assert await keeper.first(kind) > 0
        for parent in parents:
            there = await keeper.tables(parent)
            assert there[0] * WIDTH == await keeper.first(kind)
            assert len(there) <= 5
    assert await fetchval(database, "SELECT count(*) < 30 FROM outbox")
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_periods_of_an_idle_outbox_are_dropped(
    database: Database, keeper: Maintainer
) -> None:
    await add_endpoint(database)
    async with running(database, Network()):
        await publish(database, 1, 2, 3)
        await checkpointed(database)
        await keeper.maintain_until_idle()
    assert await fetchval(database, "SELECT count(*) FROM outbox") == 0
    assert await fetchval(database, "SELECT count(*) FROM attempt") == 0
    # The state is stable: no period begins without new events.
    before = await fetchval(database, "SELECT count(*) FROM period")
    await keeper.maintain_until_idle()
    assert await fetchval(database, "SELECT count(*) FROM period") == before


# The rule without one of its parts: an event is lost together with its period.
GAPS = (
    "AND NOT EXISTS (SELECT FROM gap WHERE lo < end_id AND hi >= first_id)",
    "AND NOT b.young && int8range(first_id, end_id)",
)
CARELESS = {
    None: lambda sql: sql,
    "open gaps": lambda sql: sql.replace(GAPS[0], "").replace(GAPS[1], ""),
    "who may still insert": lambda sql: sql.replace("no_writers AND", "no_writers IS NOT NULL AND"),
}
SETTLES = "SELECT pg_get_functiondef('settle_period'::regproc)"


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize(
    "careless",
    [pytest.param(each, marks=pytest.mark.one_major if each else ()) for each in CARELESS],
)
async def test_an_event_that_commits_late_keeps_its_period(
    database: Database,
    keeper: Maintainer,
    careless: str | None,
    behind: int,
) -> None:
    settles = await keeper.db.fetchval(SETTLES)
    changed = CARELESS[careless](settles)
    assert (changed == settles) == (careless is None)
    await keeper.db.execute(changed)
    await add_endpoint(database)
    network = Network()
    late = await database.connect(**SESSION)
    async with running(database, network):
        await publish(database, "before")
        await late.execute("BEGIN; INSERT INTO outbox (type, payload) VALUES ('a.b', '\"late\"')")
        await checkpointed(database)
        # The gap exists, so a cautious maintainer begins no other period.
        await keeper.db.write(retention.END_PERIOD, "events", 0)
        # Only a later event makes the id a gap.
        await publish(database, *["behind"] * behind)
        await checkpointed(database)
        for _ in range(3):
            await keeper.maintain()
        lost = careless is not None and (careless == "open gaps") == bool(behind)
        assert (await keeper.first("events") > 0) == lost
        await late.execute("COMMIT")
        if not lost:
            await until(lambda: "late" in network.data(), what="the late event")
            await checkpointed(database)
            await until(keeper.has_dropped, what="the period to go")
            assert await exceptions(database) == {}


async def test_pending_deliveries_of_a_paused_endpoint_are_kept(
    database: Database, keeper: Maintainer
) -> None:
    await add_endpoint(database, name="paused")
    await add_endpoint(database, name="quick")
    network = Network()
    async with running(database, network, lease_s=30.0):
        await endpoint_states.pause_endpoints(keeper.db, "relay", ["paused"], actor="test")
        await publish(database, *range(10))
        await until(lambda: len(network.accepted) == 10, what="the quick one")
        await publish(database, *range(10, 20))
        await until(lambda: len(network.accepted) == 20, what="the quick one")
        await keeper.maintain_until_idle()
        assert [await keeper.first(kind) for kind in ("events", "log")] == [0, 0]
        await endpoint_states.resume_endpoints(keeper.db, "relay", ["paused"], actor="test")
        await checkpointed(database)
        await keeper.maintain_until_idle()
        assert all([await keeper.first(kind) > 0 for kind in ("events", "log")])
    assert [s.body["data"] for s in network.accepted if s.url.endswith("paused")] == list(range(20))
    assert await exceptions(database) == {}


@pytest.mark.full
@pytest.mark.one_major
async def test_the_doctor_names_the_cause_of_old_periods(
    database: Database, keeper: Maintainer
) -> None:
    async def old_data_messages() -> list[str]:
        return [found.message for found in await doctor.reported_findings(keeper.db, "retention")]

    await add_endpoint(database, name="paused")
    async with running(database, Network()):
        await endpoint_states.pause_endpoints(keeper.db, "relay", ["paused"], actor="test")
        await publish(database, *range(3))
        await until(lambda: fetchval(database, "SELECT high = 3 FROM batch WHERE high > 2"))
        for _ in range(3):
            await keeper.maintain()
        assert await old_data_messages() == []
        await keeper.db.execute(
            "UPDATE period SET ended_at = now() - interval '40 days' WHERE ended_at < now()"
        )
        events, log = await old_data_messages()
        assert events.startswith("events from ")
        assert events.endswith(
            'were due to be dropped 10d ago, in 1 period: they have pending deliveries to "paused"'
        )
        assert log.endswith('they have pending deliveries to "paused"')
        await endpoint_states.resume_endpoints(keeper.db, "relay", ["paused"], actor="test")
        await checkpointed(database)

        async def reasons() -> list[str]:
            return [message.rpartition(": ")[2] for message in await old_data_messages()]

        unobserved = "no relay has run for a day since they ended, or since the last restore"
        assert await reasons() == 2 * [unobserved]
        await observe(database, 2 * 86400)
        assert await reasons() == 2 * ["no relay has dropped them"]
        await keeper.maintain_until_idle()
        assert await old_data_messages() == []


@pytest.mark.one_major
async def test_a_range_keeps_its_events_until_its_replay(
    database: Database, keeper: Maintainer
) -> None:
    keeper.retention = RetentionStore(keeper.db, Retention(0, 0, 3600), period_s=0)
    await add_endpoint(database, lanes=1)
    await publish(database, *range(10))
    await ranges.sequence_all(database)
    await ranges.dead_letter_pending(keeper.db)
    await publish(database, "after")
    network = Network()
    async with running(database, network):
        await checkpointed(database)
        await keeper.maintain_until_idle()
        assert [await keeper.first(kind) for kind in ("events", "log")] == [0, 0]
        await replays.start_replay(
            keeper.db, "relay", DeadLetterSelection(everything=True), actor="test"
        )
        await until(lambda: len(network.accepted) == 11, what="the replay")
        await checkpointed(database)
        await keeper.maintain_until_idle()
    assert network.data() == ["after", *range(10)]
    assert all([await keeper.first(kind) > 0 for kind in ("events", "log")])
    assert await exceptions(database) == {}


@pytest.mark.full
@pytest.mark.one_major
async def test_an_unused_range_is_dropped_with_its_log(
    database: Database, keeper: Maintainer
) -> None:
    await add_endpoint(database, lanes=1)
    await publish(database, *range(10))
    await ranges.sequence_all(database)
    await ranges.dead_letter_pending(keeper.db)
    await publish(database, "after")
    async with running(database, Network()):
        await checkpointed(database)
        await keeper.maintain_until_idle()
    assert all([await keeper.first(kind) > 0 for kind in ("events", "log")])
    # Its sequence numbers are deleted, so the range can no longer be replayed.
    with pytest.raises(UsageError, match="was discarded"):
        await replays.start_replay(keeper.db, "relay", DeadLetterSelection(ids=(1,)), actor="test")
    assert await keeper.retention.delete_expired() == 1
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_dead_letters_outlive_their_events_and_can_be_replayed(
    database: Database, keeper: Maintainer
) -> None:
    keeper.retention = RetentionStore(keeper.db, Retention(0, 0, 3600), period_s=0)
    await add_endpoint(database)
    network = Network(lambda _: REFUSED)
    async with running(database, network):
        await publish(database, "refused")
        await checkpointed(database)
        await keeper.maintain_until_idle()
        assert await keeper.first("events") > 0
        assert await keeper.retention.delete_expired() == 0
        network.script = Network().script
        await replays.start_replay(
            keeper.db, "relay", DeadLetterSelection(everything=True), actor="test"
        )
        await until(lambda: network.data() == ["refused"], what="the replay")
        await checkpointed(database)
        # Its payload copy is kept as long as the log of the new delivery.
        keeper.retention = RetentionStore(keeper.db, NOTHING, period_s=0)
        assert await keeper.retention.delete_expired() == 0
        await keeper.maintain_until_idle()
        assert await keeper.retention.delete_expired() == 1
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_a_payload_copy_is_kept_for_a_replay_dead_lettered_in_a_range(
    database: Database, keeper: Maintainer
) -> None:
    kept = RetentionStore(keeper.db, Retention(0, 0, 3600), period_s=0)
    keeper.retention = kept
    await add_endpoint(database, lanes=4)
    network = Network(lambda _: REFUSED)
    async with running(database, network):
        await publish(database, "refused", key="key")
        await checkpointed(database)
        lane_id = await fetchval(database, "SELECT lane_id FROM delivery")
        by_id = "SELECT l.id FROM lane l, outbox o WHERE l.slot = o.id % 4"
        assert lane_id != await fetchval(database, by_id)
        await keeper.maintain_until_idle()
        assert await fetchval(database, "SELECT count(*) FROM outbox") == 0
    everything = DeadLetterSelection(everything=True)
    # Twice: a range of replays, and a range of replays of those.
    for _ in range(2):
        await replays.start_replay(keeper.db, "relay", everything, actor="test")
        await keeper.db.execute(
            "UPDATE lane_progress SET floor_batch = (SELECT max(batch) FROM batch)"
        )
        await ranges.sequence_all(database)
        assert len(await ranges.dead_letter_pending(keeper.db)) == 1
        await keeper.maintain_until_idle()
        assert await RetentionStore(keeper.db, NOTHING).delete_expired() == 0
    network.script = Network().script
    async with running(database, network):
        await replays.start_replay(keeper.db, "relay", everything, actor="test")
        await until(lambda: network.data() == ["refused"], what="the replay")
        await checkpointed(database)
    # All of them in the lane of its key.
    lanes = "SELECT array_agg(DISTINCT lane_id) FROM delivery"
    assert await fetchval(database, lanes) == [lane_id]
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_events_are_kept_for_the_rest_of_a_running_range_replay(
    database: Database, keeper: Maintainer
) -> None:
    keeper.retention = RetentionStore(keeper.db, Retention(0, None, 3600), period_s=0)
    await add_endpoint(database, lanes=1)
    network = Network()
    await publish(database, *range(6))
    await ranges.sequence_all(database)
    await ranges.dead_letter_pending(keeper.db)
    for _ in range(2):
        await keeper.maintain()
    settled = "SELECT last_batch FROM period WHERE kind = 'events' AND number = 0"
    last_batch = await fetchval(database, settled)
    # Dead-lettered again, in batches that do not reveal the age of the events.
    await keeper.db.execute("UPDATE lane_progress SET floor_batch = $1::bigint + 1", last_batch)
    await replays.start_replay(
        keeper.db, "relay", DeadLetterSelection(everything=True), actor="test"
    )
    await ranges.sequence_all(database)
    await ranges.dead_letter_pending(keeper.db)
    await replays.start_replay(
        keeper.db, "relay", DeadLetterSelection(everything=True), actor="test"
    )
    with ranges.unpaced(2):
        worker = await ranges.sequencer(database)
        left = "SELECT to_seq - next_seq + 1 FROM replay ORDER BY id DESC LIMIT 1"
        while await fetchval(database, left) != 4:
            await ranges.turn(worker)
    # These two are done, and their events are newer than those of the rest.
    await keeper.db.execute("UPDATE lane_progress SET acked_seq = 14")
    await keeper.maintain_until_idle()
    assert await keeper.first("events") == 0
    async with running(database, network):
        await until(lambda: network.data() == [2, 3, 4, 5], what="the rest")
        ended = "SELECT bool_and(ended_at IS NOT NULL) FROM replay_job_endpoint"
        await until(lambda: fetchval(database, ended), what="the job's end")
    await keeper.maintain_until_idle()
    assert await keeper.first("events") > 0


@pytest.mark.full
@pytest.mark.one_major
async def test_an_attempt_log_may_be_dropped_before_its_events(
    database: Database, keeper: Maintainer
) -> None:
    keeper.retention = RetentionStore(keeper.db, Retention(None, 0, 0), period_s=0)
    await add_endpoint(database)
    late = await database.connect(**SESSION)
    network = Network()
    async with running(database, network):
        await publish(database, 1)
        await late.execute("BEGIN; INSERT INTO outbox (type, payload) VALUES ('a.b', '2')")
        await publish(database, 3)
        await checkpointed(database)
        await keeper.maintain_until_idle()
        assert await keeper.first("log") > 0
        await late.execute("COMMIT")
        await publish(database, 4)
        await until(lambda: len(network.accepted) == 4, what="all of them")
        await checkpointed(database)
    assert sorted(network.data()) == [1, 2, 3, 4]
    ids = [r["id"] for r in await keeper.db.fetch("SELECT id FROM outbox ORDER BY payload")]
    traces = [await trace.read_trace(keeper.db, "relay", i) for i in ids]
    assert [event_trace.log_dropped for event_trace in traces] == [True, False, True, False]
    assert [len(event_trace.deliveries) for event_trace in traces] == [0, 1, 0, 1]
    assert "retention dropped the log" in traces[0].diagnosis[0]
    assert (traces[1].diagnosis, traces[3].diagnosis) == ((), ())
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_old_idempotency_keys_are_deleted(database: Database, keeper: Maintainer) -> None:
    await keeper.db.execute("""
        INSERT INTO idempotency_key (key, expires_at)
        SELECT 'k' || n, clock_timestamp() + (n - 2500) * interval '1 hour'
          FROM generate_series(1, 3000) n
    """)
    keeper.retention = RetentionStore(keeper.db, Retention(3600 * 1.5, None, None))
    assert await keeper.retention.delete_expired() == 2498
    assert await keeper.db.fetchval("SELECT count(*) FROM idempotency_key") == 502


async def test_maintenance_waits_for_a_producer_with_a_stale_plan(
    database: Database, keeper: Maintainer
) -> None:
    producer = await database.connect(**SESSION)
    # The producer has cached plans and already holds a lock, so it does not reload the partitions.
    await producer.execute("""
        CREATE FUNCTION pg_temp.one() RETURNS void LANGUAGE plpgsql AS $$
        BEGIN INSERT INTO relay.outbox (type, payload) VALUES ('a.b', '0'); END $$
    """)
    for _ in range(3):
        await publish(database, 1)
        await keeper.maintain()
    await keeper.partitions.extend()
    number = (await keeper.tables("outbox"))[-1]
    await keeper.db.execute(f"DROP TABLE outbox_{number}, outbox_{number - 1}")
    async with producer.transaction():
        await producer.execute("SELECT pg_temp.one()")
        for _ in range(4):
            await keeper.maintain()
            await producer.execute("SELECT pg_temp.one()")
            await publish(database, 2)
        before = await fetchval(database, "SELECT max(number) FROM period WHERE kind = 'events'")
        assert before == number - 2
    await keeper.maintain()
    await keeper.maintain()
    after = await fetchval(database, "SELECT max(number) FROM period WHERE kind = 'events'")
    assert after > before


async def test_ids_never_go_back_under_concurrent_maintenance(
    database: Database, rng: random.Random
) -> None:
    keepers = [Maintainer(await database.connect(**SESSION)) for _ in range(3)]
    await add_endpoint(database, lanes=4)
    network = Network()
    failures: list[Exception] = []
    given: list[list[int]] = [[] for _ in range(6)]
    done = asyncio.Event()

    async def produce(seed: int) -> None:
        connection = await database.connect(**SESSION)
        mine = given[seed]
        insert = "INSERT INTO outbox (type, key, payload) VALUES ('a.b', $1, $2) RETURNING id"
        try:
            while not done.is_set():
                async with connection.transaction():
                    for _ in range(rng.randint(1, 4)):
                        n = len(mine)
                        mine.append(await connection.fetchval(insert, f"k{seed}", str(n)))
        except asyncpg.PostgresError as error:
            failures.append(error)

    async def keep() -> None:
        await until(lambda: failures or all(len(mine) > 3 for mine in given))
        for _ in range(12):
            # Two concurrent maintainers do the work of one; one of them may be rejected.
            await asyncio.gather(*(k.maintain() for k in keepers), return_exceptions=True)
            least = sum(map(len, given)) + 30
            await until(lambda least=least: failures or sum(map(len, given)) > least)
        done.set()

    async with running(database, network, lease_s=5):
        async with asyncio.TaskGroup() as tasks:
            for n in range(6):
                tasks.create_task(produce(n))
            tasks.create_task(keep())
        assert failures == []
        await until(lambda: len({s.delivery for s in network.accepted}) == sum(map(len, given)))
        await checkpointed(database)
        # No id is assigned twice, and the ids of each producer rise.
        numbers = [n for mine in given for n in mine]
        assert len(set(numbers)) == len(numbers)
        assert all(a < b for mine in given for a, b in pairwise(mine))
        assert max(numbers) // WIDTH >= 3
        for n, mine in enumerate(given):
            got = [s.body["data"] for s in network.accepted if s.body["key"] == f"k{n}"]
            assert list(dict.fromkeys(got)) == list(range(len(mine)))
        await keepers[0].maintain_until_idle()
        assert await keepers[0].first("log") > 0
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_an_interrupted_period_start_is_resumed(
    database: Database, keeper: Maintainer
) -> None:
    await publish(database, 1)
    # The sequence moved on; the rest was rolled back.
    ending = keeper.db.transaction()
    await ending.start()
    await keeper.db.write(retention.END_PERIOD, "events", 0)
    await ending.rollback()
    await publish(database, 2)
    await keeper.maintain()
    assert await fetchval(database, "SELECT count(*) FROM period WHERE kind = 'events'") == 2
    await publish(database, 3)
    assert await fetchval(database, "SELECT array_agg(id ORDER BY id) FROM outbox") == [
        1,
        WIDTH,
        WIDTH + 1,
    ]


async def test_a_drop_waits_for_a_reader_and_blocks_no_session(
    database: Database, keeper: Maintainer
) -> None:
    await add_endpoint(database)
    network = Network()
    reader = await database.connect(**SESSION)
    async with running(database, network):
        await publish(database, 1)
        await checkpointed(database)
        for _ in range(3):
            await keeper.maintain()
        assert await keeper.first("events") > 0
        await reader.execute("BEGIN; SELECT count(*) FROM outbox, attempt, batch, delivery")
        await keeper.db.execute("SET statement_timeout = '200ms'")
        with pytest.raises(asyncpg.QueryCanceledError):
            await keeper.partitions.drop()
        other = await database.connect(**SESSION)
        await other.execute(f"SET lock_timeout = '2s'; {INSERT}")
        await until(lambda: len(network.accepted) == 2, what="an event in between")
        await reader.execute("COMMIT")
        await keeper.db.execute("RESET statement_timeout")
        # A partition that was detached but not dropped is dropped, too.
        await keeper.partitions.drop()
    for parent in ("outbox", "attempt_run", "delivery_run", "batch"):
        assert 0 not in await keeper.tables(parent)
        assert await fetchval(database, "SELECT to_regclass($1) IS NULL", f"{parent}_0")
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_dump_of_hours_delays_only_the_drop_of_partitions(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(database, 1)
    await ranges.sequence_all(database)
    monkeypatch.setattr(connections, "MAINTENANCE_LOCK_TIMEOUT_S", 0.1)
    opened = relay(database, Network())._shared.connections
    keeper = Maintainer(await opened.worker("maintenance", long=True))

    async def maintain() -> bool:
        await maintenance._once(keeper.partitions, keeper.retention, hourly=True)
        return bool(await fetchval(database, "SELECT to_regclass('batch_0') IS NULL"))

    dump = await database.connect(**SESSION)
    await dump.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM outbox, attempt, batch")
    for _ in range(ROUNDS):
        await asyncio.wait_for(maintain(), 20)
        await publish(database, 1)
        await ranges.sequence_all(database)
    dropped = "SELECT count(*) FROM period WHERE dropped_at IS NOT NULL"
    assert await fetchval(database, dropped) > 0
    assert not await maintain()
    await dump.execute("COMMIT")
    await until(maintain, what="the partitions to be dropped")
    keeper.db.terminate()
    assert await exceptions(database) == {}


NO_SPACE = """
ALTER FUNCTION make_partition RENAME TO make_partition_really;
CREATE FUNCTION make_partition(parent regclass, number bigint) RETURNS void LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'no space' USING ERRCODE = 'disk_full'; END $$
"""
SPACE = """
DROP FUNCTION make_partition;
ALTER FUNCTION make_partition_really RENAME TO make_partition
"""


@pytest.mark.full
async def test_periods_are_dropped_while_no_partition_can_be_created(
    database: Database, keeper: Maintainer
) -> None:
    await publish(database, 1)
    await ranges.sequence_all(database)
    await keeper.db.execute(NO_SPACE)
    for _ in range(ROUNDS):
        await maintenance._once(keeper.partitions, keeper.retention, hourly=True)
        await publish(database, 2)
        await ranges.sequence_all(database)
    # The last period that has a partition stays open.
    assert await keeper.first("events") == await keeper.first("log") == 2 * WIDTH
    assert await keeper.tables("outbox") == await keeper.tables("batch") == [2]
    await keeper.db.execute(SPACE)
    await maintenance._once(keeper.partitions, keeper.retention, hourly=True)
    assert await keeper.tables("outbox") == await keeper.tables("batch") == [2, 3, 4]
    assert await exceptions(database) == {}


SLOW = """
CREATE OR REPLACE FUNCTION server_timeline() RETURNS bigint LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_sleep(0.5); RETURN {}; END $$
"""


async def test_a_batch_planned_before_a_period_began_is_not_written(
    database: Database, keeper: Maintainer
) -> None:
    fence = await timeline.read_server_fence(keeper.db)
    leader = SequencingStore(await database.connect(**SESSION), fence)
    await ranges.sequence_all(database)
    await publish(database, 1)
    await ranges.sequence_all(database)
    await keeper.db.execute("UPDATE cursor SET writer = 7")
    row, state = await leader.cursor_row(), await leader.state()
    await keeper.db.execute(SLOW.format(fence >> 32))
    sleeping = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep')"
    writing = asyncio.create_task(
        leader.write(
            row.batch + 1,
            CursorChange(state.high, (), (), (), (), (), False, True, {}),
            0,
            Deliveries(),
            7,
            row.version,
            committed_after=None,
            awake=False,
            erasures=None,
            notification=None,
            replays=ReplayBatch(),
            fed=(),
            stopped={},
        )
    )
    # Its snapshot, in which it leads and the newest batch is the one before, is taken, and the
    # row is not locked yet.
    await until(lambda: fetchval(database, sleeping))
    await keeper.maintain()
    assert await keeper.db.fetchval("SELECT max(batch) FROM batch") == WIDTH
    assert not await writing


@pytest.mark.full
@pytest.mark.one_major
async def test_a_range_of_backfilled_events_keeps_them(
    database: Database, keeper: Maintainer
) -> None:
    keeper.retention = RetentionStore(keeper.db, Retention(None, None, 3600), period_s=0)
    await add_endpoint(database, name="old")
    network = Network()
    async with running(database, network):
        await publish(database, *range(5))
        await checkpointed(database)
        # The whole period is sequenced before the second endpoint exists.
        for _ in range(2):
            await keeper.maintain()
        settled = "SELECT last_batch IS NOT NULL FROM period WHERE kind = 'events' AND number = 0"
        assert await fetchval(database, settled)
    keeper.retention = RetentionStore(keeper.db, Retention(0, 0, 3600), period_s=0)
    await add_endpoint(database, name="late", lanes=1)
    since = datetime(2020, 1, 1, tzinfo=UTC)
    await backfill.request_backfill(keeper.db, "relay", Criteria("late", since=since), actor="test")
    await ranges.sequence_all(database)
    await ranges.dead_letter_pending(keeper.db)
    await keeper.db.execute("UPDATE replay_job_endpoint SET ended_at = now(), from_id = NULL")
    network.accepted.clear()
    async with running(database, network):
        for _ in range(ROUNDS):
            await keeper.maintain()
        assert await keeper.first("events") == 0
        await replays.start_replay(
            keeper.db, "relay", DeadLetterSelection(everything=True), actor="test"
        )
        await until(lambda: network.data() == list(range(5)), what="the range")
        await checkpointed(database)
        await until(
            lambda: fetchval(
                database, "SELECT bool_and(ended_at IS NOT NULL) FROM replay_job_endpoint"
            )
        )
        await keeper.maintain_until_idle()
    assert await keeper.first("events") > 0
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_a_range_is_kept_while_one_of_its_sequence_numbers_is_kept(
    database: Database, keeper: Maintainer
) -> None:
    await add_endpoint(database, lanes=1)
    await publish(database, *range(5))
    await ranges.sequence_all(database)
    await keeper.db.execute("UPDATE period SET began_at = now() WHERE kind = 'events'")
    await keeper.maintain()
    await publish(database, *range(5, 10))
    await ranges.sequence_all(database)
    await ranges.dead_letter_pending(keeper.db)
    await keeper.maintain()
    await keeper.partitions.drop()
    assert await keeper.first("log") == WIDTH
    assert await keeper.db.fetchval("SELECT min(seq) FROM delivery") == 6
    assert await keeper.retention.delete_expired() == 0
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_events_that_a_job_has_not_reached_are_kept(
    database: Database, keeper: Maintainer
) -> None:
    await add_endpoint(database)
    async with running(database, Network(lambda _: REFUSED)):
        await publish(database, 1, 2)
        await checkpointed(database)
        await keeper.maintain_until_idle()
    job = (
        await replays.start_replay(
            keeper.db, "relay", DeadLetterSelection(everything=True), actor="test"
        )
    ).job
    assert job is not None
    assert await keeper.retention.delete_expired() == 0
    await replay_jobs.abort_job(keeper.db, "relay", job, actor="test")
    async with running(database, Network()):
        ended = "SELECT bool_and(ended_at IS NOT NULL) FROM replay_job_endpoint"
        await until(lambda: fetchval(database, ended), what="the job's end")
    assert await keeper.retention.delete_expired() == 2


@pytest.mark.one_major
async def test_an_idempotency_key_deleted_during_its_claim_is_claimed(
    database: Database, keeper: Maintainer
) -> None:
    await keeper.db.execute(
        "INSERT INTO idempotency_key (key, expires_at) VALUES ('k', '2020-01-01')"
    )
    other = await database.connect(**SESSION)
    waits = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock')"
    async with keeper.db.transaction():
        # The same order as maintenance: lock first, then delete.
        await keeper.db.execute("SELECT FROM idempotency_key FOR UPDATE")
        claiming = asyncio.create_task(other.fetchval("SELECT claim_once('k')"))
        await until(lambda: fetchval(database, waits))
        await keeper.db.execute("DELETE FROM idempotency_key")
    assert await claiming

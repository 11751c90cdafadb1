"""Whole periods go, never anything that is still owed, and no producer notices.

Periods last no time here and nothing is kept, so each `tend` does at once what
takes a month: it begins new periods, settles old ones and drops what it may.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import asyncpg
import pytest

from outbox.core.sequencing.partition_window import WIDTH, Keep
from outbox.errors import UsageError
from outbox.operations import (
    backfill,
    endpoint_states,
    receiver_replays,
    replay_jobs,
    replays,
    trace,
)
from outbox.operations.backfill import Backfill
from outbox.operations.dead_letter_filter import Selection
from outbox.operations.fetch_tokens import Fetcher
from outbox.relay.delivery import recorder
from outbox.store import retention
from outbox.store.cursor import CursorStore
from outbox.store.partitions import PARENTS, PartitionStore
from outbox.store.retention import RetentionStore
from tests.support import doctor, ranges
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
from tests.support.waiting import until

if TYPE_CHECKING:
    import random

    from asyncpg import Connection

    from outbox.core.sequencing.partition_window import Period
    from tests.support.postgres import Database

SESSION = {"server_settings": {"search_path": "relay"}}
INSERT = "INSERT INTO outbox (type, payload) VALUES ('a.b', '{}')"
NOTHING = Keep(0, 0, 0)
ROUNDS = 6
"""Enough for a period to begin, to settle and to be dropped, some times over."""


class Keeper:
    """Maintains by hand, on a connection of its own."""

    def __init__(self, connection: Connection[Any], keep: Keep = NOTHING) -> None:
        self.db = connection
        self.partitions = PartitionStore(connection)
        self.retention = RetentionStore(connection, keep, period_s=0)

    async def tend(self) -> list[Period]:
        """Everything once, but what waits for long transactions."""
        await self.partitions.extend()
        return await self.retention.tend()

    async def tend_for_long(self) -> None:
        """Until nothing more can happen without new events."""
        for _ in range(ROUNDS):
            await self.tend()
        await self.partitions.drop()

    async def has_dropped(self) -> bool:
        """Whether a period of events went.  A relay that reads holds it up for a moment."""
        await self.tend_for_long()
        return await self.first("events") > 0

    async def first(self, kind: str) -> int:
        """The lowest number that is kept."""
        number = await self.db.fetchval(
            "SELECT min(number) FROM period WHERE kind = $1 AND dropped_at IS NULL", kind
        )
        return int(number * WIDTH)

    async def tables(self, parent: str) -> list[int]:
        """The numbers of the partitions that are there."""
        return [p.lo // WIDTH for p in await self.partitions.partitions(parent)]


@pytest.fixture
async def keeper(database: Database) -> Keeper:
    return Keeper(await database.connect(**SESSION))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly every test waits for checkpoints, more than once."""
    monkeypatch.setattr(recorder, "CHECKPOINT_EVERY_S", 0.05)


async def checkpointed(database: Database) -> None:
    """All is delivered, and the tables say so."""
    await all_ended(database)
    owing = """
        SELECT NOT EXISTS (SELECT FROM lane_progress p JOIN lane_counter c USING (lane_id)
                            WHERE c.last_seq > p.acked_seq)
    """
    await until(lambda: fetchval(database, owing), 10, "the checkpoints")


async def test_what_is_delivered_goes_and_what_comes_is_delivered(
    database: Database, keeper: Keeper
) -> None:
    await add_endpoint(database, lanes=2)
    network = Network()
    async with running(database, network):
        for n in range(3):
            await publish(database, *range(n * 20, n * 20 + 20), key=f"k{n % 3}")
            await checkpointed(database)
            await keeper.tend_for_long()
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


async def test_a_quiet_outbox_is_emptied_too(database: Database, keeper: Keeper) -> None:
    await add_endpoint(database)
    async with running(database, Network()):
        await publish(database, 1, 2, 3)
        await checkpointed(database)
        await keeper.tend_for_long()
    assert await fetchval(database, "SELECT count(*) FROM outbox") == 0
    assert await fetchval(database, "SELECT count(*) FROM attempt") == 0
    # And stays as it is: nothing begins where nothing was written.
    before = await fetchval(database, "SELECT count(*) FROM period")
    await keeper.tend_for_long()
    assert await fetchval(database, "SELECT count(*) FROM period") == before


# What the rule would be without one of its parts: an event is lost with its period.
GAPS = (
    "AND NOT EXISTS (SELECT FROM gap WHERE lo < end_id AND hi >= first_id)",
    "AND NOT b.young && int8range(first_id, end_id)",
)
CARELESS = {
    None: lambda sql: sql,
    "open gaps": lambda sql: sql.replace(GAPS[0], "").replace(GAPS[1], ""),
    "who may still insert": lambda sql: sql.replace("quiet AND", "quiet IS NOT NULL AND"),
}
SETTLES = "SELECT pg_get_functiondef('settle_period'::regproc)"


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize(
    "careless",
    [pytest.param(each, marks=pytest.mark.one_major if each else ()) for each in CARELESS],
)
async def test_an_event_that_commits_late_keeps_its_period(
    database: Database,
    keeper: Keeper,
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
        # It is there, so nobody who looks closely would begin another one.
        assert await keeper.db.fetchval(retention.END_PERIOD, "events", 0)
        # Only an event behind it makes a gap of it.
        await publish(database, *["behind"] * behind)
        await checkpointed(database)
        for _ in range(3):
            await keeper.tend()
        lost = careless is not None and (careless == "open gaps") == bool(behind)
        assert (await keeper.first("events") > 0) == lost
        await late.execute("COMMIT")
        if not lost:
            await until(lambda: "late" in network.data(), 10, "the late event")
            await checkpointed(database)
            await until(keeper.has_dropped, 10, "the period to go")
            assert await exceptions(database) == {}


async def test_what_a_paused_endpoint_is_owed_stays(database: Database, keeper: Keeper) -> None:
    await add_endpoint(database, name="paused")
    await add_endpoint(database, name="quick")
    network = Network()
    async with running(database, network):
        await endpoint_states.pause(keeper.db, "relay", ["paused"], actor="test")
        await publish(database, *range(10))
        await until(lambda: len(network.accepted) == 10, 10, "the quick one")
        await publish(database, *range(10, 20))
        await until(lambda: len(network.accepted) == 20, 10, "the quick one")
        await keeper.tend_for_long()
        assert [await keeper.first(kind) for kind in ("events", "log")] == [0, 0]
        await endpoint_states.resume(keeper.db, "relay", ["paused"], actor="test")
        await checkpointed(database)
        await keeper.tend_for_long()
        assert all([await keeper.first(kind) > 0 for kind in ("events", "log")])
    assert [s.body["data"] for s in network.accepted if s.url.endswith("paused")] == list(range(20))
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_the_doctor_says_what_keeps_what_is_old(database: Database, keeper: Keeper) -> None:
    async def told() -> list[str]:
        return [found.says for found in await doctor.told(keeper.db, "retention")]

    await add_endpoint(database, name="paused")
    async with running(database, Network()):
        await endpoint_states.pause(keeper.db, "relay", ["paused"], actor="test")
        await publish(database, *range(3))
        await until(lambda: fetchval(database, "SELECT high = 3 FROM batch WHERE high > 2"))
        for _ in range(3):
            await keeper.tend()
        assert await told() == []
        await keeper.db.execute(
            "UPDATE period SET ended_at = now() - interval '40 days' WHERE ended_at < now()"
        )
        events, log = await told()
        assert events.startswith("events of ")
        assert events.endswith('should have been dropped 10 d ago: they are owed to "paused"')
        assert log.endswith('they are owed to "paused"')
        await endpoint_states.resume(keeper.db, "relay", ["paused"], actor="test")
        await checkpointed(database)
        assert [says.rpartition(": ")[2] for says in await told()] == [
            "no relay has dropped them",
            "no relay has dropped them",
        ]
        await keeper.tend_for_long()
        assert await told() == []


@pytest.mark.one_major
async def test_a_range_keeps_its_events_until_it_is_sent_again(
    database: Database, keeper: Keeper
) -> None:
    keeper.retention = RetentionStore(keeper.db, Keep(0, 0, 3600), period_s=0)
    await add_endpoint(database, lanes=1)
    await publish(database, *range(10))
    await ranges.sequence_all(database)
    await ranges.give_up(keeper.db)
    await publish(database, "after")
    network = Network()
    async with running(database, network):
        await checkpointed(database)
        await keeper.tend_for_long()
        assert [await keeper.first(kind) for kind in ("events", "log")] == [0, 0]
        await replays.replay(keeper.db, "relay", Selection(everything=True), actor="test")
        await until(lambda: len(network.accepted) == 11, 10, "the replay")
        await checkpointed(database)
        await keeper.tend_for_long()
    assert network.data() == ["after", *range(10)]
    assert all([await keeper.first(kind) > 0 for kind in ("events", "log")])
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_a_range_that_nobody_wanted_goes_with_its_log(
    database: Database, keeper: Keeper
) -> None:
    await add_endpoint(database, lanes=1)
    await publish(database, *range(10))
    await ranges.sequence_all(database)
    await ranges.give_up(keeper.db)
    await publish(database, "after")
    async with running(database, Network()):
        await checkpointed(database)
        await keeper.tend_for_long()
    assert all([await keeper.first(kind) > 0 for kind in ("events", "log")])
    # Its numbers are gone, so nobody may ask for them again.
    with pytest.raises(UsageError, match="was discarded"):
        await replays.replay(keeper.db, "relay", Selection(ids=(1,)), actor="test")
    assert await keeper.retention.clean() == 1
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_dead_letters_outlive_their_events_and_can_be_sent_again(
    database: Database, keeper: Keeper
) -> None:
    keeper.retention = RetentionStore(keeper.db, Keep(0, 0, 3600), period_s=0)
    await add_endpoint(database)
    network = Network(lambda _: REFUSED)
    async with running(database, network):
        await publish(database, "refused")
        await checkpointed(database)
        await keeper.tend_for_long()
        assert await keeper.first("events") > 0
        assert await keeper.retention.clean() == 0
        network.script = Network().script
        await replays.replay(keeper.db, "relay", Selection(everything=True), actor="test")
        await until(lambda: network.data() == ["refused"], 10, "the replay")
        await checkpointed(database)
        # Its copy of the event stays as long as the log of the new delivery.
        keeper.retention = RetentionStore(keeper.db, NOTHING, period_s=0)
        assert await keeper.retention.clean() == 0
        await keeper.tend_for_long()
        assert await keeper.retention.clean() == 1
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_a_copy_stays_for_what_was_given_up_again_in_a_range(
    database: Database, keeper: Keeper
) -> None:
    kept = RetentionStore(keeper.db, Keep(0, 0, 3600), period_s=0)
    keeper.retention = kept
    await add_endpoint(database, lanes=4)
    network = Network(lambda _: REFUSED)
    async with running(database, network):
        await publish(database, "refused", key="key")
        await checkpointed(database)
        lane_id = await fetchval(database, "SELECT lane_id FROM delivery")
        by_id = "SELECT l.id FROM lane l, outbox o WHERE l.slot = o.id % 4"
        assert lane_id != await fetchval(database, by_id)
        await keeper.tend_for_long()
        assert await fetchval(database, "SELECT count(*) FROM outbox") == 0
    everything = Selection(everything=True)
    # Twice: a range of replays, and one of replays of those.
    for _ in range(2):
        await replays.replay(keeper.db, "relay", everything, actor="test")
        await keeper.db.execute(
            "UPDATE lane_progress SET floor_batch = (SELECT max(batch) FROM batch)"
        )
        await ranges.sequence_all(database)
        assert len(await ranges.give_up(keeper.db)) == 1
        await keeper.tend_for_long()
        assert await RetentionStore(keeper.db, NOTHING).clean() == 0
    network.script = Network().script
    async with running(database, network):
        await replays.replay(keeper.db, "relay", everything, actor="test")
        await until(lambda: network.data() == ["refused"], 10, "the replay")
        await checkpointed(database)
    # All of them in the lane of its key.
    lanes = "SELECT array_agg(DISTINCT lane_id) FROM delivery"
    assert await fetchval(database, lanes) == [lane_id]
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_events_stay_for_the_rest_of_a_range_that_is_being_sent_again(
    database: Database, keeper: Keeper
) -> None:
    keeper.retention = RetentionStore(keeper.db, Keep(0, None, 3600), period_s=0)
    await add_endpoint(database, lanes=1)
    network = Network()
    await publish(database, *range(6))
    await ranges.sequence_all(database)
    await ranges.give_up(keeper.db)
    for _ in range(2):
        await keeper.tend()
    settled = "SELECT last_batch FROM period WHERE kind = 'events' AND number = 0"
    last_batch = await fetchval(database, settled)
    # Given up again, in batches that tell nothing about the events' age.
    await keeper.db.execute("UPDATE lane_progress SET floor_batch = $1::bigint + 1", last_batch)
    await replays.replay(keeper.db, "relay", Selection(everything=True), actor="test")
    await ranges.sequence_all(database)
    await ranges.give_up(keeper.db)
    await replays.replay(keeper.db, "relay", Selection(everything=True), actor="test")
    with ranges.unpaced(2):
        worker = await ranges.sequencer(database)
        left = "SELECT to_seq - next_seq + 1 FROM replay ORDER BY id DESC LIMIT 1"
        while await fetchval(database, left) != 4:
            await ranges.turn(worker)
    # These two are done, and were of newer events than the rest is.
    await keeper.db.execute("UPDATE lane_progress SET acked_seq = 14")
    await keeper.tend_for_long()
    assert await keeper.first("events") == 0
    async with running(database, network):
        await until(lambda: network.data() == [2, 3, 4, 5], 10, "the rest")
        ended = "SELECT bool_and(ended_at IS NOT NULL) FROM replay_part"
        await until(lambda: fetchval(database, ended), 10, "the job's end")
    await keeper.tend_for_long()
    assert await keeper.first("events") > 0


@pytest.mark.one_major
@pytest.mark.parametrize("kind", ["events", "log"])
async def test_it_stays_while_its_receiver_is_sent_it_again(
    database: Database, keeper: Keeper, kind: Literal["events", "log"]
) -> None:
    keep = Keep(0, None, 3600) if kind == "events" else Keep(None, 0, 0)
    keeper.retention = RetentionStore(keeper.db, keep, period_s=0)
    made = await add_endpoint(database, lanes=1)
    network = Network()
    async with running(database, network):
        await publish(database, *range(6), key="k")
        await checkpointed(database)
    fetcher = Fetcher(made.id, "shop")
    await receiver_replays.ask(keeper.db, "relay", fetcher, f"{made.id.hex[:12]}-1-0", 0)
    with ranges.unpaced(2):
        worker = await ranges.sequencer(database)
        while await fetchval(database, "SELECT next_seq FROM replay") == 1:
            await ranges.turn(worker)
    # These two are done, and nothing is owed: only what is to come keeps what it needs.
    last = "acked_seq = 8, delivered_seq = 8, floor_batch = (SELECT max(batch) FROM batch)"
    await keeper.db.execute(f"UPDATE lane_progress SET {last}")
    await keeper.tend_for_long()
    assert await keeper.first(kind) == 0
    async with running(database, network):
        await until(lambda: len(network.accepted) == 10, 10, "the rest")
        ended = "SELECT bool_and(ended_at IS NOT NULL) FROM replay_part"
        await until(lambda: fetchval(database, ended), 10, "the job's end")

        async def has_gone() -> bool:
            await keeper.tend_for_long()
            return await keeper.first(kind) > 0

        await until(has_gone, 10, "its end")
        assert network.data() == [*range(6), *range(2, 6)]
        if kind == "events":
            return

        async def is_forgotten() -> bool:
            await publish(database, "later", key="k")
            await keeper.tend_for_long()
            await keeper.retention.clean()
            return await fetchval(database, "SELECT count(*) FROM replay_job") == 0

        # Nothing is left of the wish when nothing is left of what came of it.
        await until(is_forgotten, 20, "its end")
    assert await fetchval(database, "SELECT count(*) FROM replay") == 0


@pytest.mark.one_major
async def test_a_log_may_go_before_its_events(database: Database, keeper: Keeper) -> None:
    keeper.retention = RetentionStore(keeper.db, Keep(None, 0, 0), period_s=0)
    await add_endpoint(database)
    late = await database.connect(**SESSION)
    network = Network()
    async with running(database, network):
        await publish(database, 1)
        await late.execute("BEGIN; INSERT INTO outbox (type, payload) VALUES ('a.b', '2')")
        await publish(database, 3)
        await checkpointed(database)
        await keeper.tend_for_long()
        assert await keeper.first("log") > 0
        await late.execute("COMMIT")
        await publish(database, 4)
        await until(lambda: len(network.accepted) == 4, 10, "all of them")
        await checkpointed(database)
    assert sorted(network.data()) == [1, 2, 3, 4]
    ids = [r["id"] for r in await keeper.db.fetch("SELECT id FROM outbox ORDER BY payload")]
    told = [await trace.read(keeper.db, "relay", i) for i in ids]
    assert [story.log_dropped for story in told] == [True, False, True, False]
    assert [len(story.deliveries) for story in told] == [0, 1, 0, 1]
    assert "dropped with the log" in told[0].diagnosis[0]
    assert (told[1].diagnosis, told[3].diagnosis) == ((), ())
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_old_once_keys_go(database: Database, keeper: Keeper) -> None:
    await keeper.db.execute("""
        INSERT INTO once (key, expires_at)
        SELECT 'k' || n, clock_timestamp() + (n - 2500) * interval '1 hour'
          FROM generate_series(1, 3000) n
    """)
    keeper.retention = RetentionStore(keeper.db, Keep(3600 * 1.5, None, None))
    assert await keeper.retention.clean() == 2498
    assert await keeper.db.fetchval("SELECT count(*) FROM once") == 502


async def test_a_producer_that_knows_no_new_partition_is_waited_for(
    database: Database, keeper: Keeper
) -> None:
    producer = await database.connect(**SESSION)
    # Plans of its own, kept, and a lock that it has already: it looks at nothing anew.
    await producer.execute("""
        CREATE FUNCTION pg_temp.one() RETURNS void LANGUAGE plpgsql AS $$
        BEGIN INSERT INTO relay.outbox (type, payload) VALUES ('a.b', '0'); END $$
    """)
    for _ in range(3):
        await publish(database, 1)
        await keeper.tend()
    await keeper.partitions.extend()
    number = (await keeper.tables("outbox"))[-1]
    await keeper.db.execute(f"DROP TABLE outbox_{number}, outbox_{number - 1}")
    async with producer.transaction():
        await producer.execute("SELECT pg_temp.one()")
        for _ in range(4):
            await keeper.tend()
            await producer.execute("SELECT pg_temp.one()")
            await publish(database, 2)
        before = await fetchval(database, "SELECT max(number) FROM period WHERE kind = 'events'")
        assert before == number - 2
    await keeper.tend()
    await keeper.tend()
    after = await fetchval(database, "SELECT max(number) FROM period WHERE kind = 'events'")
    assert after > before


async def test_ids_never_go_back_whoever_maintains(database: Database, rng: random.Random) -> None:
    keepers = [Keeper(await database.connect(**SESSION)) for _ in range(3)]
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
            # Two at once do what one does; one of them may be refused.
            await asyncio.gather(*(k.tend() for k in keepers), return_exceptions=True)
            least = sum(map(len, given)) + 30
            await until(lambda least=least: failures or sum(map(len, given)) > least)
        done.set()

    async with running(database, network, lease_s=5):
        async with asyncio.TaskGroup() as tasks:
            for n in range(6):
                tasks.create_task(produce(n))
            tasks.create_task(keep())
        assert failures == []
        await until(lambda: len({s.delivery for s in network.accepted}) == sum(map(len, given)), 60)
        await checkpointed(database)
        # No number is given twice, and each producer's rise.
        numbers = [n for mine in given for n in mine]
        assert len(set(numbers)) == len(numbers)
        assert all(a < b for mine in given for a, b in pairwise(mine))
        assert max(numbers) // WIDTH >= 3
        for n, mine in enumerate(given):
            got = [s.body["data"] for s in network.accepted if s.body["key"] == f"k{n}"]
            assert list(dict.fromkeys(got)) == list(range(len(mine)))
        await keepers[0].tend_for_long()
        assert await keepers[0].first("log") > 0
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_a_beginning_that_was_cut_off_is_taken_up(database: Database, keeper: Keeper) -> None:
    await publish(database, 1)
    # The numbers moved on; the rest was rolled back.
    ending = keeper.db.transaction()
    await ending.start()
    assert await keeper.db.fetchval(retention.END_PERIOD, "events", 0)
    await ending.rollback()
    await publish(database, 2)
    await keeper.tend()
    assert await fetchval(database, "SELECT count(*) FROM period WHERE kind = 'events'") == 2
    await publish(database, 3)
    assert await fetchval(database, "SELECT array_agg(id ORDER BY id) FROM outbox") == [
        1,
        WIDTH,
        WIDTH + 1,
    ]


async def test_a_drop_waits_for_a_reader_and_nobody_waits_for_it(
    database: Database, keeper: Keeper
) -> None:
    await add_endpoint(database)
    network = Network()
    reader = await database.connect(**SESSION)
    async with running(database, network):
        await publish(database, 1)
        await checkpointed(database)
        for _ in range(3):
            await keeper.tend()
        assert await keeper.first("events") > 0
        await reader.execute("BEGIN; SELECT count(*) FROM outbox, attempt, batch, delivery")
        await keeper.db.execute("SET statement_timeout = '200ms'")
        with pytest.raises(asyncpg.QueryCanceledError):
            await keeper.partitions.drop()
        other = await database.connect(**SESSION)
        await other.execute(f"SET lock_timeout = '2s'; {INSERT}")
        await until(lambda: len(network.accepted) == 2, 10, "an event in between")
        await reader.execute("COMMIT")
        await keeper.db.execute("RESET statement_timeout")
        # Also one that was detached, and not dropped.
        await keeper.partitions.drop()
    for parent in ("outbox", "attempt", "delivery", "batch"):
        assert 0 not in await keeper.tables(parent)
        assert await fetchval(database, "SELECT to_regclass($1) IS NULL", f"{parent}_0")
    assert await exceptions(database) == {}


SLOW = """
CREATE OR REPLACE FUNCTION server_timeline() RETURNS bigint LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_sleep(0.5); RETURN NULL; END $$
"""


async def test_a_leader_that_was_about_to_lock_learns_of_a_new_period(
    database: Database, keeper: Keeper
) -> None:
    leader = CursorStore(await database.connect(**SESSION))
    await ranges.sequence_all(database)
    await publish(database, 1)
    await ranges.sequence_all(database)
    await keeper.db.execute("UPDATE cursor SET writer = 7")
    await keeper.db.execute(SLOW)
    sleeping = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep')"
    async with leader.transaction():
        locking = asyncio.create_task(leader.lock())
        # Its snapshot is taken, and the row is not locked yet.
        await until(lambda: fetchval(database, sleeping))
        await keeper.tend()
        assert await keeper.db.fetchval("SELECT max(batch) FROM batch") == WIDTH
        lock = await locking
    assert lock is not None
    # What it sees of the batches is old; so it must not take itself for the leader.
    assert lock.writer is None


@pytest.mark.one_major
async def test_a_range_of_backfilled_events_keeps_them(database: Database, keeper: Keeper) -> None:
    keeper.retention = RetentionStore(keeper.db, Keep(None, None, 3600), period_s=0)
    await add_endpoint(database, name="old")
    network = Network()
    async with running(database, network):
        await publish(database, *range(5))
        await checkpointed(database)
        # All of that period is sequenced before there is another endpoint.
        for _ in range(2):
            await keeper.tend()
        settled = "SELECT last_batch IS NOT NULL FROM period WHERE kind = 'events' AND number = 0"
        assert await fetchval(database, settled)
    keeper.retention = RetentionStore(keeper.db, Keep(0, 0, 3600), period_s=0)
    await add_endpoint(database, name="late", lanes=1)
    since = datetime(2020, 1, 1, tzinfo=UTC)
    await backfill.ask(keeper.db, "relay", Backfill("late", since), actor="test")
    await ranges.sequence_all(database)
    await ranges.give_up(keeper.db)
    await keeper.db.execute("UPDATE replay_part SET ended_at = now(), from_id = NULL")
    network.accepted.clear()
    async with running(database, network):
        for _ in range(ROUNDS):
            await keeper.tend()
        assert await keeper.first("events") == 0
        await replays.replay(keeper.db, "relay", Selection(everything=True), actor="test")
        await until(lambda: network.data() == list(range(5)), 10, "the range")
        await checkpointed(database)
        await until(
            lambda: fetchval(database, "SELECT bool_and(ended_at IS NOT NULL) FROM replay_part")
        )
        await keeper.tend_for_long()
    assert await keeper.first("events") > 0
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_a_range_stays_as_long_as_one_of_its_numbers(
    database: Database, keeper: Keeper
) -> None:
    await add_endpoint(database, lanes=1)
    await publish(database, *range(5))
    await ranges.sequence_all(database)
    await keeper.db.execute("UPDATE period SET began_at = now() WHERE kind = 'events'")
    await keeper.tend()
    await publish(database, *range(5, 10))
    await ranges.sequence_all(database)
    await ranges.give_up(keeper.db)
    await keeper.tend()
    await keeper.partitions.drop()
    assert await keeper.first("log") == WIDTH
    assert await keeper.db.fetchval("SELECT min(seq) FROM delivery") == 6
    assert await keeper.retention.clean() == 0
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_what_a_job_will_come_to_is_not_deleted(database: Database, keeper: Keeper) -> None:
    await add_endpoint(database)
    async with running(database, Network(lambda _: REFUSED)):
        await publish(database, 1, 2)
        await checkpointed(database)
        await keeper.tend_for_long()
    job = (await replays.replay(keeper.db, "relay", Selection(everything=True), actor="test")).job
    assert job is not None
    assert await keeper.retention.clean() == 0
    await replay_jobs.abort(keeper.db, "relay", job, actor="test")
    async with running(database, Network()):
        ended = "SELECT bool_and(ended_at IS NOT NULL) FROM replay_part"
        await until(lambda: fetchval(database, ended), 10, "the job's end")
    assert await keeper.retention.clean() == 2


@pytest.mark.one_major
async def test_a_once_key_that_is_deleted_while_it_is_claimed_is_claimed(
    database: Database, keeper: Keeper
) -> None:
    await keeper.db.execute("INSERT INTO once (key, expires_at) VALUES ('k', '2020-01-01')")
    other = await database.connect(**SESSION)
    waits = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock')"
    async with keeper.db.transaction():
        # As maintenance does: first locked, then deleted.
        await keeper.db.execute("SELECT FROM once FOR UPDATE")
        claiming = asyncio.create_task(other.fetchval("SELECT claim_once('k')"))
        await until(lambda: fetchval(database, waits))
        await keeper.db.execute("DELETE FROM once")
    assert await claiming

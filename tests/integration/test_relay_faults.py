"""Fault isolation: one bad row, slow receiver or transient error affects no other endpoint."""

from __future__ import annotations

import asyncio
import random
import traceback
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from outbox.core.admission.request_scheduler import RequestScheduler
from outbox.core.delivery.commands import AttemptRow, LaneSnapshot, Progress, Record
from outbox.core.delivery.delivery_history import DeliveryHistory
from outbox.core.delivery.event_cache import EventCache
from outbox.core.delivery.lane import Lane
from outbox.core.delivery.stream_position import StreamPosition
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.operations.criteria import DeadLetterSelection
from outbox.operations.dead_letters import replay as replays
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import removal as endpoint_removal
from outbox.relay.delivery.dispatcher import Dispatcher
from outbox.relay.delivery.recorder import Recorder
from outbox.store.cluster.replicas import ReplicaStore
from outbox.store.delivery.delivery_reads import LaneRead
from outbox.store.delivery.lanes import LaneStore
from outbox.store.delivery.records import RecordStore
from outbox.store.errors import Fenced
from tests.support.concurrent_cases import run_concurrently
from tests.support.old_rows import without_rules
from tests.support.operators import routing_transaction
from tests.support.relay import (
    BUSY,
    OK,
    REFUSED,
    SLOW_RETRY,
    Network,
    Sent,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    killed_at_the_end,
    publish,
    register,
    relay,
    remove_events,
    running,
)
from tests.support.split_runs import split_runs
from tests.support.tcp import through_lines
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence
    from uuid import UUID

    from outbox.core.model.response import AttemptResult
    from tests.support.concurrent_cases import Logs
    from tests.support.postgres import Database, Server

pytestmark = pytest.mark.one_major
SESSION = {"server_settings": {"search_path": "relay"}}


async def _change(database: Database, sql: str, *arguments: Any) -> None:
    """Change a setting, as a command does."""
    async with (
        database.connection(**SESSION) as connection,
        routing_transaction(connection),
    ):
        await connection.execute(sql, *arguments)


async def _remove(database: Database, name: str) -> endpoint_removal.Removal:
    async with database.connection(**SESSION) as connection:
        return await endpoint_removal.remove_endpoint(
            connection, "relay", name, actor="test", dead_letter=True
        )


def _endpoint_name(sent: Sent) -> str:
    return sent.url.rsplit("/", 1)[1]


class HoldingNetwork:
    """A network that holds the requests to some endpoints until they are released."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.release = asyncio.Event()
        self.network = Network(self._script)

    async def _script(self, sent: Sent) -> AttemptResult:
        if _endpoint_name(sent) in self.names:
            await self.release.wait()
        return OK

    def got(self, name: str) -> list[Any]:
        return [s.body["data"] for s in self.network.accepted if _endpoint_name(s) == name]


# -------------------------------------------------------------- unusable rows


async def test_times_are_read_to_the_microsecond(database: Database) -> None:
    await add_endpoint(database)
    network = Network()
    times = [
        "1969-12-31T23:59:59.999999Z",
        "2026-07-01T12:00:00.000001Z",
        "2026-07-01T12:00:00.123457Z",
        "2199-12-31T23:59:59.999999Z",
    ]
    async with running(database, network):
        for at in times:
            await fetchval(
                database,
                f"INSERT INTO outbox (type, payload, created_at) VALUES ('a.b', '1', '{at}')",
            )
        await all_ended(database)
    assert [sent.body["timestamp"] for sent in network.accepted] == times


async def test_times_beyond_the_python_calendar_are_far_away(database: Database) -> None:
    await add_endpoint(database)
    network = Network()
    times = {
        "far": "'20000-01-01'",
        "never": "'infinity'",
        "long ago": "'0044-03-15 BC'",
        "always": "'-infinity'",
        "no time": "NULL",
    }
    async with database.connection() as db, without_rules(db):
        for payload, at in times.items():
            await db.execute(
                "INSERT INTO relay.outbox (type, payload, created_at, expires_at) "
                f"VALUES ('a.b', '\"{payload}\"', coalesce({at}, now()), {at})",
            )
    async with running(database, network):
        await all_ended(database)
    assert network.data() == ["far", "never", "no time"]
    sql = "SELECT array_agg(reason ORDER BY seq) FROM dead_letter"
    assert await fetchval(database, sql) == ["expired", "expired"]


UNUSABLE = {
    "a secret that is none": (
        "UPDATE endpoint_secret SET secret = 'whsec_!' WHERE endpoint_id = $1",
        "UPDATE endpoint_secret SET secret = 'whsec_' || repeat('A', 32) WHERE endpoint_id = $1",
    ),
    "no secret": (
        "UPDATE endpoint_secret SET expires_at = '-infinity' WHERE endpoint_id = $1",
        "UPDATE endpoint_secret SET expires_at = NULL WHERE endpoint_id = $1",
    ),
    "a retry policy out of bounds": (
        """UPDATE endpoint SET retry = '{"factor": -1}' WHERE id = $1""",
        "UPDATE endpoint SET retry = '{}' WHERE id = $1",
    ),
    "a retry policy that is none": (
        "UPDATE endpoint SET retry = '[1]' WHERE id = $1",
        "UPDATE endpoint SET retry = '{}' WHERE id = $1",
    ),
    "a header prefix that injects a header": (
        r"UPDATE endpoint SET header_prefix = E'A: b\r\nX-' WHERE id = $1",
        "UPDATE endpoint SET header_prefix = 'X-' WHERE id = $1",
    ),
    "a time-out that is no number": (
        "UPDATE endpoint SET timeout_s = 'NaN' WHERE id = $1",
        "UPDATE endpoint SET timeout_s = 1 WHERE id = $1",
    ),
}


async def test_an_unusable_endpoint_does_not_block_others(database: Database) -> None:
    bad = {what: await add_endpoint(database, f"bad-{n}") for n, what in enumerate(UNUSABLE)}
    await add_endpoint(database, "good")
    for what, (broken, _) in UNUSABLE.items():
        await fetchval(database, broken, bad[what].id)
    held = HoldingNetwork()
    await publish(database, "a")
    async with running(database, held.network):
        await until(lambda: held.got("good") == ["a"])
        for n, what in enumerate(UNUSABLE):
            assert held.got(f"bad-{n}") == [], what
        for n, (what, (broken, repaired)) in enumerate(UNUSABLE.items()):
            await _change(database, repaired, bad[what].id)
            await until(lambda n=n: held.got(f"bad-{n}") == ["a"], what=what)
            # A row may also become unusable at run time.
            await _change(database, broken, bad[what].id)
        await publish(database, "b")
        await until(lambda: held.got("good") == ["a", "b"])
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_an_unusable_endpoint_can_be_removed(database: Database) -> None:
    bad = await add_endpoint(database, "bad")
    await fetchval(database, "UPDATE endpoint SET retry = '[1]' WHERE id = $1", bad.id)
    await publish(database, "a")
    async with running(database, Network()):
        await until(lambda: fetchval(database, "SELECT last_seq FROM lane_counter"))
        await _remove(database, "bad")
        sql = "SELECT state = 'removed' FROM endpoint"
        await until(lambda: fetchval(database, sql))
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_the_removal_of_an_idle_endpoint_is_no_error(database: Database, logs: Logs) -> None:
    await add_endpoint(database, "old")
    async with running(database, Network()):
        await until(lambda: fetchval(database, "SELECT count(replica_id) > 0 FROM ownership"))
        await _remove(database, "old")
        await until(lambda: fetchval(database, "SELECT count(replica_id) = 0 FROM ownership"))
    assert [entry for entry in logs if entry["log_level"] == "error"] == []


async def test_a_lane_with_a_missing_row_does_not_block_others(database: Database) -> None:
    bad = await add_endpoint(database, "bad")
    await add_endpoint(database, "good")
    held = HoldingNetwork("bad", "good")
    await publish(database, "a", "b", "c")
    async with killed_at_the_end(database, held.network):
        await until(lambda: len(held.network.sent) == 2)
    async with database.at_hand() as db:
        await split_runs(db)
    await fetchval(
        database,
        "DELETE FROM delivery_run d USING lane l "
        "WHERE l.id = d.lane_id AND l.endpoint_id = $1 AND d.seq = 2",
        bad.id,
    )
    held.release.set()
    async with running(database, held.network):
        await until(lambda: held.got("good") == ["a", "b", "c"])
        await publish(database, "d")
        await until(lambda: held.got("good") == ["a", "b", "c", "d"])
        # Its endpoint may be claimed in a later step than the good one.
        await until(lambda: held.got("bad"))
        assert held.got("bad") == ["a"]


@pytest.mark.full
async def test_large_payloads_are_read_in_small_batches(database: Database) -> None:
    endpoint = await add_endpoint(database)
    network = Network()
    rng = random.Random(1)
    payloads = [rng.randbytes(100_000).hex() for _ in range(30)]
    async with running(database, network):
        await publish(database, *payloads)
        await until(lambda: len(network.accepted) == 30)
    assert network.data() == payloads
    store = LaneStore(await database.connect(**SESSION))
    lanes = await store.lanes([endpoint.id])
    for (bytes_max, count), cache in product(
        ((1, 1), (500_000, 2), (1 << 30, 30)), (None, EventCache())
    ):
        rows = await store.deliveries([LaneRead(lanes[0], 0, 0, 32, bytes_max)], cache)
        assert [d.seq for d in rows[lanes[0].id]] == list(range(1, count + 1))


# ------------------------------------------------------------- slow receivers


@pytest.mark.full
async def test_a_removal_in_progress_does_not_delay_other_endpoints(
    database: Database,
) -> None:
    await add_endpoint(database, "slow")
    await add_endpoint(database, "old")
    held = HoldingNetwork("slow")
    async with running(database, held.network):
        await publish(database, "a")
        await until(lambda: len(held.network.sent) == 2)
        await _remove(database, "slow")
        sql = "SELECT count(*) FROM ownership WHERE replica_id IS NULL"
        await add_endpoint(database, "new")
        await until(lambda: _query_returns(database, sql, 0))
        await publish(database, "b")
        await until(lambda: held.got("new") == ["b"])
        assert await fetchval(database, "SELECT state FROM endpoint WHERE name = 'slow'") == (
            "removing"
        )
        held.release.set()
        await until(lambda: _query_returns(database, "SELECT count(*) FROM dead_letter", 0))
        sql = "SELECT state = 'removed' FROM endpoint WHERE name = 'slow'"
        await until(lambda: fetchval(database, sql))
    assert held.got("slow") == ["a"]
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_removal_in_progress_does_not_delay_a_stop(
    database: Database,
) -> None:
    await add_endpoint(database, "slow")
    held = HoldingNetwork("slow")
    async with running(database, held.network, drain_s=0.2) as relay:
        await publish(database, "a", "b")
        await until(lambda: held.network.sent)
        await _remove(database, "slow")
        # An owner that acquires this endpoint has also read the removal.
        await add_endpoint(database, "new")
        await until(
            lambda: _query_returns(database, "SELECT count(replica_id)::int FROM ownership", 2)
        )
        relay.stop()
    assert await fetchval(database, "SELECT count(*) FROM replica") == 0
    async with running(database, held.network):
        sql = "SELECT state = 'removed' FROM endpoint WHERE name = 'slow'"
        await until(lambda: fetchval(database, sql))
    sql = "SELECT (seq, to_seq, reason)::text FROM dead_letter"
    assert await fetchval(database, sql) == "(1,2,removed)"
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_slow_receivers_do_not_delay_rebalancing_of_other_endpoints(
    database: Database,
) -> None:
    # Enough endpoints that each replica is preferred by some of them, for any replica ids.
    slow, others = [f"slow{n}" for n in range(4)], [f"other{n}" for n in range(20)]
    for name in (*slow, *others):
        await add_endpoint(database, name)
    first, second = HoldingNetwork(*slow), HoldingNetwork(*slow)
    owners = "SELECT count(DISTINCT replica_id) FROM ownership WHERE replica_id IS NOT NULL"
    async with running(database, first.network, drain_s=0.1):
        await publish(database, "a")
        await until(lambda: len(first.network.sent) == len(slow) + len(others))
        # The slow requests stay in flight on the first replica; the other endpoints move without
        # them.
        async with running(database, second.network, drain_s=0.1):
            await until(lambda: _query_returns(database, owners, 2))
            await publish(database, "b")
            both = [first, second]
            await until(
                lambda: all(
                    sorted(d for h in both for d in h.got(name)) == ["a", "b"] for name in others
                )
            )
            assert second.network.accepted


async def _query_returns(database: Database, sql: str, wanted: object) -> bool:
    return await fetchval(database, sql) == wanted


# -------------------------------------------------------------------- replays


async def _replay(database: Database) -> None:
    async with database.connection(**SESSION) as connection:
        await replays.start_replay(
            connection, "relay", DeadLetterSelection(everything=True), actor="test"
        )


@pytest.mark.full
async def test_a_dead_lettered_replay_can_be_replayed(database: Database) -> None:
    await add_endpoint(database, lanes=3)
    network = Network(lambda _: REFUSED)
    alone = "SELECT count(*)::int FROM dead_letter"
    async with running(database, network):
        await publish(database, "a", key="k")
        await until(lambda: _query_returns(database, alone, 1))
        await _replay(database)
        await until(lambda: _query_returns(database, alone, 2))
        network.script = lambda _: OK
        # The event may already be deleted: the dead letter has a copy.
        await remove_events(database)
        await _replay(database)
        await until(lambda: network.accepted)
    first, second, third = network.sent
    assert [s.seq for s in network.sent] == [1, 2, 3]
    assert [s.previous_seq for s in network.sent] == [0, 0, 0]
    assert len({s.lane for s in network.sent}) == len({s.delivery for s in network.sent}) == 1
    assert first.body.get("replay_of") is None
    assert second.body["replay_of"] == {"lane": first.lane, "sequence": 1}
    assert third.body["replay_of"] == {"lane": first.lane, "sequence": 2}
    assert {**third.body, "replay_of": 0, "sequence": 0} == {
        **second.body,
        "replay_of": 0,
        "sequence": 0,
    }


@pytest.mark.full
async def test_a_removal_ends_waiting_and_running_replays(database: Database) -> None:
    await add_endpoint(database, "e", retry=SLOW_RETRY)
    network = Network(lambda _: REFUSED)
    async with killed_at_the_end(database, network):
        await publish(database, "a", "b")
        await until(lambda: _query_returns(database, "SELECT count(*)::int FROM dead_letter", 2))
        network.script = lambda _: BUSY
        await _replay(database)
        await until(lambda: fetchval(database, "SELECT retry_seq FROM lane_progress"))
    # The second replay waited for the first; no relay sequences now, so both wait.
    await fetchval(database, "UPDATE dead_letter SET state = 'dead' WHERE seq = 1")
    await _replay(database)
    await _remove(database, "e")
    async with running(database, network):
        sql = "SELECT state = 'removed' FROM endpoint"
        await until(lambda: fetchval(database, sql))
    sql = "SELECT array_agg((seq, to_seq, state, reason)::text ORDER BY seq) FROM dead_letter"
    assert await fetchval(database, sql) == [
        "(1,1,dead,refused)",
        "(2,2,dead,refused)",
        "(3,3,dead,removed)",
    ]
    assert await fetchval(database, "SELECT count(*) FROM replay WHERE next_seq <= to_seq") == 0
    assert await exceptions(database) == {}


# ----------------------------------------------------------- continuous load


class Replica:
    """A registered replica that owns the only lane of the only endpoint."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def start(self, endpoint_id: UUID) -> Replica:
        replicas = ReplicaStore(await self.database.connect(**SESSION))
        self.id = await register(replicas)
        self.epochs = await replicas.claim(self.id, [endpoint_id], "test")
        (self.epoch,) = self.epochs.values()
        self.connection = await self.database.connect(**SESSION)
        lane_id = await fetchval(self.database, "SELECT id FROM lane")
        self.lane = Lane(LaneSnapshot(lane_id, 10**9, Progress()), 0)
        return self


class ContinuousLoad(RecordStore):
    """The next success always arrives while a group is being written."""

    recorder: Recorder
    replica: Replica
    seq = 0

    async def write(self, records: Sequence[Record], *rest: Any) -> None:
        self.arrive()
        await super().write(records, *rest)

    def arrive(self) -> None:
        self.seq += 1
        row = AttemptRow(1, self.seq, 1, "delivered", 204, None, 1.0, 0.001)
        lane = self.replica.lane
        self.recorder.add(lane, self.replica.epoch, Record(lane.id, self.seq, row))


async def _never_idle(database: Database) -> tuple[ContinuousLoad, asyncio.Task[None]]:
    endpoint = await add_endpoint(database)
    replica = await Replica(database).start(endpoint.id)
    store = ContinuousLoad(replica.connection, replica.id)
    store.replica = replica
    store.recorder = Recorder(store, 0.0, lambda: 60.0, DeliveryHistory())
    store.arrive()
    return store, asyncio.create_task(store.recorder.run())


async def test_the_successor_of_a_dead_relay_writes_the_missing_checkpoints(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.delivery.recorder.CHECKPOINT_EVERY_S", 3600.0)
    await add_endpoint(database)
    logged = "SELECT count(*) = 5 FROM attempt"
    async with killed_at_the_end(database, Network()):
        await publish(database, *range(5))
        await until(lambda: fetchval(database, logged))
    progress = "SELECT acked_seq FROM lane_progress"
    assert await fetchval(database, progress) == 0
    monkeypatch.setattr("outbox.relay.delivery.recorder.CHECKPOINT_EVERY_S", 0.05)
    idle = Network()
    async with running(database, idle):
        await until(lambda: fetchval(database, f"SELECT ({progress}) = 5"), what="a checkpoint")
    assert idle.sent == []


@pytest.mark.full
async def test_checkpoints_are_written_under_continuous_load(database: Database) -> None:
    store, task = await _never_idle(database)
    await until(lambda: fetchval(database, "SELECT acked_seq > 0 FROM lane_progress"))
    assert not task.done()
    task.cancel()
    assert store.seq > 1


async def test_waiting_for_the_recorder_covers_earlier_records(database: Database) -> None:
    store, task = await _never_idle(database)
    await until(lambda: store.seq > 5)
    before = store.seq
    async with asyncio.timeout(20):
        await store.recorder.flush()
    assert await fetchval(database, "SELECT max(seq) FROM attempt") >= before
    assert not task.done()
    task.cancel()


async def test_a_cancelled_wait_for_the_recorder_does_not_affect_a_lane(database: Database) -> None:
    endpoint = await add_endpoint(database)
    replica = await Replica(database).start(endpoint.id)
    store = RecordStore(replica.connection, replica.id)
    lane = replica.lane
    recorder = Recorder(store, 0.0, lambda: 60.0, DeliveryHistory())
    row = AttemptRow(1, 1, 1, "retry", 503, None, 1.0, 0.001)
    record = Record(lane.id, 1, row, Progress(0, 0, 1, 1, 1, 1, 1.0, 2.0, {}))
    writing = asyncio.create_task(recorder.write(lane, replica.epoch, record))
    waiter = asyncio.create_task(recorder.flush())
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait([waiter])
    task = asyncio.create_task(recorder.run())
    async with asyncio.timeout(20):
        await writing
    task.cancel()


async def test_the_receipt_of_a_partial_append_is_written_without_a_later_success(
    database: Database,
) -> None:
    endpoint = await add_endpoint(database)
    replica = await Replica(database).start(endpoint.id)
    lane = replica.lane
    recorder = Recorder(
        RecordStore(replica.connection, replica.id), 0.0, lambda: 60.0, DeliveryHistory()
    )
    lane.stream = StreamPosition()
    lane.stream.record_receipt(1, "receipt 1")
    stored = AttemptRow(1, 1, 1, "delivered", None, None, 1.0, 0.001)
    recorder.add(lane, replica.epoch, Record(lane.id, 1, stored))
    rest = AttemptRow(1, 2, 1, "retry", None, "full", 1.0, 0.001)
    failed = Record(lane.id, 2, rest, Progress(1, 1, 1, 2, 1, 0, 1.0, 2.0, {}))
    task = asyncio.create_task(recorder.run())
    await recorder.write(lane, replica.epoch, failed)
    await recorder.checkpoint()
    task.cancel()
    assert await fetchval(database, "SELECT receipt FROM lane_receipt") == "receipt 1"


# ----------------------------------------------------------- transient errors


@pytest.mark.full
async def test_changes_for_a_closing_dispatcher_are_no_error(database: Database) -> None:
    endpoint = await add_endpoint(database, lanes=2)
    for n in range(8):
        await publish(database, n, key=f"k{n}")
    replicas = ReplicaStore(await database.connect(**SESSION))
    me = await register(replicas)
    epochs = await replicas.claim(me, [endpoint.id], "test")
    async with killed_at_the_end(database, Network(), notify=False):
        await until(
            lambda: _query_returns(database, "SELECT sum(last_seq)::int FROM lane_counter", 8)
        )

    ending, ended = asyncio.Event(), asyncio.Event()
    lease_left_s = 60.0

    async def hang(_: Sent) -> AttemptResult:
        try:
            await asyncio.Event().wait()
        finally:
            # Closing takes a moment, during which the rest of the session continues.
            ending.set()
            await ended.wait()
        return OK

    network = Network(hang)
    store = LaneStore(await database.connect(**SESSION))
    recorder = Recorder(
        RecordStore(await database.connect(**SESSION), me), 0.0, lambda: 60.0, DeliveryHistory()
    )
    dispatcher = Dispatcher(store, recorder, network, lambda: lease_left_s, RequestScheduler(10))
    lanes = await store.lanes([endpoint.id])
    known = {e.id: e for e in await store.endpoints([endpoint.id])}
    running_task = asyncio.create_task(dispatcher.run())
    first, second = sorted(lanes, key=lambda lane: lane.id)
    dispatcher.add_endpoints([first], known, epochs, 0)
    await until(lambda: network.sent)
    lease_left_s = 0.0
    dispatcher.add_endpoints([second], known, epochs, 0)
    await ending.wait()
    dispatcher.notify_new_deliveries({first.id: first.last_seq + 1, second.id: second.last_seq + 1})
    ended.set()
    with pytest.raises(ExceptionGroup) as caught:
        await running_task
    assert caught.group_contains(Fenced)
    # No timer is left that would fire hours later.
    dispatcher.notify_new_deliveries({second.id: second.last_seq + 2})


@pytest.mark.full
async def test_a_cancelled_statement_ends_while_the_server_is_unreachable(
    database: Database, logs: Logs
) -> None:
    """The clean-up would open another connection to the server."""
    # Maintenance waits for a producer before it drops a partition.  Because of the foreign key it
    # sets its time limits back afterwards.
    await fetchval(database, "CREATE TABLE mine (id bigint REFERENCES relay.outbox)")
    await fetchval(
        database,
        "INSERT INTO period (kind, number, dropped_at) "
        "VALUES ('events', 2, NULL), ('events', 1, clock_timestamp()) RETURNING number",
    )
    producer = await database.connect(**SESSION)
    await producer.execute("BEGIN; INSERT INTO outbox (type, payload) VALUES ('a.b', '0')")
    sockets = database.server.embedded.socket_dir
    async with through_lines(sockets, database.name) as (lines, dsn):
        async with running(database, Network(), dsn=dsn):
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%CONCURRENTLY%' "
            await until(lambda: fetchval(database, waiting + "AND wait_event_type = 'Lock'"))
            # Also new connections, or each one that was lost would be opened again.
            lines.hang()
            lost = "the session was lost"
            try:
                await until(lambda: any(each["event"] == lost for each in logs), what="its end")
            finally:
                lines.cut()
                lines.heal()
            await until(lambda: fetchval(database, "SELECT max(id) >= 2 FROM replica"))
        await producer.execute("ROLLBACK")


REFUSALS = {
    "attempt_run": "disk_full",
    "lane_progress": "lock_not_available",
    "dead_letter": "query_canceled",
    "delivery_run": "serialization_failure",
    "batch": "idle_in_transaction_session_timeout",
    "lane_counter": "out_of_memory",
    "ownership": "deadlock_detected",
    "journal": "disk_full",
    "replica": "disk_full",
    "endpoint_health": "query_canceled",
    "cursor": "read_only_sql_transaction",
}


# Written once in a session without errors.
REFUSED_CALLS = {"cursor": "1, 2, 4", "endpoint_health": "1, 2, 4"}


@pytest.mark.parametrize(
    "first", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)]
)
async def test_a_statement_that_fails_intermittently_is_retried(
    server: Server, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    # The pause before a new session does not grow with the number of failures.
    monkeypatch.setattr("outbox.relay.relay.RETRY_MAX_S", 0.1)

    async def fail(table: str, database: Database, _: Logs) -> None:
        await add_endpoint(database, lanes=2)
        # A sequence counts the calls, because the failing transaction rolls back everything else.
        async with database.connection(**SESSION) as connection:
            await connection.execute(f"""
                CREATE SEQUENCE calls;
                CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
                DECLARE n bigint := nextval('relay.calls');
                BEGIN
                    IF n = ANY ('{{{REFUSED_CALLS.get(table, "2, 3, 5, 9")}}}'::bigint[]) THEN
                        RAISE EXCEPTION 'no' USING ERRCODE = '{REFUSALS[table]}';
                    END IF;
                    RETURN NULL;
                END $$;
                CREATE TRIGGER refuse AFTER INSERT OR UPDATE ON {table}
                    FOR EACH STATEMENT EXECUTE FUNCTION refuse()""")
        network = Network(lambda s: REFUSED if s.seq == 3 else BUSY if s.attempt < 2 else OK)
        # Short enough for a failed renewal, and long enough to register on a busy machine.
        async with running(database, network, lease_s=4.0):
            for n in range(16):
                await publish(database, n, key=f"k{n}")
            await all_ended(database)
            for n in range(16, 20):
                await publish(database, n, key=f"k{n}")
            await all_ended(database)
            if table == "replica":
                await until(lambda: fetchval(database, "SELECT last_value > 1 FROM calls"))
        for lane in {s.lane for s in network.accepted}:
            first_arrivals = list(dict.fromkeys(s.seq for s in network.accepted if s.lane == lane))
            assert first_arrivals == sorted(first_arrivals)
            for s in network.accepted:
                assert s.previous_seq == s.seq - 1 - (s.seq == 4)
        assert await fetchval(database, "SELECT last_value FROM calls") > 1
        assert await exceptions(database) == {}

    await run_concurrently(server, [*REFUSALS][first::3], fail)


@pytest.mark.full
async def test_the_defaults_of_a_database_do_not_affect_a_relay(
    database: Database,
) -> None:
    """Such as another isolation level, limits, and formats."""
    for setting in (
        "synchronous_commit = off",
        "default_transaction_isolation = 'serializable'",
        "default_transaction_read_only = on",
        "statement_timeout = '100ms'",
        "lock_timeout = '1ms'",
        "idle_session_timeout = '200ms'",
        # What literals and texts mean.
        "array_nulls = off",
        "standard_conforming_strings = off",
        "DateStyle = 'SQL, DMY'",
        "IntervalStyle = 'sql_standard'",
        "TimeZone = 'Asia/Kathmandu'",
        "bytea_output = 'escape'",
        "extra_float_digits = -3",
        "transform_null_equals = on",
    ):
        name = database.name
        await database.server.execute(f"ALTER DATABASE {name} SET {setting}")
    network = Network(lambda sent: REFUSED if sent.seq % 7 == 0 else OK)
    async with database.connection(**SESSION) as connection:
        for setting in ("default_transaction_read_only", "statement_timeout", "lock_timeout"):
            await connection.execute(f"SET {setting} = 0")
        await connection.execute("SET idle_session_timeout = 0")
        settings = EndpointSettings(name="e", url="http://r.test/e", lanes=1)
        await endpoint_changes.add_endpoint(connection, "relay", settings, actor="test")
        async with running(database, network):
            for n in range(30):
                await connection.execute(
                    "INSERT INTO outbox (type, payload) VALUES ('a.b', $1)", str(n)
                )
                await until(lambda n=n: len(network.sent) == n + 1)
            replicas = await connection.fetchval("SELECT max(id) FROM replica")
            batches = await connection.fetchval("SELECT count(*) FROM batch")
    assert replicas == 1
    assert batches > 1


async def test_a_time_out_of_the_role_does_not_interrupt_listening(
    database: Database, logs: list[MutableMapping[str, Any]]
) -> None:
    """It would poll for ever."""
    async with database.at_hand() as connection:
        owner = await connection.fetchval("SELECT current_user")
    for name in ("statement_timeout", "lock_timeout"):
        await database.server.execute(
            f'ALTER ROLE "{owner}" IN DATABASE {database.name} SET {name} = 1'
        )
    await_listener = """
        SELECT count(*) FROM pg_stat_activity
         WHERE datname = current_database() AND application_name LIKE '%listen%'
           AND query LIKE 'LISTEN%' AND state = 'idle'
    """
    async with running(database, Network()) as worker:
        await until(lambda: worker.started.is_set(), what="the relay")
        async with database.connection(server_settings={"statement_timeout": "0"}) as connection:
            await until(lambda: connection.fetchval(await_listener), what="the listener")
    interrupted = [each for each in logs if each["event"] == "listening was interrupted"]
    assert interrupted == []


async def test_an_unexpected_error_that_ends_a_relay_is_logged_with_its_place(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It happens once in weeks, and cannot be repeated with another log level."""

    def next_command(*_: Any) -> None:
        raise ValueError("odd")

    await add_endpoint(database)
    await publish(database, 1, 2)
    monkeypatch.setattr(Lane, "next", next_command)
    with capture_logs() as logs, pytest.raises(Exception, match=r"odd|sub-exception"):
        await relay(database, Network()).run()
    (logged,) = [each for each in logs if each["log_level"] == "error"]
    assert logged["event"] == "an unexpected error ends the relay"
    text = "".join(traceback.format_exception(logged["exc_info"]))
    assert "in next_command" in text
    assert "ValueError: odd" in text

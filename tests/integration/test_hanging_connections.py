"""Hanging database connections: a proxy accepts all data and forwards none, so neither kernel
reports an error.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from outbox.errors import DatabaseUnavailable
from outbox.relay.cluster.watchdog import RECHECK_MAX_S, Watchdog
from outbox.store.cluster import sessions
from outbox.store.cluster.replicas import Renewal, ReplicaStore
from outbox.store.connection.store_connection import StoreConnection, Worker
from outbox.store.delivery.delivery_reads import READ_EVENTS
from outbox.store.retention import partitions
from tests.support.concurrent_cases import run_concurrently
from tests.support.load import OWNERS, under_load
from tests.support.relay import (
    BUSY,
    OK,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.tcp import through_lines
from tests.support.virtual_time import run_virtual
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from outbox.core.model.response import AttemptResult
    from tests.support.concurrent_cases import Logs
    from tests.support.postgres import Database, Server
    from tests.support.relay import Sent
    from tests.support.tcp import Lines

pytestmark = pytest.mark.one_major

OPENED = (
    "ownership",
    "sequencing",
    "renewal",
    "reading",
    "recording",
    "supervision",
    "schedules",
    "maintenance",
    "listen",
)
"""The connections of a session, in the order in which it opens them."""


@pytest.fixture(autouse=True)
def _busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint supervisor and maintenance always have work."""
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.ENDPOINTS_CHECK_EVERY_S", 0.1)
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.SURVEY_EVERY_S", 0.1)
    monkeypatch.setattr("outbox.relay.maintenance.EVERY_S", 0.1)
    monkeypatch.setattr("outbox.relay.cluster.listener.HEARTBEAT_MIN_S", 0.3)
    monkeypatch.setattr("outbox.relay.cluster.listener.HEARTBEAT_TIMEOUT_S", 0.3)


def sockets(database: Database) -> Path:
    return database.server.embedded.socket_dir


LEASE_S = 6.0
LATE_IS_OWNED = """
SELECT replica_id IS NOT NULL FROM ownership JOIN endpoint e ON e.id = endpoint_id
 WHERE e.name = 'late'
"""
OPENED_AGAIN = "a lost connection was opened again"


def dead_lettered(logs: list[Any]) -> bool:
    """Whether a connection was closed as hanging. A busy machine may lose a lease of one second;
    that is a different error.
    """
    return any("hangs" in each.get("reason", "") for each in logs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        OPENED[:1],
        pytest.param(OPENED[1:4], marks=pytest.mark.full),
        pytest.param(OPENED[4:], marks=pytest.mark.full),
    ],
    ids=" ".join,
)
async def test_a_hanging_connection_is_opened_again_within_two_leases(
    server: Server, kinds: tuple[str, ...]
) -> None:
    """The session keeps its lease and its lanes, and sends nothing twice."""

    async def hang(which: str, database: Database, logs: Logs) -> None:
        event, says = "a connection is opened again", f"the connection for {which} hangs"
        if which == "listen":
            event, says = "listening was interrupted", "TimeoutError"
        elif which == "renewal":
            event, says = OPENED_AGAIN, ""

        def noticed() -> bool:
            return any(e["event"] == event and says in e.get("reason", "") for e in logs)

        loop = asyncio.get_running_loop()
        async with (
            through_lines(sockets(database), database.name) as (lines, dsn),
            # A busy machine may lose a short lease; these are then the connections of a session
            # that has ended.
            under_load(database, pause_s=0.03, dsn=dsn, lease_s=LEASE_S) as load,
        ):
            await until(lambda: len(lines.opened) >= len(OPENED))
            owned = await fetchval(database, OWNERS)
            lines.opened[OPENED.index(which)].hangs = True
            hung_at = loop.time()
            await until(noticed, what="the hanging connection to be noticed")
            took_s = loop.time() - hung_at
            await load.arrives()
            assert await fetchval(database, OWNERS) == owned, f"the lanes of {which} moved"
        assert load.copies() == 0
        assert dead_lettered(logs) == (which not in ("listen", "renewal"))
        print(f"{which}: noticed after {took_s:.2f} s with a lease of {LEASE_S:g} s")

    await run_concurrently(server, kinds, hang)


async def test_a_write_without_a_confirmation_is_not_repeated(server: Server) -> None:
    """Only the responses are dropped: the statements are executed."""

    async def mute(case: str, database: Database, logs: Logs) -> None:
        which = case.partition(" ")[0]
        await add_endpoint(database)
        # The endpoint that is added later gets the same events.
        wanted = "http://receiver.test/" + ("late" if which == "ownership" else "shop")

        def respond(sent: Sent) -> AttemptResult:
            fails = case.endswith("failure") and (sent.seq, sent.attempt) == (2, 1)
            return BUSY if fails else OK

        def arrived() -> list[Any]:
            return [s.body["data"] for s in network.accepted if s.url == wanted]

        network = Network(respond)
        async with (
            through_lines(sockets(database), database.name) as (lines, dsn),
            running(database, network, dsn=dsn),
        ):
            await publish(database, 0)
            delivered = "SELECT count(*)::int FROM attempt WHERE outcome = 'delivered'"
            await until(lambda: fetchval(database, f"SELECT ({delivered}) = 1"))
            await until(lambda: len(lines.opened) >= len(OPENED))
            lines.opened[OPENED.index(which)].mute = True
            if which == "ownership":
                await add_endpoint(database, "late", lanes=1)
                await until(lambda: fetchval(database, LATE_IS_OWNED), what="the claim")
            await publish(database, 1)
            done = "SELECT max(last_seq) = 2 FROM lane_counter"
            if which == "recording":
                done = "SELECT count(*) >= 2 FROM attempt"
            await until(lambda: fetchval(database, done), what="the server to do it")
            await publish(database, 2)
            await until(lambda: 2 in arrived(), what="the relay to go on")
            await all_ended(database)
        # What was acknowledged, or sequenced, is not sent again.
        assert arrived() == ([1, 2] if which == "ownership" else [0, 1, 2])
        refused = "SELECT count(*) FROM journal WHERE kind = 'row_refused'"
        assert await fetchval(database, refused) == 0, "a row was written again"
        assert not any(each["event"] == "the session was lost" for each in logs)
        deliveries = 5 if which == "ownership" else 3
        assert await fetchval(database, "SELECT count(*) FROM delivery") == deliveries
        assert await fetchval(database, delivered) == deliveries
        assert await exceptions(database) == {}

    cases = ("sequencing", "recording", "recording a failure", "ownership")
    await run_concurrently(server, cases, mute)


@pytest.mark.full
async def test_a_connection_of_maintenance_that_hangs_while_it_is_opened_again(
    database: Database, logs: list[Any]
) -> None:
    """Nothing waits for it, and yet partitions must be created."""
    async with (
        through_lines(sockets(database), database.name) as (lines, dsn),
        running(database, Network(), dsn=dsn, lease_s=LEASE_S),
    ):
        await until(lambda: len(lines.opened) >= len(OPENED))
        lines.last_words = sessions.READ_SURVIVES.encode()
        lines.opened[OPENED.index("maintenance")].cut()
        await until(lambda: lines.last_words is None, what="the new connection to hang")
        await until(lambda: any(each["event"] == OPENED_AGAIN for each in logs), what="another one")
    assert not any(each["event"] == "the session was lost" for each in logs)


@pytest.mark.full
async def test_a_connection_that_hangs_at_session_start_does_not_block_the_session(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.registration.REGISTER_S", 2.0)

    async def hang(which: str, database: Database, _: Logs) -> None:
        opened = OPENED.index(which)
        await add_endpoint(database)
        network = Network()
        async with through_lines(sockets(database), database.name) as (lines, dsn):
            limited = f"{dsn}?connect_timeout=2"
            async with running(database, network, dsn=limited):
                await publish(database, 1)
                await until(lambda: network.accepted)
                await until(lambda: len(lines.opened) >= len(OPENED))
                # All connections are lost; one connection of the next session hangs once it is
                # open.
                begun = len(lines.opened)

                async def hang_one() -> None:
                    await until(lambda: len(lines.opened) > begun + opened)
                    lines.opened[begun + opened].hangs = True

                hanging = asyncio.create_task(hang_one())
                for line in lines.opened[:begun]:
                    line.cut()
                await hanging
                await publish(database, 2)
                await until(lambda: 2 in network.data(), what="the relay to go on")
        await all_ended(database)

    await run_concurrently(server, ("ownership", "sequencing", "schedules"), hang)


@pytest.mark.full
async def test_a_session_that_hangs_during_a_takeover_delays_nothing(server: Server) -> None:
    """The server executes the message, and the response does not arrive."""

    async def hang(name: str, database: Database, logs: Logs) -> None:
        await add_endpoint(database)
        network = Network()
        async with through_lines(sockets(database), database.name) as (lines, dsn):
            async with running(database, network, dsn=dsn):
                await publish(database, 1)
                await until(lambda: network.accepted)
                await until(lambda: len(lines.opened) >= len(OPENED))
                # The next session takes over from this one and hangs during the takeover.
                lines.last_words = words[name]
                for line in list(lines.opened):
                    line.cut()
                await until(lambda: lines.last_words is None, what="the next session to hang")
                await publish(database, 2)
                await until(lambda: 2 in network.data(), what="the relay to go on")
            assert network.data()[-1] == 2
        assert not any("lease ran out" in each["event"] for each in logs), "it was waited for"
        assert await exceptions(database) == {}

    words = {
        "terminate": sessions.TERMINATE_SESSIONS.encode(),
        "expire": b"EXECUTE release_all_endpoints",
        "claim": b"EXECUTE claim_endpoints",
    }
    await run_concurrently(server, words, hang)


LOCKS_ARE_FREE = """
SELECT count(*) = 0 FROM pg_locks l JOIN pg_stat_activity a USING (pid)
 WHERE a.application_name LIKE 'outbox-relay:%' AND a.datname = current_database()
"""


async def hang_with_locks(lines: Lines, database: Database) -> None:
    """Let the maintenance connection of a starting relay hang when the server has its statement."""
    reads = """
        SELECT count(*) > 0 FROM pg_stat_activity
         WHERE datname = current_database() AND state <> 'idle' AND query LIKE '%generate_series%'
           AND application_name LIKE 'outbox-relay:%'"""
    lines.last_words = partitions.READ_MISSING.encode()
    await until(lambda: lines.last_words is None, what="the connection to hang")
    # What the network delivers after the relay has looked is found by another relay.
    await until(lambda: fetchval(database, reads), what="the server to have it")


async def test_a_clean_stop_releases_the_locks_of_a_hanging_connection(server: Server) -> None:
    """A replica that left is not expired, so its sessions are not terminated either."""

    async def stop(forwarded: str, database: Database, _: Logs) -> None:
        async with through_lines(sockets(database), database.name) as (lines, dsn):
            async with running(database, Network(), dsn=dsn):
                if forwarded == "half":
                    await hang_with_locks(lines, database)
                else:
                    lines.forward_last_data = False
                    lines.last_words = b"EXECUTE take_maintenance"
                    await until(lambda: lines.last_words is None, what="the connection to hang")
            assert await fetchval(database, "SELECT count(*) FROM replica") == 0
            await until(lambda: fetchval(database, LOCKS_ARE_FREE), what="the locks to be free")

    await run_concurrently(server, ("half", "nothing"), stop)


async def test_a_clean_stop_releases_these_locks_though_a_renewal_finds_no_lease(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, a renewal is sent before the response to the release has arrived."""
    renewals: list[Renewal] = []
    renew, release_all = ReplicaStore.renew, ReplicaStore.release_all

    async def recorded(self: ReplicaStore, *args: Any, **options: Any) -> Renewal:
        renewals.append(await renew(self, *args, **options))
        return renewals[-1]

    async def release(self: ReplicaStore, *args: Any) -> None:
        await release_all(self, *args)
        await until(lambda: Renewal.FENCED in renewals, what="the renewal after the release")

    monkeypatch.setattr(ReplicaStore, "renew", recorded)
    monkeypatch.setattr(ReplicaStore, "release_all", release)
    async with through_lines(sockets(database), database.name) as (lines, dsn):
        async with running(database, Network(), dsn=dsn):
            await hang_with_locks(lines, database)
        assert renewals[-1] is Renewal.FENCED
        await until(lambda: fetchval(database, LOCKS_ARE_FREE), what="the locks to be free")


@pytest.mark.full
async def test_a_lock_wait_is_not_taken_for_a_hanging_connection(
    database: Database, logs: list[Any]
) -> None:
    await add_endpoint(database)
    network = Network()
    async with running(database, network), database.connection() as operator:
        await publish(database, 1)
        await until(lambda: network.accepted)
        async with operator.transaction():
            await operator.execute("LOCK relay.attempt, relay.lane_progress IN EXCLUSIVE MODE")
            await publish(database, 2)
            await until(lambda: len(network.accepted) == 2)
            waiting = """SELECT clock_timestamp() - min(state_change) > interval '3 s'
                           FROM pg_stat_activity WHERE wait_event_type = 'Lock'"""
            await until(lambda: fetchval(database, waiting), what="three leases to pass")
        await publish(database, 3)
        await all_ended(database)
    assert list(dict.fromkeys(network.data())) == [1, 2, 3]
    assert not dead_lettered(logs)


@pytest.mark.full
@pytest.mark.slow
async def test_a_slow_response_is_not_taken_for_a_hanging_connection(
    database: Database, logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One lane's read fits into the buffers between server and proxy; those of many do not.
    monkeypatch.setattr("outbox.core.delivery.delivery_buffer.READ_BYTES_MAX", 8 << 20)
    await add_endpoint(database)
    network = Network()
    async with (
        through_lines(sockets(database), database.name) as (lines, dsn),
        running(database, network, dsn=dsn),
    ):
        # Too large to be returned with its batch: it is read with a prepared statement.
        large = """INSERT INTO outbox (type, payload)
                   SELECT 'a.b', to_jsonb((SELECT string_agg(md5(n * i || ''), '')
                                             FROM generate_series(1, 6000) i))
                     FROM generate_series(1, $1::int) n"""
        await fetchval(database, large, 1)
        await until(lambda: network.accepted)
        reading = lines.opened[OPENED.index("reading")]
        fetch = StoreConnection.fetch

        async def stopped(self: Any, query: str, *args: Any, **options: Any) -> Any:
            # From here on, and not already at the small response before it.
            if query == READ_EVENTS:
                reading.flows.clear()
            return await fetch(self, query, *args, **options)

        monkeypatch.setattr(StoreConnection, "fetch", stopped)
        await fetchval(database, large, 30)
        sending = """SELECT clock_timestamp() - min(query_start) > interval '3 s'
                       FROM pg_stat_activity WHERE wait_event = 'ClientWrite'"""
        await until(lambda: fetchval(database, sending), what="three leases to pass")
        monkeypatch.undo()
        reading.flows.set()
        await until(lambda: len({s.seq for s in network.accepted}) == 31, what="the rest")
        await all_ended(database)
    assert not dead_lettered(logs)


@pytest.mark.full
async def test_a_failed_registration_is_retried(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.registration.REGISTER_S", 2.0)
    await add_endpoint(database)
    network = Network()
    with capture_logs() as logs:
        async with running(database, network), database.connection() as operator:
            await publish(database, 1)
            await until(lambda: network.accepted)
            async with operator.transaction():
                await operator.execute("LOCK relay.replica IN ACCESS EXCLUSIVE MODE")
                # Otherwise the session ends with its lease.
                await operator.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE application_name ~ '^outbox-relay' AND datname = current_database()"
                )

                def refused() -> bool:
                    return any("to register a replica" in each.get("reason", "") for each in logs)

                await until(refused, what="the relay to give up waiting")
            await publish(database, 2)
            await until(lambda: 2 in network.data(), what="the relay to go on")


@pytest.mark.full
@pytest.mark.slow
async def test_a_stop_does_not_wait_for_a_blocked_statement(server: Server) -> None:
    """The server reports the backend as active all the time."""

    async def block(table: str, database: Database, _: Logs) -> None:
        await add_endpoint(database)
        network = Network()
        async with (
            database.connection() as operator,
            operator.transaction(),
            asyncio.timeout(30),
            running(database, network, drain_s=1.0),
        ):
            await publish(database, 1)
            await until(lambda: network.accepted)
            await operator.execute(f"LOCK relay.{table} IN ACCESS EXCLUSIVE MODE")
        async with running(database, network):
            await publish(database, 2)
            await until(lambda: 2 in network.data(), what="another relay to take over")
            await all_ended(database)
        assert await exceptions(database) == {}

    await run_concurrently(server, ("lane_progress", "cursor"), block)


async def test_a_stop_does_not_wait_for_a_blocked_registration(
    database: Database,
) -> None:
    async with database.connection() as operator, operator.transaction():
        await operator.execute("LOCK relay.replica IN ACCESS EXCLUSIVE MODE")
        async with asyncio.timeout(20), running(database, Network(), lease_s=60, drain_s=1.0):
            waiting = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock')"
            await until(lambda: fetchval(database, waiting))
    assert await fetchval(database, "SELECT count(*) FROM replica") == 0


# ---------------------------------------------------------------- the watchdog


class FakeConnection:
    """A connection with a configurable waiting time."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.requested_at: float | None = None
        self.statements_started = 0

    def start_statement(self) -> None:
        self.statements_started += 1
        self.requested_at = asyncio.get_running_loop().time()

    @property
    def waiting_s(self) -> float:
        if self.requested_at is None:
            return 0.0
        return asyncio.get_running_loop().time() - self.requested_at

    def get_server_pid(self) -> int:
        return self.pid

    def terminate(self) -> None:
        raise AssertionError("that is for the session to do")

    def reconnect(self) -> bool:
        return False


class FakeServer:
    """Records the queries about backends and returns scripted states."""

    def __init__(self) -> None:
        self.at_work: set[int] = set()
        self.silent = False
        self.queries: list[set[int]] = []

    async def working(self, pids: Collection[int]) -> Mapping[int, None]:
        self.queries.append(set(pids))
        if self.silent:
            raise DatabaseUnavailable("no connection left")
        return dict.fromkeys(self.at_work & set(pids))


def _terminated_after(
    prepare: Callable[[FakeConnection, FakeServer], None],
    *,
    pooled: bool = False,
    name: str = "reading",
) -> tuple[float | None, FakeServer]:
    """When a watchdog with a lease of 5 s terminated the connection within two hours, and which
    backends it queried.
    """
    server = FakeServer()

    async def watch() -> float | None:
        connection = FakeConnection(7)
        connection.start_statement()
        prepare(connection, server)
        watchdog = Watchdog({name: connection}, None if pooled else server.working, 5.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(7200):
                with pytest.raises(DatabaseUnavailable, match=f"connection for {name} hangs"):
                    await watchdog.run()
                return asyncio.get_running_loop().time()
        return None

    return run_virtual(watch()), server


async def test_a_closed_connection_waits_for_nothing(database: Database) -> None:
    """The watchdog may poll before the waiting caller gets the error."""
    connection = await database.connect(connection_class=Worker)
    waiter = asyncio.ensure_future(connection.execute("SELECT pg_sleep(100)"))
    await until(lambda: connection.waiting_s > 0)
    connection.terminate()
    assert not waiter.done()
    assert connection.waiting_s == 0
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await waiter


class CutHalfWay(Worker):
    """The connection is closed when a statement is prepared and not executed yet."""

    __slots__ = ()

    async def _get_statement(self, *args: Any, **kwargs: Any) -> Any:
        statement = await super()._get_statement(*args, **kwargs)
        self.terminate()
        return statement


async def test_a_connection_closed_between_prepare_and_execute_counts_as_lost(
    database: Database,
) -> None:
    """asyncpg finds its protocol gone; the relay must not treat that as a defect of its own."""
    connection = await database.connect(connection_class=CutHalfWay)
    with pytest.raises(asyncpg.InterfaceError, match="connection was lost"):
        await connection.fetch("SELECT $1::int", 1)


def test_an_idle_backend_is_terminated_within_a_lease() -> None:
    terminated_at, _ = _terminated_after(lambda *_: None)
    assert terminated_at is not None
    assert terminated_at <= 5.0


def test_a_working_backend_is_polled_with_backoff_and_never_terminated() -> None:
    terminated_at, server = _terminated_after(lambda _, server: server.at_work.add(7))
    assert terminated_at is None
    assert 7200 / RECHECK_MAX_S <= len(server.queries) < 7200 / RECHECK_MAX_S + 10


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize(("name", "patience_s"), [("reading", 60), ("maintenance", 3600)])
def test_a_timeout_decides_when_the_backend_state_is_unknown(
    name: str, patience_s: int, pooled: bool
) -> None:
    with capture_logs() as logs:
        terminated_at, _ = _terminated_after(
            lambda _, server: setattr(server, "silent", True), pooled=pooled, name=name
        )
    assert terminated_at is not None
    assert patience_s <= terminated_at <= patience_s + 2
    assert len(logs) == (not pooled)


def test_an_idle_connection_is_not_polled() -> None:
    terminated_at, server = _terminated_after(lambda each, _: setattr(each, "requested_at", None))
    assert terminated_at is None
    assert server.queries == []


def test_consecutive_short_statements_do_not_add_up() -> None:
    def keep_asking(connection: FakeConnection, server: FakeServer) -> None:
        connection.start_statement()
        asyncio.get_running_loop().call_later(2.5, keep_asking, connection, server)

    terminated_at, _ = _terminated_after(keep_asking)
    assert terminated_at is None
